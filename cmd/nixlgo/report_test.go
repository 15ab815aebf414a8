package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"html/template"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
)

// requireSelfContained fails unless page is well-formed and asks for nothing: no script, and no address of anything.
func requireSelfContained(t *testing.T, page string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(page))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
	for _, word := range []string{"<script", "://", "@import", "url(", "src=", "<iframe", "<object", "xmlns"} {
		require.False(t, strings.Contains(strings.ToLower(page), word), word)
	}
	for _, href := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(page, -1) {
		require.Equal(t, "data:,", href[1])
	}
	require.True(t, strings.Contains(page, `content="default-src 'none';`))
	require.True(t, strings.Contains(page, "prefers-color-scheme: dark"))
	require.False(t, strings.Contains(page, "ZgotmplZ"), "html/template does not trust a value")
	require.False(t, regexp.MustCompile(`(?i)(fill|stroke):#`).MatchString(page), "a colour that is the same in the dark")
}

func testPage(t *testing.T, r report) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, reportTemplate.Execute(&b, r))
	return b.String()
}

func TestReportEscapesWhatRequestsAreCalled(t *testing.T) {
	evil := `<script>alert("x")</script>`
	lanes := []lane{{Name: evil, Spans: []span{{0, 1, barHeld}}, Marks: []mark{{0.5, signVerified}}}}
	page := testPage(t, report{Title: evil, Lead: evil, Figures: []figureOf{{Value: evil, Name: evil, Bad: true}}, Facts: []fact{{evil, evil}}, Sections: []section{{
		Title: evil, Text: evil, Charts: []chart{newChart(evil, evil, []legendEntry{legendOf(signLapsed, evil)}, newTimeline(lanes, evil))},
		Table: &reportTable{Caption: evil, Head: []string{evil}, Rows: [][]string{{evil}}},
	}}})
	requireSelfContained(t, page)
	require.Contains(t, page, "&lt;script&gt;")
}

func TestReportTellsTextFromNumbersAndFoldsLongTables(t *testing.T) {
	table := &reportTable{Caption: "c", Head: []string{"name", "n", "word"}, Texts: []int{2}, Rows: [][]string{{"a", "1", "b"}}}
	page := testPage(t, report{Sections: []section{{Table: table}}})
	require.Contains(t, page, `<td class="text">a</td><td class="number">1</td><td class="text">b</td>`)
	require.NotContains(t, page, "<details>")
	table.Folded = true
	page = testPage(t, report{Sections: []section{{Table: table}}})
	requireSelfContained(t, page)
	require.Contains(t, page, "<summary>c</summary>")
}

func TestReportReplacesReportsAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "report.html")
	write := func(title string) {
		f, err := createReport(path)
		require.NoError(t, err)
		require.NoError(t, f.write(report{Title: title}))
		f.discard() // does nothing any more
	}
	write("first")
	write("second")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "second")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o644), info.Mode())

	f, err := createReport(path)
	require.NoError(t, err)
	f.discard()
	kept, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, b, kept, "a run without a report has changed the old one")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)

	other := filepath.Join(dir, "main.go")
	require.NoError(t, os.WriteFile(other, []byte("package main\n"), 0o600))
	_, err = createReport(other)
	require.ErrorContains(t, err, other)
	require.ErrorContains(t, err, "not a report")
	_, err = createReport(filepath.Join(dir, "missing", "x.html"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = createReport(dir)
	require.ErrorContains(t, err, "is a directory")
}

// Web Content Accessibility Guidelines 2.2: 4.5:1 for text (1.4.3), 3:1 for what is needed to understand a picture (1.4.11).
func TestColoursStandOutInLightAndDark(t *testing.T) {
	light, dark := map[string]float64{}, map[string]float64{}
	for _, p := range paints {
		light[p.name], dark[p.name] = luminance(t, p.light), luminance(t, p.dark)
		require.NotNil(t, hue(p.name))
	}
	for _, scheme := range []map[string]float64{light, dark} {
		for name, v := range scheme {
			least := 3.0
			switch name {
			case "paper", "card", "rule", "sky": // grounds; what is drawn on them is named below
				continue
			case "ink", "soft":
				least = 4.5
			}
			for _, ground := range []string{"paper", "card"} {
				require.GreaterOrEqual(t, contrast(v, scheme[ground]), least, "%s on %s", name, ground)
			}
		}
		for _, mark := range []string{"blue", "green", "vermilion", "purple", "ink"} {
			require.GreaterOrEqual(t, contrast(scheme[mark], scheme["sky"]), 2.0, "%s on a bar of sky", mark)
		}
	}
}

func contrast(a, b float64) float64 { return (max(a, b) + 0.05) / (min(a, b) + 0.05) }

func luminance(t *testing.T, hex string) float64 {
	v, err := strconv.ParseUint(hex[1:], 16, 32)
	require.NoError(t, err)
	part := func(shift int) float64 {
		c := float64(v>>shift&255) / 255
		if c <= 0.04045 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*part(16) + 0.7152*part(8) + 0.0722*part(0)
}

func TestChartsAreDrawnForNarrowAndWideScreens(t *testing.T) {
	for name, d := range map[string]drawing{
		"timeline":      newTimeline([]lane{{Name: "a", Spans: []span{{0, 10, barHeld}}}, {Name: "b"}}, "time"),
		"no lanes":      newTimeline(nil, "time"),
		"an instant":    newTimeline([]lane{{Name: "a", Marks: []mark{{1, signGranted}}}}, "time"),
		"many lanes":    newTimeline(make([]lane, 600), "time"),
		"lines":         newLines(axes{"x", "y", sizeAxis, true}, []series{{name: "s", hue: "blue", shape: draw.CircleGlyph{}, xys: plotter.XYs{{X: 4096, Y: 1}, {X: 8192, Y: 20}}}}),
		"one point":     newLines(axes{"x", "y", sizeAxis, true}, []series{{name: "s", hue: "blue", xys: plotter.XYs{{X: 4096, Y: 1}}}}),
		"same all over": newLines(axes{"x", "y", decadeAxis, true}, []series{{name: "s", hue: "blue", xys: plotter.XYs{{X: 1, Y: 1}, {X: 1, Y: 1}}}}),
		"no points":     newLines(axes{"x", "y", decadeAxis, true}, []series{{name: "s", hue: "blue"}}),
		"linear":        newLines(axes{"x", "y", nil, false}, []series{{name: "s", hue: "blue", xys: plotter.XYs{{X: 1, Y: 0}}}}),
	} {
		t.Run(name, func(t *testing.T) {
			c := newChart("t", "a", nil, d)
			for width, svg := range map[string]template.HTML{"380": c.Narrow, "1060": c.Wide} {
				require.Regexp(t, `^<svg viewBox="0 0 `+width+` [0-9]+">`, string(svg))
				require.NotContains(t, string(svg), "NaN")
				require.NotContains(t, string(svg), "Inf")
			}
		})
	}
}

func TestTicksAreRoundAndFew(t *testing.T) {
	labels := func(ticks interface {
		Ticks(from, to float64) []plot.Tick
	}, from, to float64) (out []string) {
		for _, k := range ticks.Ticks(from, to) {
			if k.Label != "" {
				out = append(out, k.Label)
			}
		}
		return out
	}
	require.Equal(t, []string{"0", "20", "40", "60"}, labels(roundTicks{1000, 5}, -0.001, 0.0712))
	require.Equal(t, []string{"0", "0.5", "1"}, labels(roundTicks{1, 3}, 0, 1.2))
	require.Equal(t, []string{"0"}, labels(roundTicks{1, 3}, 0, 0))
	require.Equal(t, []string{"4 KiB", "16 KiB", "64 KiB"}, labels(sizeTicks{3}, 4096, 131072))
	require.Equal(t, []string{"512 B", "1 KiB"}, labels(sizeTicks{9}, 512, 1500))
	require.Equal(t, []string{"0.1", "1", "10", "100"}, labels(decadeTicks{}, 0.1, 90))
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 64 << 20: "64 MiB", 8 << 30: "8 GiB", 3 << 50: "3072 TiB"} {
		require.Equal(t, want, byteSize(n))
	}
	require.Equal(t, []int{1, 4, 16, 64}, thin([]int{1, 2, 4, 8, 16, 32, 64}, 4))
	require.Equal(t, []int{1, 2}, thin([]int{1, 2}, 4))
}
