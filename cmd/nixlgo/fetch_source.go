package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// fileSource has the parts of one file.
type fileSource interface {
	offer() fileOffer
	// part is the kv_transfer_params of a part. Called again for the same part it makes a new lease, if repeatable.
	part(ctx context.Context, n int) (*lease.Params, error)
	repeatable() bool
}

// openSource takes a URL, whose server has patience to answer, - for lines of params, or the params themselves.
func openSource(ctx context.Context, args []string, in io.Reader, patience time.Duration) (fileSource, error) {
	if strings.HasPrefix(args[0], "http") {
		s := &urlSource{base: strings.TrimRight(args[0], "/")}
		bounded, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("no answer in %v (--timeout)", patience))
		defer cancel()
		return s, s.do(bounded, http.MethodGet, filePath, &s.file)
	}
	s := &paramsSource{parts: map[int]*lease.Params{}}
	if args[0] != "-" {
		for _, a := range args {
			if err := s.add([]byte(a)); err != nil {
				return nil, err
			}
		}
	} else if err := s.read(ctx, in); err != nil {
		return nil, err
	}
	if len(s.parts) == 0 {
		return nil, errors.New("standard input has no kv_transfer_params of a file: what prints them is nixlgo serve --params")
	}
	if len(s.parts) < s.file.Parts {
		return nil, fmt.Errorf("kv_transfer_params of %s of the file were given, and it has %d", many(len(s.parts), "part"), s.file.Parts)
	}
	return s, nil
}

// urlSource is a serve with HTTP.
type urlSource struct {
	base string
	file fileOffer
}

func (s *urlSource) offer() fileOffer { return s.file }
func (s *urlSource) repeatable() bool { return true }

func (s *urlSource) part(ctx context.Context, n int) (*lease.Params, error) {
	var text json.RawMessage
	if err := s.do(ctx, http.MethodPost, partsPath+strconv.Itoa(n), &text); err != nil {
		return nil, err
	}
	h, err := kvparams.Parse(text)
	return h.Params(), err
}

// do decodes the answer to a request.
func (s *urlSource) do(ctx context.Context, method, path string, into any) error {
	text, err := request(ctx, method, s.base+path, nil, "")
	if _, answered := errors.AsType[*statusError](err); err != nil && !answered && !errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("%w: is nixlgo serve running there, and do its --host and --http reach this machine?", err)
	} else if err != nil {
		return err
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s%s is no nixlgo serve: %w", s.base, path, err)
	}
	return nil
}

// paramsSource has params that were given once.
type paramsSource struct {
	file  fileOffer
	parts map[int]*lease.Params
}

func (s *paramsSource) offer() fileOffer { return s.file }
func (s *paramsSource) repeatable() bool { return false }

func (s *paramsSource) part(_ context.Context, n int) (*lease.Params, error) { return s.parts[n], nil }

// add takes the params of a part, alone or under their key.
func (s *paramsSource) add(text []byte) error {
	h, err := kvparams.FromResponse(text)
	if errors.Is(err, kvparams.ErrNoHandoff) {
		h, err = kvparams.Parse(text)
	}
	if err != nil {
		return err
	}
	p := h.Params()
	var part filePart
	if err := json.Unmarshal(p.Extra[fileKey], &part); err != nil {
		return fmt.Errorf("kv_transfer_params of request %q are no part of a file: %s: %w", p.RemoteRequestID, fileKey, err)
	}
	if len(s.parts) > 0 && part.fileOffer != s.file {
		return fmt.Errorf("kv_transfer_params of two files: %q and %q", s.file.Name, part.Name)
	}
	if part.Part < 0 || part.Part >= part.Parts {
		return fmt.Errorf("part %d of a file of %s", part.Part, many(part.Parts, "part"))
	}
	s.file, s.parts[part.Part] = part.fileOffer, p
	return nil
}

// read takes lines until it has every part. Other lines, which serve --params prints between them, are passed over.
func (s *paramsSource) read(ctx context.Context, in io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found := make(chan []byte)
	var broken error
	go func() { // a read of a terminal or a pipe ends with it, or with the process, and not with ctx
		defer close(found)
		lines := bufio.NewScanner(in)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			if line := lines.Bytes(); bytes.Contains(line, []byte(`"`+fileKey+`"`)) {
				select {
				case found <- bytes.Clone(line):
				case <-ctx.Done():
					return
				}
			}
		}
		broken = lines.Err()
	}()
	for {
		select {
		case line, more := <-found:
			if !more {
				return broken
			}
			if err := s.add(line); err != nil {
				return err
			}
			if len(s.parts) == s.file.Parts {
				return nil
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
