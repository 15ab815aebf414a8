//go:build etcd

package etcd

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/nixlgo/nixlgo/cgo_test/etcdserver"
	"github.com/nixlgo/nixlgo/rdma"
)

// A value that nobody here would put there is an error, not an allocation of any size.
func TestValueBeyondTheBoundIsRefused(t *testing.T) {
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	c := client(t, s)
	_, err := c.Put(deadline(t), "/nixlgo/engine/0", string(slices.Repeat([]byte("x"), rdma.MaxReply+1)))
	require.NoError(t, err)
	_, _, err = reader.Lookup(deadline(t), "engine", []int{0})
	require.ErrorIs(t, err, rdma.ErrWire)
}

// All of an engine's ranks may be as large as etcd takes values, and so may all changes since a revision.
func TestHugeValuesAreRefusedByName(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	c := client(t, s)
	_, before, _ := reader.Lookup(deadline(t), "engine", []int{0})
	huge := strings.Repeat("x", 1_500_000)
	var ranks []int
	for r := range 2 * ranksAtOnce {
		_, err := c.Put(deadline(t), fmt.Sprint("/nixlgo/engine/", r), huge)
		require.NoError(t, err)
		ranks = append(ranks, r)
	}
	_, _, err := reader.Lookup(deadline(t), "engine", ranks)
	require.ErrorIs(t, err, rdma.ErrWire)
	require.ErrorContains(t, err, "rank 0: 1500000 bytes")
	require.NoError(t, reader.Changed(deadline(t), "engine", before))
}

// Whatever an engine is called, it is not another.
func TestEnginesOfAnyNameStayApart(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, _ := open(t, s)
	reader, _ := open(t, s)
	names := []string{"a", "a/b", "a/", "/a", "a//b", "a%2Fb", "eng", "eng1", "eng/1", ".", "..", "../a", "a\x00", "a\x00b", "\x00", "\xff", "ä", "a\u0308",
		"名前", " ", "a b", "a+b", "a?b", "a#b", "0", "0/0", "nixlgo", "nixlgo/a", strings.Repeat("/", maxEngine)}
	for _, name := range names {
		require.NoError(t, owner.Publish(deadline(t), name, 1, []byte("reply of "+name)))
	}
	r, err := client(t, s).Get(deadline(t), "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	require.NoError(t, err)
	require.Len(t, r.Kvs, len(names))
	for _, k := range r.Kvs {
		require.Regexp(t, "^/nixlgo/[^/\x00]+/1$", string(k.Key))
	}
	for i, name := range names {
		replies, revision, err := reader.Lookup(deadline(t), name, []int{1})
		require.NoError(t, err, name)
		require.Equal(t, "reply of "+name, string(replies[0]))
		require.NoError(t, owner.Withdraw(deadline(t), name, 1))
		require.NoError(t, reader.Changed(deadline(t), name, revision), name)
		_, _, err = reader.Lookup(deadline(t), name, []int{1})
		require.ErrorIs(t, err, rdma.ErrNotListed, name)
		r, err := client(t, s).Get(deadline(t), "/nixlgo/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		require.NoError(t, err)
		require.EqualValues(t, len(names)-i-1, r.Count, name)
	}
	for _, bad := range []string{"", strings.Repeat("x", maxEngine+1)} {
		require.ErrorIs(t, owner.Publish(deadline(t), bad, 1, []byte("x")), rdma.ErrConfig)
		_, _, err := reader.Lookup(deadline(t), bad, []int{1})
		require.ErrorIs(t, err, rdma.ErrConfig)
		require.ErrorIs(t, reader.Changed(deadline(t), bad, 0), rdma.ErrConfig)
	}
}

// What other programs keep beside the ranks is none of them, and is left alone by a session, whatever befalls that.
func TestKeysOfOthersAreNoRanks(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	owner, _ := open(t, s)
	reader, _ := open(t, s)
	c := client(t, s)
	others := []string{"/nixlgo", "/nixlgo/", "/nixlgo/eng", "/nixlgo/eng/", "/nixlgo/eng/00", "/nixlgo/eng/+0", "/nixlgo/eng/-0", "/nixlgo/eng/0 ", "/nixlgo/eng/0\x00",
		"/nixlgo/eng/0/", "/nixlgo/eng/0/0", "/nixlgo/eng//0", "/nixlgo/%65ng/0", "/nixlgo/Eng/0", "/nixlgo//eng/0", "nixlgo/eng/0", "/eng/0", "/nixlgo/eng1/0"}
	for _, key := range others {
		_, err := c.Put(deadline(t), key, "another's")
		require.NoError(t, err)
	}
	_, _, err := reader.Lookup(deadline(t), "eng", []int{0})
	require.ErrorIs(t, err, rdma.ErrNotListed)
	require.NoError(t, owner.Publish(deadline(t), "eng", 0, []byte("ours")))
	ls, err := c.Leases(deadline(t))
	require.NoError(t, err)
	require.Len(t, ls.Leases, 1)
	_, err = c.Revoke(deadline(t), ls.Leases[0].ID)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		replies, _, err := reader.Lookup(deadline(t), "eng", []int{0})
		return err == nil && string(replies[0]) == "ours"
	}, patience, 20*time.Millisecond)
	require.NoError(t, owner.Close())
	for _, key := range others {
		r, err := c.Get(deadline(t), key)
		require.NoError(t, err)
		require.Len(t, r.Kvs, 1, key)
		require.Equal(t, "another's", string(r.Kvs[0].Value))
	}
}

// A key that is deleted and put again between two looks has changed, also with the same content, and also where etcd has
// forgotten the revisions between.
func TestKeyThatWasPutAgainHasChanged(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	c := client(t, s)
	put := func() int64 {
		t.Helper()
		r, err := c.Put(deadline(t), "/nixlgo/engine/0", "same")
		require.NoError(t, err)
		return r.Header.Revision
	}
	put()
	for _, compact := range []bool{false, true} {
		_, revision, err := reader.Lookup(deadline(t), "engine", []int{0})
		require.NoError(t, err)
		_, err = c.Delete(deadline(t), "/nixlgo/engine/0")
		require.NoError(t, err)
		last := put()
		if compact {
			_, err := c.Compact(deadline(t), last)
			require.NoError(t, err)
			r := <-c.Watch(deadline(t), "/nixlgo/engine/0", clientv3.WithRev(revision+1))
			require.ErrorIs(t, r.Err(), rpctypes.ErrCompacted)
		}
		require.NoError(t, reader.Changed(deadline(t), "engine", revision))
		replies, now, err := reader.Lookup(deadline(t), "engine", []int{0})
		require.NoError(t, err)
		require.Equal(t, "same", string(replies[0]))
		require.Equal(t, last, now)
	}
}

// The ranks of an engine are read at one revision, also where that takes more requests than one, and others put over them, delete
// them and compact meanwhile.
func TestRanksAreReadAtOneRevision(t *testing.T) {
	t.Parallel()
	s := etcdserver.Start(t)
	reader, _ := open(t, s)
	c := client(t, s)
	const ranks = 3 * ranksAtOnce
	put := func(life int) clientv3.Op {
		puts := make([]clientv3.Op, ranks)
		for r := range puts {
			puts[r] = clientv3.OpPut(fmt.Sprint("/nixlgo/engine/", r), fmt.Sprint("life ", life))
		}
		return clientv3.OpTxn(nil, puts, nil)
	}
	_, err := c.Do(deadline(t), put(0))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(deadline(t))
	written := make(chan error, 1)
	go func() {
		for life := 1; ; life++ {
			r, err := c.Do(ctx, put(life))
			if err == nil && life%3 == 0 {
				_, err = c.Compact(ctx, r.Txn().Header.Revision)
			}
			if err != nil {
				written <- err
				return
			}
		}
	}()
	all := make([]int, ranks)
	for r := range all {
		all[r] = r
	}
	seen := map[string]bool{}
	for len(seen) < 20 {
		replies, _, err := reader.Lookup(deadline(t), "engine", all)
		require.NoError(t, err)
		require.Len(t, replies, ranks)
		for _, reply := range replies {
			require.Equal(t, string(replies[0]), string(reply))
		}
		seen[string(replies[0])] = true
	}
	require.Empty(t, written)
	cancel()
	require.ErrorIs(t, <-written, context.Canceled)
}

// certificate makes a certificate that server and client have in common, which signs itself.
func certificate(t *testing.T) (certFile, keyFile string, config *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "certified"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	certFile, keyFile = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	require.NoError(t, os.WriteFile(certFile, certPEM, 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600))
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(certPEM))
	return certFile, keyFile, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// TLS, users and roles of Config.Client are etcd's: who has none of them gets nowhere, and who has them outlives a restart, which
// ends all logins.
func TestTLSAndUsers(t *testing.T) {
	t.Parallel()
	certFile, keyFile, ours := certificate(t)
	s := etcdserver.Start(t, "--cert-file="+certFile, "--key-file="+keyFile, "--client-cert-auth", "--trusted-ca-file="+certFile)
	root, err := clientv3.New(clientv3.Config{Endpoints: []string{s.URL}, TLS: ours})
	require.NoError(t, err)
	defer root.Close()
	ctx := deadline(t)
	for _, step := range []func() error{
		func() error { _, err := root.RoleAdd(ctx, "root"); return err },
		func() error { _, err := root.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := root.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := root.RoleAdd(ctx, "team-a"); return err },
		func() error {
			prefix := "/team-a/nixlgo/"
			_, err := root.RoleGrantPermission(ctx, "team-a", prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := root.UserAdd(ctx, "node", "password"); return err },
		func() error { _, err := root.UserGrantRole(ctx, "node", "team-a"); return err },
		func() error {
			_, err := root.UserAddWithOptions(ctx, "certified", "", &clientv3.UserAddOptions{NoPassword: true})
			return err
		},
		func() error { _, err := root.UserGrantRole(ctx, "certified", "team-a"); return err },
		func() error { _, err := root.AuthEnable(ctx); return err },
	} {
		require.NoError(t, step())
	}
	open := func(change func(*Config)) (*Directory, error) {
		c := Config{Namespace: "/team-a"} // and the usual TTL: to log in takes etcd long, on purpose
		c.Client = clientv3.Config{Endpoints: []string{s.URL}, TLS: ours, Username: "node", Password: "password"}
		change(&c)
		d, err := Open(c)
		if err == nil {
			t.Cleanup(func() { d.Close() })
		}
		return d, err
	}

	for name, change := range map[string]func(*Config){
		"no certificate":    func(c *Config) { c.Client.TLS = &tls.Config{RootCAs: ours.RootCAs} },
		"an unknown server": func(c *Config) { c.Client.TLS = &tls.Config{Certificates: ours.Certificates} },
		"no TLS": func(c *Config) {
			c.Client.TLS, c.Client.Endpoints = nil, []string{strings.TrimPrefix(s.URL, "https://")}
		},
	} {
		_, err := open(func(c *Config) { change(c); c.Client.DialTimeout = 200 * time.Millisecond })
		require.Error(t, err, name)
		require.NotErrorIs(t, err, rdma.ErrConfig, "%s: it may be a server that restarts", name)
	}
	_, err = open(func(c *Config) { c.Client.Password = "guess" })
	require.ErrorIs(t, err, rdma.ErrConfig)
	require.ErrorContains(t, err, "password")
	certified := func(c *Config) { c.Client.Username, c.Client.Password = "", "" } // its name is in the certificate
	for name, change := range map[string]func(*Config){
		"by password":    func(*Config) {},
		"by certificate": certified,
	} {
		d, err := open(func(c *Config) { change(c); c.Namespace = "/team-b" })
		require.NoError(t, err, name)
		require.ErrorIs(t, d.Publish(deadline(t), "engine", 0, []byte("x")), rpctypes.ErrPermissionDenied, name)
		_, _, err = d.Lookup(deadline(t), "engine", []int{0})
		require.ErrorIs(t, err, rpctypes.ErrPermissionDenied, name)
		require.ErrorContains(t, d.Changed(deadline(t), "engine", 1), "permission denied", name)
	}
	other, err := open(certified)
	require.NoError(t, err)
	require.NoError(t, other.Publish(deadline(t), "engine", 0, []byte("by certificate")))
	says(t, other, 0, "by certificate")

	owner, err := open(func(*Config) {})
	require.NoError(t, err)
	reader, err := open(func(*Config) {})
	require.NoError(t, err)
	require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("zero")))
	says(t, reader, 0, "zero")
	_, revision, err := reader.Lookup(deadline(t), "engine", []int{0})
	require.NoError(t, err)
	changed := make(chan error, 1)
	go func() {
		err := reader.Changed(ctx, "engine", revision)
		for ctx.Err() == nil && err != nil { // as rdma.Worker does; without the pause, logins would keep etcd busy
			time.Sleep(time.Second)
			err = reader.Changed(ctx, "engine", revision)
		}
		changed <- err
	}()
	s.Kill()
	s.Restart()
	require.NoError(t, owner.Publish(deadline(t), "engine", 0, []byte("next")))
	require.NoError(t, <-changed)
	says(t, reader, 0, "next")
}
