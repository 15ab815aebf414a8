package nixl

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bucket is as much of an S3 server as PUT and GET of whole objects and ranges need.
type bucket struct {
	mu      sync.Mutex
	objects map[string][]byte
}

func (b *bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	data, found := b.objects[r.URL.Path]
	switch r.Method {
	case http.MethodPut:
		body, err := s3Body(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		b.objects[r.URL.Path] = body
		w.Header().Set("ETag", `"1"`)
	case http.MethodGet, http.MethodHead:
		if !found {
			http.Error(w, `<Error><Code>NoSuchKey</Code></Error>`, http.StatusNotFound)
			return
		}
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(data)))
	default:
		http.Error(w, r.Method, http.StatusMethodNotAllowed)
	}
}

// s3Body undoes S3's chunked encoding: hex size;signature, bytes, …, 0, trailers.
func s3Body(r *http.Request) ([]byte, error) {
	if !strings.Contains(r.Header.Get("Content-Encoding"), "aws-chunked") {
		return io.ReadAll(r.Body)
	}
	in, body := bufio.NewReader(r.Body), []byte(nil)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil, err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, err := strconv.ParseInt(size, 16, 32)
		if err != nil {
			return nil, fmt.Errorf("chunk %q: %w", line, err)
		}
		if n == 0 {
			_, err := io.Copy(io.Discard, in)
			return body, err
		}
		chunk := make([]byte, n+2)
		if _, err := io.ReadFull(in, chunk); err != nil {
			return nil, err
		}
		body = append(body, chunk[:n]...)
	}
}

// Objects are remote memory of the agent itself, through the OBJ plugin and HTTP.
func TestObjectsAreWrittenAndRead(t *testing.T) {
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	store := &bucket{objects: map[string][]byte{}}
	server := httptest.NewServer(store)
	t.Cleanup(server.Close)
	a := newUCX(t, Config{})
	obj, err := a.CreateBackend("OBJ", map[string]string{
		"bucket": "kv", "access_key": "k", "secret_key": "s", "region": "eu-central-1",
		"scheme": "http", "endpoint_override": strings.TrimPrefix(server.URL, "http://"), "use_virtual_addressing": "false",
	})
	require.NoError(t, err)
	b := registered(t, a, 8192)
	o, err := NewObjectRange("block/0", 4096)
	require.NoError(t, err)
	r, err := a.Register(o)
	require.NoError(t, err)
	d, err := o.Desc(0, 4096)
	require.NoError(t, err)
	fill(b.Bytes()[:4096], 0x5a)
	for k, op := range []Op{Write, Read} {
		x, err := a.CreateTransfer(op, DRAM, blocks(b, 4096)[k:k+1], a.Name(), Object, []Desc{d}, TransferOptions{Backend: obj})
		require.NoError(t, err)
		finish(t, x)
		require.NoError(t, x.Close())
	}
	require.Equal(t, b.Bytes()[:4096], b.Bytes()[4096:])
	store.mu.Lock()
	require.Equal(t, map[string][]byte{"/kv/block/0": b.Bytes()[:4096]}, store.objects)
	store.mu.Unlock()
	answers, err := obj.Query(Object, []Query{{Name: "block/0"}, {Name: "block/1"}})
	require.NoError(t, err)
	require.NotNil(t, answers[0])
	require.Nil(t, answers[1])
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "a second Close")
}

func TestObjectRangesAreChecked(t *testing.T) {
	for _, c := range []struct {
		key string
		n   int64
	}{{"", 8}, {"k", 0}, {"k", -1}} {
		_, err := NewObjectRange(c.key, c.n)
		require.ErrorIs(t, err, ErrInvalid)
	}
	o, err := NewObjectRange("k", 4096)
	require.NoError(t, err)
	for _, c := range [][2]int64{{-1, 8}, {0, 4097}, {4096, 1}, {0, 0}, {1, math.MaxInt64}} {
		_, err := o.Desc(c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	other, err := NewObjectRange("k", 4096)
	require.NoError(t, err)
	require.NotEqual(t, o.dev, other.dev)
	_, err = newUCX(t, Config{}).Register(o)
	require.ErrorIs(t, err, ErrNotFound, "UCX serves no objects")
}
