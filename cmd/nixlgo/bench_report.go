package main

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// page is the report of a bench.
func (c *benchConfig) page(rows []benchRow, target benchAnswer, start time.Time) report {
	r := report{Title: "nixlgo bench: " + c.opType + " over " + c.backend}
	did := "wrote blocks into"
	if c.opType == "READ" {
		did = "read blocks from"
	}
	r.Lead = fmt.Sprintf("An initiator (%s) %s the memory of a target (%s) over NIXL", hostFacts(), did, target.Host)
	if c.leaseIterations > 0 {
		r.Lead += ", and then read the same amounts under a lease, with the proof after each read that the owner had held the lease throughout"
	}
	r.Lead += "."
	best := slices.MaxFunc(rows, func(a, b benchRow) int { return cmp.Compare(a.gbSec(), b.gbSec()) })
	least := slices.MinFunc(rows, func(a, b benchRow) int { return cmp.Compare(a.raw.xfer.at(0.5), b.raw.xfer.at(0.5)) })
	r.Figures = []figureOf{
		{Value: fmt.Sprintf("%.3g GB/s", best.gbSec()), Name: fmt.Sprintf("highest bandwidth of NIXL alone: %d × %s", best.shape.Batch, byteSize(int64(best.shape.BlockBytes)))},
		{Value: micros(least.raw.xfer.at(0.5)), Name: fmt.Sprintf("shortest median of a transfer: %d × %s", least.shape.Batch, byteSize(int64(least.shape.BlockBytes)))},
	}
	if c.leaseIterations > 0 {
		leased := slices.MaxFunc(rows, func(a, b benchRow) int { return cmp.Compare(a.leased.gbSec(), b.leased.gbSec()) })
		r.Figures = append(r.Figures,
			figureOf{Value: fmt.Sprintf("%.3g GB/s", leased.leased.gbSec()), Name: fmt.Sprintf("highest bandwidth of leased, verified reads: %d × %s", leased.shape.Batch, byteSize(int64(leased.shape.BlockBytes)))},
			figureOf{Value: fmt.Sprintf("%.1f %%", 100*leased.leased.verifyShare()), Name: "of such a read is the check of its lease"})
	}
	if len(rows) > 1 {
		r.Sections = append(r.Sections, section{Title: "Bandwidth", Text: "GB are 10⁹ bytes. NIXL alone posts the same request again and again, as nixlbench does. " +
			"A leased read is published, fetched and verified through nixlgo.Node, one after the other, with the reader's blocks in random order.",
			Charts: []chart{c.chart("Bandwidth over size, of NIXL alone and of leased reads", "GB/s", false, rows,
				func(b *benchRow) float64 { return b.gbSec() }, func(b *benchRow) float64 { return b.leased.gbSec() })}},
			section{Title: "Latency", Text: "Medians: of a transfer of NIXL alone from the begin of the post until a poll found it done, and of a leased read from the call of Fetch to its verdict.",
				Charts: []chart{c.chart("Median time over size", "median, µs", true, rows,
					func(b *benchRow) float64 { return b.raw.xfer.at(0.5) }, func(b *benchRow) float64 { return b.leased.fetch.at(0.5) })}})
	}
	last := &rows[len(rows)-1]
	r.Sections = append(r.Sections, section{Title: "Distribution",
		Text: fmt.Sprintf("All measured times with %d × %s: how many of the transfers took no longer than the time below. "+
			"Where a curve ends is the longest.", last.shape.Batch, byteSize(int64(last.shape.BlockBytes))), Charts: []chart{distribution(last)}})
	if c.leaseIterations > 0 && len(rows) > 1 {
		r.Sections = append(r.Sections, section{Title: "What verification costs",
			Text:   "The check of the lease is one READ of 8 bytes for each request, however long the blocks are: its share falls with the size.",
			Charts: []chart{c.chart("Share of the check of the lease in a leased read over size", "share of the read, %", false, rows, nil, func(b *benchRow) float64 { return 100 * b.leased.verifyShare() })}})
	}
	t := &reportTable{Caption: "Each row: one block and batch size. The first ten columns are nixlbench's; Lat. is of one block, the other times are of a transfer or a leased read."}
	columns := c.columns()
	for _, col := range columns {
		t.Head = append(t.Head, col.Head)
	}
	for i := range rows {
		var cells []string
		for k, v := range rows[i].values() {
			cells = append(cells, fmt.Sprintf(cmp.Or(columns[k].Verb, "%v"), v))
		}
		t.Rows = append(t.Rows, cells)
	}
	r.Sections = append(r.Sections, section{Title: "Figures", Table: t})
	r.Facts = append([]fact{
		{"Transfers", fmt.Sprintf("%d in each row after %d that do not count, %d times fewer above 1 MiB; threads: %d, pipeline depth: %d", c.iterations, c.warmup, c.largeFactor, c.threads, c.depth)},
		{"Leased reads", fmt.Sprintf("%d in each row, at least 10 above 1 MiB; lease %s, seed %d", c.leaseIterations, c.lease, c.seed)},
		{"Requests", fmt.Sprintf("prepared lists: %t, made anew for each transfer: %t, consistency checked: %t", c.prepared, c.recreate, c.check)},
		{"UCX_TLS", cmp.Or(os.Getenv("UCX_TLS"), "not set: UCX chooses")}, {"Devices", c.devices},
		{"Target", target.Host + ", library " + target.Library},
	}, runFacts(start)...)
	if m := cmp.Or(c.workload.model, c.workload.file); m != "" {
		w := c.workload
		r.Facts = append([]fact{{"Model", fmt.Sprintf("%s, %s, TP %d, PP %d, requests: %d × %d tokens, pages of %d tokens, access pattern %s", m, w.kvType, w.tp, w.pp, w.requests, w.isl, w.pageSize, w.pattern)}}, r.Facts...)
	}
	return r
}

// batchHues tell batch sizes apart.
var batchHues = []string{"blue", "vermilion", "green", "purple", "amber", "ink"}

// chart draws values over size, solid of NIXL alone and dashed of leased reads; raw is nil where only those have one. With
// several block sizes, that is the axis, and each batch size has a colour: those between the smallest and the largest are
// thinned out to as many as there are colours. With one block size, the axis is the bytes of a transfer.
func (c *benchConfig) chart(alt, y string, logarithmic bool, rows []benchRow, raw, leased func(*benchRow) float64) chart {
	a := axes{x: "size of a transfer", y: y, xTicks: sizeAxis, yLogarithmic: logarithmic}
	batches := []int{0} // all in one
	if c.startBlock < c.maxBlock {
		a.x = "block size"
		batches = nil
		for _, r := range rows {
			if !slices.Contains(batches, r.shape.Batch) {
				batches = append(batches, r.shape.Batch)
			}
		}
		batches = thin(batches, len(batchHues))
	}
	styleRaw := series{name: "NIXL alone", hue: "ink", shape: draw.CircleGlyph{}}
	styleLeased := series{name: "leased, verified read", hue: "ink", dashes: []vg.Length{6, 4}, shape: draw.PyramidGlyph{}}
	if len(batches) == 1 {
		styleRaw.hue, styleLeased.hue = batchHues[0], batchHues[1]
	}
	var lines []series
	var legend []legendEntry
	if raw != nil {
		legend = append(legend, styleRaw.legend())
	}
	if c.leaseIterations > 0 {
		legend = append(legend, styleLeased.legend())
	}
	for i, batch := range batches {
		one, other := styleRaw, styleLeased
		if len(batches) > 1 {
			one.hue, other.hue = batchHues[i], batchHues[i]
			legend = append(legend, legendOf(sign{barGlyph{0.7}, batchHues[i]}, fmt.Sprintf("batch of %d", batch)))
		}
		for k := range rows {
			r := &rows[k]
			x := float64(r.shape.bytes())
			if batch != 0 {
				if x = float64(r.shape.BlockBytes); r.shape.Batch != batch {
					continue
				}
			}
			if raw != nil {
				one.xys = append(one.xys, plotter.XY{X: x, Y: raw(r)})
			}
			if r.leased != nil {
				other.xys = append(other.xys, plotter.XY{X: x, Y: leased(r)})
			}
		}
		lines = append(lines, one, other)
	}
	return newChart("", alt, legend, newLines(a, lines))
}

// thin keeps n of values at most, evenly chosen, the first and the last among them.
func thin(values []int, n int) []int {
	if len(values) <= n {
		return values
	}
	out := make([]int, n)
	for i := range out {
		out[i] = values[i*(len(values)-1)/(n-1)]
	}
	return out
}

// distribution draws what share of the transfers of a row took at most how long.
func distribution(r *benchRow) chart {
	lines := []series{{"NIXL alone", "blue", nil, nil, cumulative(r.raw.xfer)}}
	if r.leased != nil {
		lines = append(lines, series{"leased, verified read", "vermilion", []vg.Length{6, 4}, nil, cumulative(r.leased.fetch)},
			series{"of it, the check of the lease", "purple", []vg.Length{2, 3}, nil, cumulative(r.leased.verify)})
	}
	var legend []legendEntry
	for _, s := range lines {
		legend = append(legend, s.legend())
	}
	return newChart("", "Cumulative distribution of the times of the last row", legend, newLines(axes{x: "time, µs", y: "of the transfers, %", xTicks: decadeAxis}, lines))
}

// cumulative is the empirical distribution of s in per cent, in 200 points at most.
func cumulative(s samples) (xys plotter.XYs) {
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	for k := range min(n, 200) {
		i := k
		if n > 200 {
			i = k * (n - 1) / 199
		}
		xys = append(xys, plotter.XY{X: math.Max(sorted[i], 0.001), Y: 100 * float64(i+1) / float64(n)})
	}
	return xys
}

// micros shows microseconds in a unit that fits.
func micros(us float64) string {
	switch {
	case us < 1000:
		return fmt.Sprintf("%.3g µs", us)
	case us < 1e6:
		return fmt.Sprintf("%.3g ms", us/1e3)
	}
	return fmt.Sprintf("%.3g s", us/1e6)
}
