package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// holdState is a directory with one file per hold, so that a daemon that was killed can go on. A file is there whole or not
// at all.
type holdState struct {
	dir  string
	lock *os.File
}

// holdRecord is what a restarted daemon has to know of a hold.
type holdRecord struct {
	ID      string       `json:"id"`
	Expires time.Time    `json:"expires"`
	Params  lease.Params `json:"kv_transfer_params"` // without the blocks, which only a reader needs
}

const holdSuffix = ".json"

// openHoldState makes dir if it is not there, and takes it for this process alone.
func openHoldState(dir string) (*holdState, error) {
	if err := privateDir(dir); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("%s is in use by another daemon: %w", dir, err), lock.Close())
	}
	return &holdState{dir, lock}, nil
}

// Close lets another process have the directory.
func (s *holdState) Close() error { return s.lock.Close() }

func (s *holdState) path(id string) string { return filepath.Join(s.dir, id+holdSuffix) }

// put writes r to disk, in the place of an earlier record of its id.
func (s *holdState) put(r *holdRecord) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := s.path(r.ID)
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return s.sync()
}

// drop removes the record of id.
func (s *holdState) drop(id string) error {
	if err := os.Remove(s.path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return s.sync()
}

func (s *holdState) sync() error {
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// load reads all records. bad are the files that cannot be read; they stay where they are.
func (s *holdState) load() (records []*holdRecord, bad []error, err error) {
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, err
	}
	for _, f := range files {
		path := filepath.Join(s.dir, f.Name())
		if strings.HasSuffix(f.Name(), holdSuffix+".new") { // was not finished, and so not promised to anybody
			if err := os.Remove(path); err != nil {
				bad = append(bad, err)
			}
			continue
		}
		id, ok := strings.CutSuffix(f.Name(), holdSuffix)
		if !ok {
			continue
		}
		r := new(holdRecord)
		text, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(text, r)
		}
		if err == nil && r.ID != id {
			err = fmt.Errorf("it is of hold %q", r.ID)
		}
		if err != nil {
			bad = append(bad, fmt.Errorf("%s: %w", path, err))
			continue
		}
		records = append(records, r)
	}
	return records, bad, nil
}
