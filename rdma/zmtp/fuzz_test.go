package zmtp

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"
)

// script is a connection on which the peer says input and then nothing more.
type script struct {
	input  *bytes.Reader
	output bytes.Buffer
}

func (c *script) Read(p []byte) (int, error)       { return c.input.Read(p) }
func (c *script) Write(p []byte) (int, error)      { return c.output.Write(p) }
func (c *script) Close() error                     { return nil }
func (c *script) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *script) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *script) SetDeadline(time.Time) error      { return nil }
func (c *script) SetReadDeadline(time.Time) error  { return nil }
func (c *script) SetWriteDeadline(time.Time) error { return nil }

var fuzzSeeds = [][]byte{
	nil,
	asked("10"),
	libzmqRequest,
	join(frame(1, "id"), frame(1, ""), frame(1, "a"), frame(0, "b")),
	join(frame(4, "\x04PING\x00\x01ctx"), frame(4, "\x04PONG"), asked("1"), asked("2")),
	frame(4, "\x05ERROR\x04hmpf"),
	join(frame(1, ""), long(0, 300), payload(300)),
	join(frame(1, ""), long(0, 1<<62)),
	long(flagCommand, 1<<40),
	bytes.Repeat([]byte{1, 0}, 9),
	[]byte("GET / HTTP/1.1\r\n\r\n"),
}

// checkOutput reads what this package wrote with its own, strict reader.
func checkOutput(t *testing.T, c *script) {
	out := c.output.Bytes()
	if !bytes.HasPrefix(out, greeting[:]) {
		t.Fatalf("no greeting in %x", out)
	}
	r := newConn(&script{input: bytes.NewReader(out[len(greeting):])}, 0)
	for {
		flags, size, err := r.readHeader()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatalf("%v in %x", err, out)
		}
		if flags&flagCommand != 0 {
			_, _, err = r.readCommand(size)
		} else {
			_, err = r.readBody(int(size))
		}
		if err != nil {
			t.Fatalf("%v in %x", err, out)
		}
	}
}

// checkFrames asserts that a message keeps the limit and that its memory follows from bytes that came.
func checkFrames(t *testing.T, frames [][]byte, limit, input int) {
	sum, memory := 0, 0
	for _, f := range frames {
		sum += len(f) + frameCost
		memory += cap(f)
	}
	if sum > limit || len(frames) > maxFrames || memory > 2*input+maxFrames*growStep {
		t.Fatalf("%d frames, %d bytes charged, %d held for %d bytes of input", len(frames), sum, memory, input)
	}
}

// FuzzServer feeds a server: the whole conversation, or what follows a good handshake.
func FuzzServer(f *testing.F) {
	for _, seed := range fuzzSeeds {
		f.Add(true, seed)
		f.Add(false, join(libzmqREQHello, seed))
	}
	f.Fuzz(func(t *testing.T, greeted bool, data []byte) {
		input := data
		if greeted {
			input = join(libzmqREQHello, data)
		}
		srv, err := newServing(&Server{Handler: func(_ context.Context, request [][]byte) ([][]byte, error) {
			if len(request) == 0 {
				t.Fatal("request without a frame")
			}
			checkFrames(t, request, 4096, len(input))
			return request, nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		c := &script{input: bytes.NewReader(input)}
		err = srv.talk(t.Context(), &peer{conn: newConn(c, 0)})
		if greeted && len(data) == 0 && err != nil {
			t.Fatal(err)
		}
		checkOutput(t, c)
	})
}

// FuzzClient feeds a client that sends one request.
func FuzzClient(f *testing.F) {
	for _, seed := range fuzzSeeds {
		f.Add(true, seed)
		f.Add(false, join(libzmqROUTERHello, seed))
	}
	f.Fuzz(func(t *testing.T, greeted bool, data []byte) {
		input := data
		if greeted {
			input = join(libzmqROUTERHello, data)
		}
		script := &script{input: bytes.NewReader(input)}
		c := &Client{conn: newConn(script, 0), maxReply: 1 << 20, busy: make(chan struct{}, 1)}
		if err := c.conn.handshake("REQ", "ROUTER", "REP"); err != nil {
			if greeted {
				t.Fatal(err)
			}
			checkOutput(t, script)
			return
		}
		reply, err := c.Request(t.Context(), [][]byte{[]byte("x")})
		if err == nil && len(reply) == 0 {
			t.Fatal("reply without a frame")
		}
		checkFrames(t, reply, c.maxReply, len(input))
		checkOutput(t, script)
	})
}
