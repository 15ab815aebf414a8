package main

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// paint is a colour of the report: drawn as the light one, and turned into a CSS variable afterwards, so that one drawing
// serves light and dark screens. The data colours are Okabe and Ito's, which colour-blind people tell apart, darkened or
// lightened until each stands out from its background by 3:1 at least.
type paint struct{ name, light, dark string }

var paints = []paint{
	{"paper", "#fdfdfc", "#16181c"},
	{"card", "#f4f4f1", "#20242a"},
	{"ink", "#1b1d21", "#e6e7e9"},
	{"soft", "#585d66", "#a3a9b3"},
	{"rule", "#d9dad6", "#363b44"},
	{"blue", "#0072b2", "#56a8e8"},
	{"sky", "#a9cfe8", "#2c4c66"},
	{"green", "#007d5b", "#2fc79b"},
	{"amber", "#b06f00", "#f0b43c"},
	{"vermilion", "#c94a00", "#ff7f3e"},
	{"purple", "#a34c80", "#e08fbf"},
}

// hue is the light colour of that name.
func hue(name string) color.Color {
	for _, p := range paints {
		if p.name == name {
			v, _ := strconv.ParseUint(p.light[1:], 16, 32) // a test parses them all
			return color.NRGBA{R: uint8(v >> 16), G: uint8(v >> 8), B: uint8(v), A: 255}
		}
	}
	panic("no colour " + name)
}

// chartStyles are the CSS variables of the colours.
func chartStyles() template.CSS {
	var light, dark strings.Builder
	for _, p := range paints {
		fmt.Fprintf(&light, " --%s: %s;", p.name, p.light)
		fmt.Fprintf(&dark, " --%s: %s;", p.name, p.dark)
	}
	return template.CSS(fmt.Sprintf(":root { color-scheme: light dark;%s }\n@media (prefers-color-scheme: dark) { :root {%s } }", &light, &dark))
}

// Sizes of charts in SVG units; the browser scales them to its width.
const (
	narrowWidth = 380
	wideWidth   = 1060
	fontSize    = 13
)

// drawing makes a plot for a width, and says how high it is to be.
type drawing func(width vg.Length) (p *plot.Plot, height vg.Length)

// newChart draws a chart for narrow and wide screens.
func newChart(title, alt string, legend []legendEntry, d drawing) chart {
	return chart{Title: title, Alt: alt, Legend: legend, Narrow: d.svg(narrowWidth), Wide: d.svg(wideWidth)}
}

func (d drawing) svg(width vg.Length) template.HTML {
	p, height := d(width)
	c := vgsvg.New(width, height)
	p.Draw(draw.New(c))
	return inlineSVG(c)
}

// inlineSVG is what was drawn as an element for HTML, with the colours as CSS variables.
func inlineSVG(c *vgsvg.Canvas) template.HTML {
	var b bytes.Buffer
	_, _ = c.WriteTo(&b) // a Buffer takes everything
	_, s, _ := strings.Cut(b.String(), "<svg ")
	_, rest, _ := strings.Cut(s, ">")
	w, h := c.Size()
	pairs := []string{"\n", " ", "\t", ""}
	for _, p := range paints {
		pairs = append(pairs, strings.ToUpper(p.light), "var(--"+p.name+")")
	}
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %.0f %.0f">%s`, w, h, strings.NewReplacer(pairs...).Replace(rest)))
}

// newPlot is an empty plot in the report's style.
func newPlot(xLabel, yLabel string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Color, a.Tick.Color = hue("soft"), hue("soft")
		a.Label.TextStyle.Color, a.Tick.Label.Color = hue("ink"), hue("soft")
		a.Label.TextStyle.Font, a.Tick.Label.Font = face(fontSize), face(fontSize-1)
		a.Tick.Length = 4
		a.Padding = 4
	}
	p.X.Label.Text, p.Y.Label.Text = xLabel, yLabel
	p.X.Label.Padding, p.Y.Label.Padding = 4, 6
	g := plotter.NewGrid()
	g.Vertical.Color, g.Horizontal.Color = hue("rule"), hue("rule")
	p.Add(g)
	return p
}

func face(size vg.Length) font.Font {
	return font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
}

// sign is what marks an event in a chart.
type sign struct {
	shape draw.GlyphDrawer
	hue   string
}

func (s sign) style(radius vg.Length) draw.GlyphStyle {
	return draw.GlyphStyle{Shape: s.shape, Color: hue(s.hue), Radius: radius}
}

// bar is how a span of time is drawn: its colour and its share of the row's height.
type bar struct {
	hue    string
	height float64
}

// barGlyph lets a legend show a bar.
type barGlyph struct{ height float64 }

func (b barGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	h := s.Radius * vg.Length(b.height)
	c.FillPolygon(s.Color, []vg.Point{{X: at.X - s.Radius, Y: at.Y - h}, {X: at.X + s.Radius, Y: at.Y - h}, {X: at.X + s.Radius, Y: at.Y + h}, {X: at.X - s.Radius, Y: at.Y + h}})
}

// lineGlyph is a tick across the row, or in a legend.
type lineGlyph struct{}

func (lineGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.StrokeLine2(draw.LineStyle{Color: s.Color, Width: 1.5}, at.X, at.Y-s.Radius, at.X, at.Y+s.Radius)
}

// dashGlyph is a line of a chart in its legend.
type dashGlyph struct{ dashes []vg.Length }

func (d dashGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.StrokeLine2(draw.LineStyle{Color: s.Color, Width: 2, Dashes: d.dashes}, at.X-s.Radius, at.Y, at.X+s.Radius, at.Y)
}

// legendOf draws a sign beside its explanation.
func legendOf(s sign, text string) legendEntry {
	const size = 20
	c := vgsvg.New(size, size)
	dc := draw.New(c)
	dc.DrawGlyph(s.style(6), vg.Point{X: size / 2, Y: size / 2})
	return legendEntry{inlineSVG(c), text}
}

// lane is a row of a timeline.
type lane struct {
	Name  string
	Spans []span
	Marks []mark
}

type span struct {
	from, to float64
	bar      bar
}

type mark struct {
	at   float64
	sign sign
}

// timeline draws lanes from top to bottom over one time axis.
type timeline struct {
	lanes []lane
	row   vg.Length // height of a row
}

// newTimeline is the drawing of lanes whose times are in seconds. The axis shows them in ms where they are short.
func newTimeline(lanes []lane, label string) drawing {
	t := timeline{lanes: lanes, row: min(max(vg.Length(420/max(len(lanes), 1)), 9), 26)}
	from, to := t.ends()
	if from > to {
		from, to = 0, 1 // nothing happened
	}
	scale, unit := 1.0, "s"
	if to-from < 2 {
		scale, unit = 1000, "ms"
	}
	return func(width vg.Length) (*plot.Plot, vg.Length) {
		p := newPlot(label+", "+unit, "")
		p.Add(t)
		p.X.Min, p.X.Max = from, to
		p.Y.Min, p.Y.Max = -0.5, float64(len(lanes))-0.5
		p.Y.Padding = 0
		p.X.Tick.Marker = roundTicks{scale: scale, most: int(width / 75)}
		every := int(math.Ceil(float64((fontSize + 1) / t.row)))
		names := plot.ConstantTicks{}
		for i, l := range lanes {
			if i%every == 0 {
				names = append(names, plot.Tick{Value: t.y(i), Label: l.Name})
			}
		}
		p.Y.Tick.Marker = names
		p.Y.Tick.Length = 0
		p.Y.LineStyle.Width = 0
		return p, t.row*vg.Length(len(lanes)) + 48
	}
}

func (t timeline) y(lane int) float64 { return float64(len(t.lanes) - 1 - lane) }

// ends is the range of the times, with a little air.
func (t timeline) ends() (from, to float64) {
	from, to = math.Inf(1), math.Inf(-1)
	for _, l := range t.lanes {
		for _, s := range l.Spans {
			from, to = min(from, s.from), max(to, s.to)
		}
		for _, m := range l.Marks {
			from, to = min(from, m.at), max(to, m.at)
		}
	}
	air := (to - from) / 50
	return from - air, to + air
}

// Plot implements plot.Plotter.
func (t timeline) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, l := range t.lanes {
		at := y(t.y(i))
		for _, s := range l.Spans {
			half := t.row * vg.Length(s.bar.height) / 2
			from, to := x(s.from), x(s.to)
			if to-from < 1 {
				to = from + 1
			}
			c.FillPolygon(hue(s.bar.hue), []vg.Point{{X: from, Y: at - half}, {X: to, Y: at - half}, {X: to, Y: at + half}, {X: from, Y: at + half}})
		}
		for _, m := range l.Marks {
			c.DrawGlyph(m.sign.style(min(t.row*0.36, 6)), vg.Point{X: x(m.at), Y: at})
		}
	}
}

// roundTicks are ticks at round values of an axis, shown times scale. At most most of them have labels.
type roundTicks struct {
	scale float64
	most  int
}

func (t roundTicks) Ticks(from, to float64) []plot.Tick {
	step := roundStep((to - from) * t.scale / float64(max(t.most, 2)))
	var ticks []plot.Tick
	for k := math.Ceil(from * t.scale / step); k*step <= to*t.scale; k++ {
		v := k*step + 0 // no minus before a zero
		ticks = append(ticks, plot.Tick{Value: v / t.scale, Label: strconv.FormatFloat(v, 'g', 6, 64)})
	}
	return ticks
}

// roundStep is the first of 1, 2, 5, 10, 20… and their tenths that is not below least.
func roundStep(least float64) float64 {
	if least <= 0 {
		return 1
	}
	magnitude := math.Pow(10, math.Floor(math.Log10(least)))
	for _, m := range []float64{1, 2, 5} {
		if m*magnitude >= least {
			return m * magnitude
		}
	}
	return 10 * magnitude
}

// series is one line of a chart over sizes.
type series struct {
	name   string
	hue    string
	dashes []vg.Length
	shape  draw.GlyphDrawer
	xys    plotter.XYs
}

func (s series) legend() legendEntry {
	g := glyphs{dashGlyph{s.dashes}}
	if s.shape != nil {
		g = append(g, s.shape)
	}
	return legendOf(sign{g, s.hue}, s.name)
}

// glyphs are several in one place.
type glyphs []draw.GlyphDrawer

func (g glyphs) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	for _, d := range g {
		part := s
		if _, line := d.(dashGlyph); line {
			part.Radius = 10
		} else {
			part.Radius = 4
		}
		d.DrawGlyph(c, part, at)
	}
}

// axes are what newLines draws over. Nil ticks are those of plot, on a linear axis.
type axes struct {
	x, y         string
	xTicks       func(width vg.Length) plot.Ticker // of a logarithmic axis
	yLogarithmic bool
}

// newLines draws series. Values on logarithmic axes are above 0.
func newLines(a axes, lines []series) drawing {
	return func(width vg.Length) (*plot.Plot, vg.Length) {
		p := newPlot(a.x, a.y)
		for _, s := range lines {
			line, points, err := plotter.NewLinePoints(s.xys)
			if err != nil { // it has no points
				continue
			}
			line.Color, line.Width, line.Dashes = hue(s.hue), 2, s.dashes
			p.Add(line)
			if s.shape != nil {
				points.GlyphStyle = sign{s.shape, s.hue}.style(3.5)
				p.Add(points)
			}
		}
		if math.IsInf(p.X.Min, 0) {
			return p, 60 // none has
		}
		if a.xTicks != nil {
			p.X.Scale = plot.LogScale{}
			p.X.Tick.Marker = a.xTicks(width)
			if p.X.Min >= p.X.Max {
				p.X.Min, p.X.Max = p.X.Min/2, p.X.Max*2
			}
		}
		if a.yLogarithmic {
			p.Y.Scale = plot.LogScale{}
			p.Y.Tick.Marker = decadeTicks{}
			p.Y.Min, p.Y.Max = math.Pow(10, math.Floor(math.Log10(p.Y.Min))), math.Pow(10, math.Ceil(math.Log10(p.Y.Max)))
			if p.Y.Min == p.Y.Max {
				p.Y.Max *= 10
			}
		} else {
			p.Y.Min = 0
			p.Y.Max *= 1.05
			p.Y.Tick.Marker = roundTicks{scale: 1, most: 6}
		}
		return p, min(width*3/4, 380)
	}
}

func sizeAxis(width vg.Length) plot.Ticker { return sizeTicks{most: int(width / 70)} }

func decadeAxis(vg.Length) plot.Ticker { return decadeTicks{} }

// sizeTicks are ticks at powers of 2 bytes, of an axis above 0.
type sizeTicks struct{ most int }

func (t sizeTicks) Ticks(from, to float64) []plot.Tick {
	first, last := math.Ceil(math.Log2(from)-1e-9), math.Floor(math.Log2(to)+1e-9)
	every := math.Ceil((last - first + 1) / float64(max(t.most, 2)))
	var ticks []plot.Tick
	for e := first; e <= last; e++ {
		tick := plot.Tick{Value: math.Exp2(e)}
		if math.Mod(e-first, every) == 0 {
			tick.Label = byteSize(int64(tick.Value))
		}
		ticks = append(ticks, tick)
	}
	return ticks
}

// decadeTicks are labels at powers of 10, and ticks between, of an axis above 0.
type decadeTicks struct{}

func (decadeTicks) Ticks(from, to float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Floor(math.Log10(from)); e <= math.Ceil(math.Log10(to)); e++ {
		for m := 1.0; m < 10; m++ {
			tick := plot.Tick{Value: m * math.Pow(10, e)}
			if m == 1 {
				tick.Label = strconv.FormatFloat(tick.Value, 'f', -1, 64)
			}
			ticks = append(ticks, tick)
		}
	}
	return ticks
}
