package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/rdma/etcd"
)

const (
	envKeyFile       = "NIXLGO_KEY_FILE"
	envEtcd          = "NIXL_ETCD_ENDPOINTS"
	envEtcdNamespace = "NIXL_ETCD_NAMESPACE"
)

// handshakes is with whom a node shakes hands, and where it finds their metadata.
type handshakes struct {
	keyFile, etcd string
}

func (h *handshakes) flags(f *pflag.FlagSet) {
	keyFlag(f, &h.keyFile)
	f.StringVar(&h.etcd, "etcd", os.Getenv(envEtcd), "etcd to leave handshake metadata in and look for that of others, HOST:PORT by comma: $"+envEtcd+", else none")
}

func keyFlag(f *pflag.FlagSet, file *string) {
	f.StringVar(file, "key-file", os.Getenv(envKeyFile), "file with the key that both sides must have, 16 bytes or more: $"+envKeyFile+", else no key")
}

// readKey is the key in a file, without white space at its ends, nil for no file. A key of the command line would be seen by
// every user of the machine.
func readKey(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	const least, most = 16, 4096
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("--key-file: %w", err)
	}
	defer f.Close()
	key, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("--key-file: %w", err)
	}
	if key = bytes.TrimSpace(key); len(key) < least || len(key) > most {
		return nil, fmt.Errorf("--key-file %s: want a key of %d to %d bytes, as openssl rand -hex 32 makes one", file, least, most)
	}
	return key, nil
}

// check reads the key into c, and refuses what is no etcd.
func (h *handshakes) check(c *nixlgo.Config) (err error) {
	if h.etcd != "" {
		for _, e := range h.endpoints() {
			if strings.Contains(e, "://") {
				err = checkURL(e)
			} else {
				err = checkConnect(e)
			}
			if err != nil {
				return fmt.Errorf("--etcd: %w", err)
			}
		}
	}
	c.Key, err = readKey(h.keyFile)
	return err
}

func (h *handshakes) endpoints() []string {
	all := strings.Split(h.etcd, ",")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

// open makes a node, which meets others through etcd if that is asked for. end, which may be called twice, closes both.
func (h *handshakes) open(c nixlgo.Config) (node *nixlgo.Node, end func() error, err error) {
	if h.etcd == "" {
		if node, err = nixlgo.New(c); err != nil {
			return nil, nil, err
		}
		return node, node.Close, nil
	}
	cfg := etcd.Config{Namespace: os.Getenv(envEtcdNamespace), Logger: c.Logger}
	cfg.Client.Endpoints = h.endpoints()
	directory, err := etcd.Open(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("--etcd: %w", err)
	}
	c.Etcd = directory
	if node, err = nixlgo.New(c); err != nil {
		return nil, nil, errors.Join(err, directory.Close())
	}
	return node, func() error { return errors.Join(node.Close(), directory.Close()) }, nil
}
