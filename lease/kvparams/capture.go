package kvparams

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
)

// MaxCapture is the largest event, or answer that is no stream, that a
// [Capture] looks into, in bytes. Larger ones are relayed all the same.
const MaxCapture = 16 << 20

// Capture reads the kv_transfer_params of an answer while the answer passes:
// of a plain JSON object, or of the events of a stream, where vLLM puts them
// into the last chunk, and for the Responses API into the response object of
// the completing event. It never delays, changes or fails the relay, and it
// holds one event of a stream at a time.
//
// The bytes must be uncompressed: delete Accept-Encoding from the request that
// is relayed. Not safe for concurrent use.
type Capture struct {
	stream bool
	plain  []byte // the answer, when it is no stream
	over   bool   // an event or the answer was too large

	line   []byte // the line read so far
	length int    // bytes of that line, dropped ones too
	data   []byte // the data lines of the event read so far, each with '\n'
	skip   bool   // the event is too large: drop its bytes
	cr     bool   // the last byte was '\r'
	begun  bool   // the first line has passed, and with it a byte order mark
	raw    []byte // the params found
	twice  bool   // other params were found later
	events int
	bad    error // the first event that may have had params and is no JSON object
}

// NewCapture reads an answer with the given Content-Type: a stream if that is
// text/event-stream, else one JSON object.
func NewCapture(contentType string) *Capture {
	t, _, _ := mime.ParseMediaType(contentType)
	return &Capture{stream: t == "text/event-stream"}
}

// Body relays rc and feeds the capture with what is read.
func (c *Capture) Body(rc io.ReadCloser) io.ReadCloser { return &tee{rc, c} }

type tee struct {
	io.ReadCloser
	c *Capture
}

func (t *tee) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	t.c.feed(p[:n])
	return n, err
}

// Write feeds the capture, for [io.MultiWriter] and [io.TeeReader]. It always
// takes all of p and keeps no part of it.
func (c *Capture) Write(p []byte) (int, error) {
	c.feed(p)
	return len(p), nil
}

// Handoff is what was found so far; call it at the end of the answer. The error
// matches [ErrNoHandoff] when no params came, [ErrTooLarge] when they may have
// been in a part larger than [MaxCapture], and [ErrUnusable] as for
// [FromResponse], or when the stream carries two that differ.
func (c *Capture) Handoff() (Handoff, error) {
	const op = "capture"
	if !c.stream {
		if c.over {
			return Handoff{}, fail(ErrTooLarge, op, keyParams, "the answer has more than %d bytes", MaxCapture)
		}
		return FromResponse(c.plain)
	}
	end := *c // a stream may end without the empty line that ends an event
	if end.length > 0 {
		end.endLine()
	}
	end.endEvent()
	switch {
	case end.twice:
		return Handoff{}, fail(ErrUnusable, op, keyParams, "the stream carries two that differ")
	case end.raw != nil:
		return Parse(end.raw)
	case end.over:
		return Handoff{}, fail(ErrTooLarge, op, keyParams, "an event has more than %d bytes", MaxCapture)
	case end.bad != nil:
		return Handoff{}, &Error{Op: op, Key: keyParams, Detail: "absent, and an event cannot be read", Err: errors.Join(ErrNoHandoff, end.bad)}
	}
	return Handoff{}, fail(ErrNoHandoff, op, keyParams, "absent from %d events", end.events)
}

func (c *Capture) feed(p []byte) {
	if !c.stream {
		if len(c.plain)+len(p) > MaxCapture {
			c.over, c.plain = true, nil
		}
		if !c.over {
			c.plain = append(c.plain, p...)
		}
		return
	}
	// Lines end with "\n", "\r" or "\r\n" (HTML Living Standard, 9.2.6).
	for len(p) > 0 {
		if c.cr {
			c.cr = false
			if p[0] == '\n' {
				p = p[1:]
				continue
			}
		}
		end := bytes.IndexAny(p, "\r\n")
		if end < 0 {
			c.add(p)
			return
		}
		c.add(p[:end])
		c.cr = p[end] == '\r'
		p = p[end+1:]
		if c.length == 0 {
			c.endEvent()
		} else {
			c.endLine()
		}
		c.line, c.length = c.line[:0], 0
	}
}

func (c *Capture) add(p []byte) {
	c.length += len(p)
	if len(c.data)+len(c.line)+len(p) > MaxCapture {
		c.skip, c.over = true, true
		c.line, c.data = nil, nil
	}
	if !c.skip {
		c.line = append(c.line, p...)
	}
}

func (c *Capture) endLine() {
	line := c.line
	if !c.begun {
		c.begun = true
		line = bytes.TrimPrefix(line, []byte("\ufeff"))
	}
	if c.skip {
		return
	}
	if field, value, _ := bytes.Cut(line, []byte(":")); string(field) == "data" {
		c.data = append(append(c.data, bytes.TrimPrefix(value, []byte(" "))...), '\n')
	}
}

func (c *Capture) endEvent() {
	data := bytes.TrimSpace(c.data)
	c.data, c.skip = c.data[:0], false
	if len(data) == 0 {
		return
	}
	c.events++
	if data[0] != '{' || !mayHave(data, keyParams) { // [DONE], or only text
		return
	}
	o, err := parseObject(data)
	if err != nil {
		if c.bad == nil {
			c.bad = fmt.Errorf("event %d: %w", c.events, err)
		}
		return
	}
	c.found(o)
	if response, err := o.sub("capture", keyResponse); err == nil && response != nil {
		c.found(response)
	}
}

// mayHave tells whether the key can be in the text, as it is or with escapes.
func mayHave(text []byte, key string) bool {
	return bytes.Contains(text, []byte(key)) || bytes.Contains(text, []byte(`\u`))
}

func (c *Capture) found(o *object) {
	if !o.present(keyParams) {
		return
	}
	raw := o.value(keyParams)
	if c.raw == nil {
		c.raw = bytes.Clone(raw)
	} else if !bytes.Equal(c.raw, raw) {
		c.twice = true
	}
}
