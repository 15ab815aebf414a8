package main

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lapseAndReuse are the events of a lease that lapses under a read, and of one that takes its blocks, as the processes of
// the demo report them.
func lapseAndReuse(start time.Time) []event {
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	return []event{
		{Event: "published", At: at(2), ID: "old"},
		{Event: traceGranted, At: at(1), ID: "old"},
		{Event: traceFetching, At: at(10), ID: "old"},
		{Event: traceRead, At: at(30), ID: "old", Seconds: 0.015},
		{Event: traceRenewed, At: at(40), ID: "old"},
		{Event: "freed", At: at(1040), ID: "old", Reason: "expired"},
		{Event: "published", At: at(1050), ID: "new"},
		{Event: traceGranted, At: at(1051), ID: "new"},
		{Event: traceChecked, At: at(1300), ID: "old", Seconds: 1.27},
		{Event: "refused", At: at(1301), ID: "old", Reason: "lapsed", Error: "lease lapsed", Seconds: 1.29},
		{Event: traceFetching, At: at(1310), ID: "new"},
		{Event: "fetched", At: at(1330), ID: "new", Seconds: 0.005, Bytes: 4096},
		{Event: "freed", At: at(1316), ID: "new", Reason: "read"},
		{Event: "published", At: at(1400), ID: "idle"},
	}
}

func TestStoriesTellWhatHappenedToEachLease(t *testing.T) {
	s := sceneRecord{title: "s", start: time.Unix(1000, 0)}
	s.events = lapseAndReuse(s.start)
	stories := s.stories(3)
	require.Len(t, stories, 3)
	idle, old, reused := stories[0], stories[1], stories[2]
	require.Equal(t, []string{"idle", "old", "new"}, []string{idle.Request, old.Request, reused.Request})
	near := func(want, got float64) { t.Helper(); require.InDelta(t, want, got, 1e-9) }

	require.Equal(t, "refused: lapsed", old.Result())
	require.Equal(t, "expired", old.Reason)
	near(0.002, old.Published)
	near(0.001, old.Granted)
	near(0.010, old.Fetch)
	near(0.030, old.Read)
	near(1.300, old.Verdict)
	near(1.040, old.Ended)
	near(1.27, old.CheckTook)
	require.Len(t, old.Renewed, 1)
	l := old.lane(1.4)
	require.Equal(t, []span{{old.Granted, old.Ended, barHeld}, {old.Fetch, old.Verdict, barFetch}}, l.Spans)
	require.Equal(t, []sign{signGranted, signRenewed, signRead, signExpired, signLapsed}, signsOf(l))

	require.Equal(t, "verified", reused.Result())
	near(1.315, reused.Verdict) // not when the event came: the blocks are hashed before
	require.Equal(t, 4096, reused.Bytes)
	require.Equal(t, []sign{signGranted, signVerified}, signsOf(reused.lane(1.4)))

	require.Equal(t, "not read", idle.Result())
	l = idle.lane(1.5)
	require.Empty(t, signsOf(l))
	require.Equal(t, []span{{idle.Published, 1.5, barHeld}}, l.Spans, "a lease that has not ended is drawn to the end")
	require.True(t, math.IsNaN(idle.Granted))

	noLease := leaseStory{Cause: "unverifiable", Verdict: 1}
	require.Contains(t, signsOf(noLease.lane(2)), signNoLease)
}

func signsOf(l lane) (out []sign) {
	for _, m := range l.Marks {
		out = append(out, m.sign)
	}
	return out
}

func TestDemoReportHasEveryLeaseAndEveryRefusedRead(t *testing.T) {
	start := time.Unix(1000, 0)
	d := &demo{demoConfig: demoConfig{tls: "tcp", lease: time.Second, requests: 1, blocks: 2, layers: 2, blockBytes: 1024}, start: start}
	d.summary.Requests, d.summary.Verified, d.summary.LapsedRefused = 1, 1, 1
	require.False(t, d.events.add(event{Event: "ready"}), "before any scene")
	d.events.begin("many requests")
	d.events.scenes[0].start = start
	for i := range 700 {
		id := fmt.Sprint("req-", i)
		at := start.Add(time.Duration(i) * time.Millisecond)
		require.False(t, d.events.add(event{Event: "published", At: at, ID: id}))
		require.True(t, d.events.add(event{Event: traceFetching, At: at, ID: id}))
		require.False(t, d.events.add(event{Event: "fetched", At: at, ID: id, Seconds: 0.002, Bytes: 4096}))
	}
	d.events.begin("a lapse")
	d.events.scenes[1].start = start
	for _, e := range lapseAndReuse(start) {
		d.events.add(e)
	}
	d.events.note("something else happens")
	page := testPage(t, d.page(errors.New("it broke")))
	requireSelfContained(t, page)
	for i := range 700 {
		require.True(t, strings.Contains(page, fmt.Sprintf(`<td class="text">req-%d</td>`, i)), i)
	}
	for _, text := range []string{
		"This run failed: it broke.", "(512 of 700, evenly chosen)", "Scene 2: a lapse", ">old</text>", ">new</text>", "old, scene 2: lapsed</td>", "lease lapsed</td>",
		"renewed by a heartbeat", "something else happens", "All 703 leases", "2 blocks × 2 layers × 1 KiB", "4.1 MB/s", "still held",
	} {
		require.True(t, strings.Contains(page, text), text)
	}
}
