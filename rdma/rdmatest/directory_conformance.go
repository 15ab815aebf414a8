package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nixlgo/nixlgo/rdma"
)

// TestDirectory tests that a rdma.Directory keeps the contract that rdma.Worker relies on. open gives the same directory to
// two programs, and cleans up itself. It may hold entries of engines that no name of which begins with "rdmatest".
func TestDirectory(t *testing.T, open func(t *testing.T) (a, b rdma.Directory)) {
	s := &directorySuite{T: t}
	s.a, s.b = open(t)
	for _, c := range []struct {
		name string
		run  func(*directorySuite)
	}{
		{"WhatIsPublishedIsFound", (*directorySuite).found},
		{"NamesAreNotMixedUp", (*directorySuite).names},
		{"SizesAreBounded", (*directorySuite).sizes},
		{"PublishingAgainReplaces", (*directorySuite).replaced},
		{"OnlyTheLastPublisherWithdraws", (*directorySuite).withdrawn},
		{"ChangesAreTold", (*directorySuite).changes},
		{"ContextsEndCalls", (*directorySuite).contexts},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(&directorySuite{t, s.a, s.b}) })
	}
}

type directorySuite struct {
	*testing.T
	a, b rdma.Directory
}

func (s *directorySuite) context() context.Context {
	ctx, cancel := context.WithTimeout(s.Context(), 20*time.Second)
	s.Cleanup(cancel)
	return ctx
}

func (s *directorySuite) publish(d rdma.Directory, engine string, rank int, reply string) {
	s.Helper()
	if err := d.Publish(s.context(), engine, rank, []byte(reply)); err != nil {
		s.Fatal(err)
	}
}

// says requires that the replies of ranks are those.
func (s *directorySuite) says(d rdma.Directory, engine string, ranks []int, want ...string) (revision int64) {
	s.Helper()
	replies, revision, err := d.Lookup(s.context(), engine, ranks)
	if err != nil {
		s.Fatal(err)
	}
	if !slices.EqualFunc(replies, want, func(b []byte, w string) bool { return string(b) == w }) {
		s.Fatalf("engine %q, ranks %v: %q, want %q", engine, ranks, replies, want)
	}
	return revision
}

func (s *directorySuite) lacks(d rdma.Directory, engine string, ranks ...int) (revision int64) {
	s.Helper()
	_, revision, err := d.Lookup(s.context(), engine, ranks)
	if !errors.Is(err, rdma.ErrNotListed) {
		s.Fatalf("engine %q, ranks %v: %v, want %v", engine, ranks, err, rdma.ErrNotListed)
	}
	return revision
}

func (s *directorySuite) found() {
	const e = "rdmatest-found"
	s.lacks(s.b, e, 0)
	for r := range 4 {
		s.publish(s.a, e, r, fmt.Sprint("reply ", r, "\x00\xff"))
	}
	s.says(s.b, e, []int{0}, "reply 0\x00\xff")
	s.says(s.b, e, []int{3, 1}, "reply 3\x00\xff", "reply 1\x00\xff")
	s.says(s.a, e, []int{2}, "reply 2\x00\xff")
	s.lacks(s.b, e, 0, 4)
}

func (s *directorySuite) names() {
	names := []string{"rdmatest", "rdmatest/", "rdmatest/0", "rdmatest/0/1", "rdmatest%2F0", "rdmatest\x00", "rdmatest é,:\n", "rdmatest\xff", "rdmatest/../rdmatest", "rdmatest1"}
	for _, e := range names {
		s.lacks(s.b, e, 1)
	}
	for i, e := range names {
		s.publish(s.a, e, 1, fmt.Sprint(i))
	}
	for i, e := range names {
		s.says(s.b, e, []int{1}, fmt.Sprint(i))
		s.lacks(s.b, e, 0)
		s.lacks(s.b, e, 11)
		if err := s.a.Withdraw(s.context(), e, 1); err != nil {
			s.Fatal(err)
		}
		s.lacks(s.b, e, 1)
	}
}

func (s *directorySuite) sizes() {
	const e = "rdmatest-sizes"
	big := bytes.Repeat([]byte("x"), rdma.MaxReply)
	s.publish(s.a, e, 0, string(big))
	s.says(s.b, e, []int{0}, string(big))
	for _, bad := range []struct {
		engine string
		rank   int
		reply  []byte
	}{{"", 0, big}, {e, -1, big}, {e, 0, nil}, {e, 0, append(big, 'x')}} {
		if err := s.a.Publish(s.context(), bad.engine, bad.rank, bad.reply); !errors.Is(err, rdma.ErrConfig) {
			s.Fatalf("engine %q, rank %d, %d bytes: %v", bad.engine, bad.rank, len(bad.reply), err)
		}
	}
	s.says(s.b, e, []int{0}, string(big))
}

func (s *directorySuite) replaced() {
	const e = "rdmatest-replaced"
	s.publish(s.a, e, 0, "first")
	first := s.says(s.b, e, []int{0}, "first")
	s.publish(s.b, e, 0, "second")
	if second := s.says(s.a, e, []int{0}, "second"); second <= first {
		s.Fatalf("revision %d after %d", second, first)
	}
	s.publish(s.b, e, 0, "third")
	s.says(s.a, e, []int{0}, "third")
}

func (s *directorySuite) withdrawn() {
	const e = "rdmatest-withdrawn"
	withdraw := func(d rdma.Directory) {
		s.Helper()
		if err := d.Withdraw(s.context(), e, 0); err != nil {
			s.Fatal(err)
		}
	}
	withdraw(s.a)
	s.publish(s.a, e, 0, "a")
	s.publish(s.a, e, 1, "a1")
	withdraw(s.b)
	s.says(s.b, e, []int{0}, "a")
	s.publish(s.b, e, 0, "b")
	withdraw(s.a)
	s.says(s.a, e, []int{0}, "b")
	withdraw(s.b)
	withdraw(s.b)
	s.lacks(s.a, e, 0)
	s.says(s.b, e, []int{1}, "a1")
}

func (s *directorySuite) changes() {
	const e = "rdmatest-changes"
	revision := s.lacks(s.b, e, 0)
	for _, change := range []func(){
		func() { s.publish(s.a, e, 0, "a") },
		func() { s.publish(s.a, e, 1, "b") },
		func() { s.publish(s.a, e, 0, "c") },
		func() {
			if err := s.a.Withdraw(s.context(), e, 1); err != nil {
				s.Fatal(err)
			}
		},
	} {
		told := make(chan error, 1)
		ctx := s.context()
		go func() { told <- s.b.Changed(ctx, e, revision) }()
		s.publish(s.a, e+"-other", 0, "x")
		change()
		if err := <-told; err != nil {
			s.Fatal(err)
		}
		_, next, _ := s.b.Lookup(s.context(), e, []int{0})
		if next <= revision {
			s.Fatalf("revision %d after %d", next, revision)
		}
		// Told later, told all the same.
		if err := s.b.Changed(s.context(), e, revision); err != nil {
			s.Fatal(err)
		}
		revision = next
	}
}

func (s *directorySuite) contexts() {
	const e = "rdmatest-contexts"
	s.publish(s.a, e, 1, "x")
	revision := s.lacks(s.a, e, 0)
	given := errors.New("given up")
	ended, cancel := context.WithCancelCause(s.Context())
	waits := make(chan error, 1)
	go func() { waits <- s.a.Changed(ended, e, revision) }()
	cancel(given)
	_, _, err := s.a.Lookup(ended, e, []int{0})
	for i, err := range []error{<-waits, err, s.a.Publish(ended, e, 0, []byte("x")), s.a.Withdraw(ended, e, 1)} {
		if err == nil {
			s.Errorf("call %d took no notice of its context", i)
		}
	}
	s.lacks(s.b, e, 0)
}
