package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/nixlgo/nixlgo/lease"
)

// Events that only a report needs; the scenes do not wait for them.
const (
	traceGranted  = "granted"
	traceRenewed  = "renewed"
	traceFetching = "fetching"
	traceRead     = "read"    // the block READs have ended, after Seconds
	traceChecked  = "checked" // the check of the lease has ended, after Seconds
)

var traceEvents = []string{traceGranted, traceRenewed, traceFetching, traceRead, traceChecked}

// recorder keeps what the demo's processes report, with their times, which are of one host's clock.
type recorder struct {
	mu     sync.Mutex
	scenes []sceneRecord
}

type sceneRecord struct {
	title  string
	start  time.Time
	events []event
	notes  []note
}

type note struct {
	at   time.Time
	text string
}

func (r *recorder) begin(scene string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.scenes = append(r.scenes, sceneRecord{title: scene, start: time.Now()})
}

func (r *recorder) note(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.scenes[len(r.scenes)-1]
	s.notes = append(s.notes, note{time.Now(), text})
}

// add keeps e and tells whether it was for the report alone.
func (r *recorder) add(e event) (traceOnly bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.scenes); n > 0 && e.ID != "" && e.Stats == nil {
		r.scenes[n-1].events = append(r.scenes[n-1].events, e)
	}
	return slices.Contains(traceEvents, e.Event)
}

// leaseStory is what happened to one lease. Times are seconds since its scene began, and NaN when it did not happen.
type leaseStory struct {
	Request string
	Scene   int

	Published, Granted float64
	Renewed            []float64
	Ended              float64
	Reason             string // how it ended; empty: not before the demo did

	Fetch, Read, Verdict float64 // begin of the fetch, block READ done, verdict
	ReadTook, CheckTook  float64 // seconds
	Cause                string  // of a refused read: lapsed, unverifiable
	Error                string
	Bytes                int
}

// Result is what the reader got.
func (l *leaseStory) Result() string {
	switch {
	case l.Cause != "":
		return "refused: " + l.Cause
	case !math.IsNaN(l.Verdict):
		return "verified"
	case !math.IsNaN(l.Fetch):
		return "being read"
	}
	return "not read"
}

// stories sorts the events of a scene by lease, in the order of their reads, and then of their grants.
func (s *sceneRecord) stories(scene int) []*leaseStory {
	nan := math.NaN()
	byID := map[string]*leaseStory{}
	var all []*leaseStory
	for _, e := range s.events {
		l := byID[e.ID]
		if l == nil {
			l = &leaseStory{Request: e.ID, Scene: scene, Published: nan, Granted: nan, Ended: nan, Fetch: nan, Read: nan, Verdict: nan, ReadTook: nan, CheckTook: nan}
			byID[e.ID] = l
		}
		at := e.At.Sub(s.start).Seconds()
		switch e.Event {
		case "published":
			all = append(all, l)
			l.Published = at
		case traceGranted:
			l.Granted = at
		case traceRenewed:
			l.Renewed = append(l.Renewed, at)
		case "freed":
			l.Ended, l.Reason = at, e.Reason
		case traceFetching:
			l.Fetch = at
		case traceRead:
			l.Read, l.ReadTook = at, e.Seconds
		case traceChecked:
			l.CheckTook = e.Seconds
		case "fetched":
			// Hashing the blocks comes before the event.
			l.Verdict, l.Bytes = l.Fetch+e.Seconds, e.Bytes
		case "refused":
			l.Verdict, l.Cause, l.Error = l.Fetch+e.Seconds, e.Reason, e.Error
		}
	}
	slices.SortStableFunc(all, func(a, b *leaseStory) int {
		return cmp.Or(cmp.Compare(a.Fetch, b.Fetch), cmp.Compare(a.Published, b.Published), cmp.Compare(a.Granted, b.Granted))
	})
	return all
}

// How the timelines are drawn.
var (
	barHeld  = bar{"sky", 0.62}
	barFetch = bar{"blue", 0.28}

	signGranted  = sign{lineGlyph{}, "blue"}
	signRenewed  = sign{draw.PyramidGlyph{}, "blue"}
	signRead     = sign{diamondGlyph{}, "ink"}
	signVerified = sign{draw.CircleGlyph{}, "green"}
	signLapsed   = sign{crossGlyph{}, "vermilion"}
	signNoLease  = sign{crossGlyph{}, "purple"}
	signExpired  = sign{draw.BoxGlyph{}, "amber"}
	signNote     = sign{lineGlyph{}, "vermilion"}
)

// crossGlyph is a cross that is seen on a bar.
type crossGlyph struct{}

func (crossGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	r := s.Radius
	line := draw.LineStyle{Color: s.Color, Width: 2.5}
	c.StrokeLine2(line, at.X-r, at.Y-r, at.X+r, at.Y+r)
	c.StrokeLine2(line, at.X-r, at.Y+r, at.X+r, at.Y-r)
}

// diamondGlyph stands for what happens to a read on its way.
type diamondGlyph struct{}

func (diamondGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	r := s.Radius
	c.FillPolygon(s.Color, []vg.Point{{X: at.X - r, Y: at.Y}, {X: at.X, Y: at.Y + r}, {X: at.X + r, Y: at.Y}, {X: at.X, Y: at.Y - r}})
}

// lane draws a story. end is where the picture ends, and a lease that has not ended is cut off.
func (l *leaseStory) lane(end float64) lane {
	out := lane{Name: l.Request}
	from, until := l.Published, l.Ended
	if l.Granted < from { // the step that grants is not the caller's goroutine
		from = l.Granted
	}
	if math.IsNaN(until) {
		until = end
	}
	out.Spans = append(out.Spans, span{from, until, barHeld})
	if !math.IsNaN(l.Fetch) && !math.IsNaN(l.Verdict) {
		out.Spans = append(out.Spans, span{l.Fetch, l.Verdict, barFetch})
	}
	put := func(at float64, s sign) {
		if !math.IsNaN(at) {
			out.Marks = append(out.Marks, mark{at, s})
		}
	}
	put(l.Granted, signGranted)
	for _, at := range l.Renewed {
		put(at, signRenewed)
	}
	if l.Verdict-l.Read > end/50 { // otherwise the verdict covers it
		put(l.Read, signRead)
	}
	if l.Reason == lease.ReasonExpired.String() {
		put(l.Ended, signExpired)
	}
	switch l.Cause {
	case "":
		put(l.Verdict, signVerified)
	case lease.CauseUnverifiable.String():
		put(l.Verdict, signNoLease)
	default:
		put(l.Verdict, signLapsed)
	}
	return out
}

// runWithReport plays the scenes and writes the report about those that were played, also when one failed.
func (d *demo) runWithReport(ctx context.Context) error {
	file, err := createReport(d.report)
	if err != nil {
		return err
	}
	defer file.discard()
	failure := d.run(ctx)
	if len(d.events.scenes) == 0 {
		return failure
	}
	if err := file.write(d.page(failure)); err != nil {
		return errors.Join(failure, err)
	}
	if !d.json {
		fmt.Fprintln(d.out, "report:", d.report)
	}
	return failure
}

// maxLanes is how many leases a picture of one scene shows.
const maxLanes = 512

// page is the report. The processes have ended.
func (d *demo) page(failure error) report {
	r := report{Title: "nixlgo demo: leased, verified KV blocks between two processes"}
	r.Lead = fmt.Sprintf("A prefill process owned blocks of KV cache under leases, and a decode process read them over NIXL (UCX %s). "+
		"After each read it checked that the owner had held the lease throughout; where that was not so, it refused the bytes.", d.tls)
	if failure != nil {
		r.Lead += " This run failed: " + failure.Error() + "."
	}
	s := d.summary
	r.Figures = []figureOf{
		{Value: fmt.Sprintf("%d of %d", s.Verified, s.Requests), Name: "reads of scene 1 verified", Bad: s.Verified != s.Requests},
		{Value: fmt.Sprint(s.WrongBytes), Name: "wrong bytes accepted", Bad: s.WrongBytes != 0},
		{Value: fmt.Sprint(s.LapsedRefused + s.UnverifiableRefused), Name: "reads refused, as they should be"},
		{Value: fmt.Sprint(s.Renewals), Name: "leases renewed by heartbeats"},
	}
	if s.ReaderKilledFreedS > 0 {
		r.Figures = append(r.Figures, figureOf{Value: fmt.Sprintf("%.2f s", s.ReaderKilledFreedS), Name: "until a killed reader's blocks were free"})
	}

	var all []*leaseStory
	timelines := section{Title: "Every lease", Text: "Each row is one lease on the blocks of one request, from its grant until the blocks were the owner's again. " +
		"The scenes follow each other; each has a time axis of its own."}
	for i := range d.events.scenes {
		scene := &d.events.scenes[i]
		stories := scene.stories(i + 1)
		if len(stories) == 0 {
			continue
		}
		timelines.Charts = append(timelines.Charts, scene.chart(i+1, stories))
		all = append(all, stories...)
	}
	r.Sections = append(r.Sections, timelines)
	if c, text, ok := bandwidth(all); ok {
		r.Sections = append(r.Sections, section{Title: "Bandwidth", Text: text, Charts: []chart{c}})
	}
	if refused := refusedReads(all); refused != nil {
		r.Sections = append(r.Sections, section{Title: "Refused reads", Text: "A refused read is one that the reader throws away, because it could not prove " +
			"that the owner held the blocks for it during the whole read: the bytes may be another request's. The caller gets a typed error and blocks of zeros.", Table: refused})
	}
	r.Sections = append(r.Sections, section{Title: "Figures", Table: leaseTable(all)})
	r.Facts = append([]fact{
		{"Transport", "UCX " + d.tls}, {"Lease", fmt.Sprintf("%s; after a heartbeat it has %s left at least", d.lease, lease.Config{Duration: d.lease}.Extension().Round(time.Millisecond))},
		{"Request", many(d.blocks, "block") + " × " + many(d.layers, "layer") + " × " + byteSize(int64(d.blockBytes))},
		{"KV bytes", cmp.Or(d.kv, "a dump of a small real model, built in")}, {"Seed", "none: each request's number chooses its bytes"},
		{"NIXL library", d.summary.Library},
	}, runFacts(d.start)...)
	return r
}

// chart is the timeline of one scene.
func (s *sceneRecord) chart(number int, stories []*leaseStory) chart {
	end := 0.0
	for _, e := range s.events {
		end = max(end, e.At.Sub(s.start).Seconds())
	}
	title := fmt.Sprintf("Scene %d: %s", number, s.title)
	shown := stories
	if n := len(stories); n > maxLanes {
		shown = nil
		for i := range maxLanes {
			shown = append(shown, stories[i*n/maxLanes])
		}
		title += fmt.Sprintf(" (%d of %d, evenly chosen)", maxLanes, n)
	}
	lanes := make([]lane, len(shown))
	used := map[sign]bool{}
	fetched := false
	for i, l := range shown {
		lanes[i] = l.lane(end)
		fetched = fetched || len(lanes[i].Spans) > 1
		for _, m := range lanes[i].Marks {
			used[m.sign] = true
		}
	}
	for _, n := range s.notes {
		for i := range lanes {
			lanes[i].Marks = append(lanes[i].Marks, mark{n.at.Sub(s.start).Seconds(), signNote})
		}
	}
	legend := []legendEntry{legendOf(sign{barGlyph{0.7}, barHeld.hue}, "blocks held under the lease")}
	if fetched {
		legend = append(legend, legendOf(sign{barGlyph{0.4}, barFetch.hue}, "fetch: wait, READ and check"))
	}
	for _, e := range []struct {
		sign sign
		text string
	}{
		{signGranted, "granted"}, {signRenewed, "renewed by a heartbeat"}, {signRead, "READ done, the check is still to come"}, {signVerified, "verified"},
		{signLapsed, "refused: the lease had lapsed"}, {signNoLease, "refused: no lease to check"}, {signExpired, "expired"},
	} {
		if used[e.sign] {
			legend = append(legend, legendOf(e.sign, e.text))
		}
	}
	for _, n := range s.notes {
		legend = append(legend, legendOf(signNote, n.text))
	}
	return newChart(title, timelineAlt(s.title, stories), legend, newTimeline(lanes, "time since the scene began"))
}

// timelineAlt says a timeline in words.
func timelineAlt(title string, stories []*leaseStory) string {
	var renewed, expired int
	results := map[string]int{}
	for _, l := range stories {
		renewed += len(l.Renewed)
		results[l.Result()]++
		if l.Reason == lease.ReasonExpired.String() {
			expired++
		}
	}
	text := fmt.Sprintf("%s. %s, %s, %d expired", title, many(len(stories), "lease"), many(renewed, "renewal"), expired)
	for _, k := range []string{"verified", "refused: lapsed", "refused: unverifiable", "not read"} {
		if results[k] > 0 {
			text += fmt.Sprintf(", %d %s", results[k], k)
		}
	}
	return text
}

// bandwidth draws the rate of each verified read of scene 1.
func bandwidth(all []*leaseStory) (c chart, text string, ok bool) {
	var rates plotter.XYs
	var bytes int
	first, last := math.Inf(1), math.Inf(-1)
	for _, l := range all {
		if l.Scene == 1 && l.Result() == "verified" && l.Verdict > l.Fetch {
			rates = append(rates, plotter.XY{X: l.Verdict, Y: float64(l.Bytes) / (l.Verdict - l.Fetch) / 1e6})
			bytes += l.Bytes
			first, last = min(first, l.Fetch), max(last, l.Verdict)
		}
	}
	if len(rates) == 0 {
		return c, "", false
	}
	total := float64(bytes) / (last - first) / 1e6
	text = fmt.Sprintf("Scene 1 read %s in %s of %s, up to 8 of them at a time: %.1f MB/s together (MB = 10⁶ bytes). "+
		"The time of a read is that of the whole fetch, with its wait for the step and the check of the lease. "+
		"Short reads like these show the cost of the steps, not what the transport can do: nixlgo bench measures that.",
		byteSize(int64(bytes)), many(len(rates), "request"), byteSize(int64(bytes/len(rates))), total)
	draws := func(width vg.Length) (*plot.Plot, vg.Length) {
		p := newPlot("time since the scene began, ms", "one read, MB/s")
		points, err := plotter.NewScatter(rates)
		if err != nil {
			return p, 100
		}
		points.GlyphStyle = signVerified.style(3.5)
		mean, _ := plotter.NewLine(plotter.XYs{{X: first, Y: total}, {X: last, Y: total}}) // two finite points
		mean.Color, mean.Width, mean.Dashes = hue("ink"), 1.5, []vg.Length{5, 3}
		p.Add(points, mean)
		p.X.Tick.Marker = roundTicks{scale: 1000, most: int(width / 75)}
		p.Y.Tick.Marker = roundTicks{scale: 1, most: 6}
		p.X.Min, p.X.Max = p.X.Min-(p.X.Max-p.X.Min)/50, p.X.Max+(p.X.Max-p.X.Min)/50
		p.Y.Min = 0
		p.Y.Max *= 1.05
		return p, min(width*3/4, 320)
	}
	legend := []legendEntry{legendOf(signVerified, "one verified read, at the time of its verdict"), legendOf(sign{dashGlyph{[]vg.Length{5, 3}}, "ink"}, "all of them together")}
	return newChart("", text, legend, draws), text, true
}

func refusedReads(all []*leaseStory) *reportTable {
	t := &reportTable{Head: []string{"Read", "What the caller was told"}, Texts: []int{1}}
	for _, l := range all {
		if l.Cause != "" {
			t.Rows = append(t.Rows, []string{fmt.Sprintf("%s, scene %d: %s", l.Request, l.Scene, l.Cause), l.Error})
		}
	}
	if t.Rows == nil {
		return nil
	}
	return t
}

// leaseTable has a row for each lease.
func leaseTable(all []*leaseStory) *reportTable {
	t := &reportTable{Caption: fmt.Sprintf("All %d leases; times are seconds since the request was published", len(all)), Folded: len(all) > 20,
		Head:  []string{"Request", "Scene", "Renewed", "Last renewal", "Fetch began", "Fetch took, ms", "of it READ, ms", "of it check, ms", "Result", "Ended", "Owner's reason"},
		Texts: []int{8, 10}}
	for _, l := range all {
		number := func(v float64, digits int) string {
			if math.IsNaN(v) {
				return "–"
			}
			return strconv.FormatFloat(v, 'f', digits, 64)
		}
		since := func(at float64) string { return number(at-l.Published, 3) }
		last := math.NaN()
		if n := len(l.Renewed); n > 0 {
			last = l.Renewed[n-1]
		}
		t.Rows = append(t.Rows, []string{l.Request, fmt.Sprint(l.Scene), fmt.Sprint(len(l.Renewed)), since(last), since(l.Fetch), number(1000*(l.Verdict-l.Fetch), 2),
			number(1000*l.ReadTook, 2), number(1000*l.CheckTook, 2), l.Result(), since(l.Ended), cmp.Or(l.Reason, "still held")})
	}
	return t
}
