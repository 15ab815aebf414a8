package main

import (
	"io"
	"os"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// patienceOfPeople is how long a task may take before it shows how far it is.
const patienceOfPeople = 2 * time.Second

// progress is a bar on standard error. It comes when the task has taken two seconds, and only on a terminal. Its methods
// are safe for concurrent use.
type progress struct {
	what    string
	total   int64 // 0: unknown, and there is no bar, but a sign of life
	bytes   bool
	start   time.Time
	watched io.Writer // nil: nobody watches
	timer   *time.Timer

	mu    sync.Mutex
	done  int64
	ended bool
	shown *mpb.Progress
	bar   *mpb.Bar
}

// newProgress starts the time of a task of total steps, or bytes. The caller calls end.
func newProgress(errs io.Writer, what string, total int64, bytes bool) *progress {
	p := &progress{what: what, total: total, bytes: bytes, start: time.Now()}
	if isTerminal(errs) {
		p.watched = errs
		p.timer = time.AfterFunc(patienceOfPeople, p.show)
	}
	return p
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// show draws the bar, which redraws itself from now on.
func (p *progress) show() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.shown = mpb.New(mpb.WithOutput(p.watched))
	before := mpb.PrependDecorators(decor.Name(p.what+" "), decor.NewElapsed(decor.ET_STYLE_GO, p.start))
	switch {
	case p.total <= 0:
		p.bar = p.shown.New(0, mpb.SpinnerStyle().PositionLeft(), before, mpb.BarFillerClearOnAbort())
	case p.bytes:
		p.bar = p.shown.AddBar(p.total, mpb.BarRemoveOnComplete(), before, mpb.AppendDecorators(decor.CountersKibiByte("% .1f of % .1f"),
			decor.NewAverageSpeed(decor.SizeB1000(0), ", % .2f, ", p.start), decor.NewAverageETA(decor.ET_STYLE_GO, p.start, nil)))
	default:
		p.bar = p.shown.AddBar(p.total, mpb.BarRemoveOnComplete(), before, mpb.AppendDecorators(decor.CountersNoUnit("%d of %d")))
	}
	p.bar.SetCurrent(p.done)
}

// add says that n more are done.
func (p *progress) add(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if p.bar != nil {
		p.bar.SetCurrent(p.done)
	}
}

// lines is out for what is printed while the task runs: where out and the bar are on terminals, lines go above the bar.
func (p *progress) lines(out io.Writer) io.Writer {
	if p.watched == nil || !isTerminal(out) {
		return out
	}
	return &aboveBar{p, out}
}

type aboveBar struct {
	bar *progress
	out io.Writer
}

func (w *aboveBar) Write(b []byte) (int, error) {
	w.bar.mu.Lock()
	defer w.bar.mu.Unlock()
	if w.bar.shown == nil || w.bar.ended {
		return w.out.Write(b)
	}
	return w.bar.shown.Write(b)
}

// end takes the bar away.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	if p.timer != nil {
		p.timer.Stop()
	}
	if p.shown != nil {
		p.bar.Abort(true)
		p.shown.Wait()
	}
}
