// Command topology passes leased blocks between engines of unequal shape, each rank a process of its own, and checks every byte
// on every reader rank. It prints one line per shape, writes out/topology.json, and fails if a shape does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/cgo_test/child"
	"github.com/nixlgo/nixlgo/cgo_test/measure"
	"github.com/nixlgo/nixlgo/cgo_test/topology/shape"
	"github.com/nixlgo/nixlgo/rdma"
)

func main() {
	if isRank, err := runRank(); isRank {
		child.Exit("topology", err)
	}
	only := flag.String("run", "", "regular expression: only shapes whose name matches")
	limit := flag.Duration("timeout", time.Minute, "for one shape")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	child.Exit("topology", report(ctx, *only, *limit))
}

func report(ctx context.Context, only string, limit time.Duration) error {
	match, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	out := measure.NewReport("topology")
	var failed error
	for _, s := range shape.All() {
		if !match.MatchString(s.Name) {
			continue
		}
		start := time.Now()
		got, err := run(ctx, s, limit)
		row := measure.Row{Name: s.Name, Unit: "s", Ours: got.Took.Seconds(), Repeats: 1, Extra: map[string]float64{
			"owner_ranks": float64(s.Owner.TP), "reader_ranks": float64(s.Reader.TP), "bytes_checked": float64(got.Bytes), "ok": 1,
			"seconds": time.Since(start).Seconds()}}
		if err != nil {
			row.Extra["ok"] = 0
			failed = errors.Join(failed, fmt.Errorf("%s: %w", s.Name, err))
			fmt.Printf("FAIL  %-52s %v\n", s.Name, err)
		} else {
			fmt.Printf("ok    %-52s %d processes, %6d bytes checked, READ %.3f s, in all %.1f s\n", s.Name, s.Owner.TP+s.Reader.TP, got.Bytes,
				row.Ours, row.Extra["seconds"])
		}
		out.Add(row)
	}
	if len(out.Rows) == 0 {
		return fmt.Errorf("no shape matches %q", only)
	}
	path, err := out.Write()
	if err == nil {
		fmt.Println("wrote", path)
	}
	return errors.Join(failed, err)
}

// run passes requests over a shape whose ranks are processes.
func run(ctx context.Context, s *shape.Shape, limit time.Duration) (out shape.Outcome, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	side, err := rdma.ListenSideChannel("127.0.0.1", 0, nil)
	if err != nil {
		return out, err
	}
	defer side.Close()
	var ranks []shape.Ranker
	defer func() {
		for _, r := range ranks {
			err = errors.Join(err, r.Close())
		}
	}()
	for i := range s.Owner.TP + s.Reader.TP {
		owner, rank := i < s.Owner.TP, i
		if !owner {
			rank -= s.Owner.TP
		}
		p, err := spawn(ctx, rankOf{Shape: s.Name, Owner: owner, Rank: rank}, limit)
		if err != nil {
			return out, err
		}
		ranks = append(ranks, p)
		if owner {
			side.ServeReply(rank, p.reply)
		}
	}
	return shape.Run(ctx, s, side.Port(), ranks[:s.Owner.TP], ranks[s.Owner.TP:])
}
