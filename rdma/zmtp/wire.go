package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Errors that callers match with errors.Is.
var (
	// ErrProtocol: the peer sent something that ZMTP 3.1 or the REQ/ROUTER pattern does not allow.
	ErrProtocol = errors.New("ZMTP protocol violation")
	// ErrTooLarge: a message exceeds the limit of its reader in bytes or in frames.
	ErrTooLarge = errors.New("message too large")
	// ErrRefused: the peer answered with an ERROR command.
	ErrRefused = errors.New("refused by the peer")
	// ErrEvicted: the server closed its least recently active connection to make room for another.
	ErrEvicted = errors.New("connection evicted")

	errNoMessage = errors.New("no message")
)

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	maxFrames  = 8    // frames of one received message, envelope included
	frameCost  = 64   // bytes charged per received frame, so that empty frames are not free
	maxCommand = 4096 // bytes of one received command
	growStep   = 64 << 10
)

// greeting is the whole of what each side says first: signature, version 3.1, mechanism NULL, not a
// security server, filler.
var greeting = [64]byte{0: 0xff, 8: 1, 9: 0x7f, 10: 3, 11: 1, 12: 'N', 13: 'U', 14: 'L', 15: 'L'}

// past is a deadline that has always expired.
var past = time.Unix(1, 0)

// conn is one ZMTP connection. It is used by one goroutine, save for Close and SetDeadline.
type conn struct {
	net.Conn
	r            *bufio.Reader
	late         int           // bytes that may still be read after the read deadline
	writeTimeout time.Duration // for one command or message; 0 leaves the write deadline alone
}

func newConn(nc net.Conn, writeTimeout time.Duration) *conn {
	c := &conn{Conn: nc, writeTimeout: writeTimeout}
	c.r = bufio.NewReader(c)
	return c
}

// Read takes bytes that had already arrived when the deadline expired, up to c.late of them: a reader that
// was scheduled late must not throw away an answer that came in time. net.Conn alone refuses to.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 || c.late <= 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	sc, ok := c.Conn.(syscall.Conn)
	if !ok {
		return 0, err
	}
	raw, rawErr := sc.SyscallConn()
	if rawErr != nil {
		return 0, err
	}
	if c.SetReadDeadline(time.Time{}) != nil {
		return 0, err
	}
	p = p[:min(len(p), c.late)]
	rawErr = raw.Read(func(fd uintptr) bool {
		for {
			var readErr error
			if n, readErr = syscall.Read(int(fd), p); readErr != syscall.EINTR {
				return true // the socket does not block: take what is there and do not wait
			}
		}
	})
	if deadlineErr := c.SetReadDeadline(past); rawErr != nil || deadlineErr != nil || n <= 0 {
		return 0, err
	}
	c.late -= n
	return n, nil
}

// handshake exchanges greetings and READY commands. It returns only after the peer's READY: libzmq drops a
// peer whose first message arrives before libzmq has sent its own.
func (c *conn) handshake(socketType string, peerTypes ...string) error {
	c.late = len(greeting) + maxCommand
	if _, err := c.Write(greeting[:]); err != nil {
		return err
	}
	if err := c.readGreeting(); err != nil {
		return noEOF(err)
	}
	if err := c.writeCommand("READY", readyProperties(socketType)); err != nil {
		return err
	}
	flags, size, err := c.readHeader()
	if err != nil {
		return noEOF(err)
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: message before READY", ErrProtocol)
	}
	name, data, err := c.readCommand(size)
	if err != nil {
		return err
	}
	switch name {
	case "READY":
	case "ERROR":
		return peerError(data)
	default:
		return fmt.Errorf("%w: command %q before READY", ErrProtocol, name)
	}
	peerType, err := socketTypeOf(data)
	if err == nil && !slices.Contains(peerTypes, peerType) {
		err = fmt.Errorf("%w: a %s socket cannot talk to this %s", ErrProtocol, printable(peerType), socketType)
	}
	if err != nil {
		// The reason helps whoever runs the peer; the connection ends either way.
		const reason = "Invalid READY"
		_ = c.writeCommand("ERROR", append([]byte{byte(len(reason))}, reason...))
	}
	return err
}

// readGreeting checks each part before it waits for the next, so that a stranger (HTTP, TLS, an older ZMTP)
// is told apart by the first bytes that it sends.
func (c *conn) readGreeting() error {
	var g [64]byte
	read := 0
	upTo := func(n int) error {
		_, err := io.ReadFull(c.r, g[read:n])
		read = n
		return err
	}
	if err := upTo(1); err != nil {
		return err
	}
	if g[0] != greeting[0] {
		return fmt.Errorf("%w: first byte is 0x%02x, not 0xff", ErrProtocol, g[0])
	}
	if err := upTo(10); err != nil {
		return err
	}
	if g[9] != greeting[9] {
		return fmt.Errorf("%w: the signature ends in 0x%02x, not 0x7f", ErrProtocol, g[9])
	}
	if err := upTo(11); err != nil {
		return err
	}
	if g[10] < 3 {
		return fmt.Errorf("%w: the peer speaks ZMTP revision %d, 3 is needed", ErrProtocol, g[10])
	}
	if err := upTo(len(g)); err != nil {
		return err
	}
	if [20]byte(g[12:32]) != [20]byte(greeting[12:32]) {
		return fmt.Errorf("%w: mechanism %s, only NULL is supported", ErrProtocol, printable(strings.TrimRight(string(g[12:32]), "\x00")))
	}
	return nil
}

// readMessage reads one message of at most maxFrames frames and limit bytes, frameCost per frame included.
// It waits for idle until the message starts and for whole until it is complete; 0 sets no read deadline.
// Heartbeats are answered on the way and do not prolong the wait. When no message starts, the error
// matches errNoMessage.
func (c *conn) readMessage(limit int, idle, whole time.Duration) ([][]byte, error) {
	c.late = limit
	idleEnd := time.Now().Add(idle)
	var frames [][]byte
	for {
		if len(frames) == 0 {
			if err := c.awaitByte(idle, idleEnd, whole); err != nil {
				return nil, fmt.Errorf("%w: %w", errNoMessage, err)
			}
		}
		flags, size, err := c.readHeader()
		if err != nil {
			return nil, noEOF(err)
		}
		if flags&flagCommand != 0 { // libzmq sends heartbeats even between two frames of a message
			if err := c.answerCommand(size); err != nil {
				return nil, err
			}
			continue
		}
		if limit -= frameCost; len(frames) == maxFrames || limit < 0 || size > uint64(limit) {
			return nil, fmt.Errorf("%w: frame %d has %d bytes, %d are left; at most %d frames", ErrTooLarge, len(frames)+1, size, max(limit, 0), maxFrames)
		}
		limit -= int(size)
		body, err := c.readBody(int(size))
		if err != nil {
			return nil, err
		}
		if frames = append(frames, body); flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// awaitByte waits until idleEnd for the first byte of a frame, then starts the clock of the whole message.
func (c *conn) awaitByte(idle time.Duration, idleEnd time.Time, whole time.Duration) error {
	if idle > 0 {
		if err := c.SetReadDeadline(idleEnd); err != nil {
			return err
		}
	}
	if _, err := c.r.Peek(1); err != nil {
		return err
	}
	if whole > 0 {
		return c.SetReadDeadline(time.Now().Add(whole))
	}
	return nil
}

func (c *conn) readHeader() (flags byte, size uint64, err error) {
	if flags, err = c.r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, fmt.Errorf("%w: reserved bits in frame flags 0x%02x", ErrProtocol, flags)
	}
	if flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, 0, fmt.Errorf("%w: a command cannot have the MORE flag", ErrProtocol)
	}
	if flags&flagLong == 0 {
		b, err := c.r.ReadByte()
		return flags, uint64(b), noEOF(err)
	}
	var b [8]byte
	_, err = io.ReadFull(c.r, b[:])
	return flags, binary.BigEndian.Uint64(b[:]), noEOF(err)
}

// readBody grows its buffer as the bytes arrive: the size is only what the peer announced.
func (c *conn) readBody(size int) ([]byte, error) {
	body := make([]byte, 0, min(size, growStep))
	for len(body) < size {
		if len(body) == cap(body) {
			grown := make([]byte, len(body), min(size, 2*cap(body)))
			copy(grown, body)
			body = grown
		}
		n, err := io.ReadFull(c.r, body[len(body):cap(body)])
		body = body[:len(body)+n]
		if err != nil {
			return nil, noEOF(err)
		}
	}
	return body, nil
}

func (c *conn) readCommand(size uint64) (name string, data []byte, err error) {
	if size > maxCommand {
		return "", nil, fmt.Errorf("%w: command of %d bytes", ErrTooLarge, size)
	}
	body, err := c.readBody(int(size))
	if err != nil {
		return "", nil, err
	}
	if len(body) == 0 || int(body[0]) > len(body)-1 {
		return "", nil, fmt.Errorf("%w: command without a name", ErrProtocol)
	}
	end := 1 + int(body[0])
	return string(body[1:end]), body[end:], nil
}

// answerCommand handles a command that arrives after the handshake.
func (c *conn) answerCommand(size uint64) error {
	name, data, err := c.readCommand(size)
	if err != nil {
		return err
	}
	switch name {
	case "PING": // 2 bytes of time to live, then up to 16 bytes that the answer repeats
		if len(data) < 2 || len(data) > 2+16 {
			return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
		}
		return c.writeCommand("PONG", data[2:])
	case "PONG":
		return nil
	case "ERROR":
		return peerError(data)
	}
	return fmt.Errorf("%w: unknown command %s", ErrProtocol, printable(name))
}

func (c *conn) writeCommand(name string, data []byte) error {
	body := append([]byte{byte(len(name))}, name...)
	body = append(body, data...)
	return c.write(append(appendHeader(nil, flagCommand, len(body)), body...))
}

func (c *conn) writeMessage(frames [][]byte) error {
	headers := make([]byte, 0, 9*len(frames))
	parts := make([][]byte, 0, 2*len(frames))
	for i, frame := range frames {
		start := len(headers)
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		headers = appendHeader(headers, flags, len(frame))
		parts = append(parts, headers[start:])
		if len(frame) > 0 {
			parts = append(parts, frame)
		}
	}
	return c.write(parts...)
}

func (c *conn) write(parts ...[]byte) error {
	if c.writeTimeout > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.writeTimeout)); err != nil {
			return err
		}
	}
	buffers := net.Buffers(parts)
	_, err := buffers.WriteTo(c.Conn)
	return err
}

func appendHeader(dst []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(dst, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(size))
}

// readyProperties is the body of READY: libzmq sends an empty Identity as well, so it is sent here too.
func readyProperties(socketType string) []byte {
	var b []byte
	for _, p := range [][2]string{{"Socket-Type", socketType}, {"Identity", ""}} {
		b = append(append(b, byte(len(p[0]))), p[0]...)
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(p[1]))), p[1]...)
	}
	return b
}

// socketTypeOf checks the properties of a READY command and returns the Socket-Type. Other properties,
// the identity among them, carry nothing that this package needs.
func socketTypeOf(b []byte) (string, error) {
	socketType := ""
	for len(b) > 0 {
		nameEnd := 1 + int(b[0])
		if b[0] == 0 || len(b) < nameEnd+4 {
			return "", fmt.Errorf("%w: truncated property in READY", ErrProtocol)
		}
		size := binary.BigEndian.Uint32(b[nameEnd:])
		if uint64(size) > uint64(len(b)-nameEnd-4) {
			return "", fmt.Errorf("%w: truncated property value in READY", ErrProtocol)
		}
		valueEnd := nameEnd + 4 + int(size)
		if strings.EqualFold(string(b[1:nameEnd]), "Socket-Type") {
			socketType = string(b[nameEnd+4 : valueEnd])
		}
		b = b[valueEnd:]
	}
	if socketType == "" {
		return "", fmt.Errorf("%w: READY without Socket-Type", ErrProtocol)
	}
	return socketType, nil
}

// splitEnvelope cuts a message behind its first empty frame.
func splitEnvelope(frames [][]byte) (envelope, body [][]byte, err error) {
	i := slices.IndexFunc(frames, func(f []byte) bool { return len(f) == 0 })
	switch {
	case i < 0:
		return nil, nil, fmt.Errorf("%w: no empty delimiter in a message of %d frames", ErrProtocol, len(frames))
	case i == len(frames)-1:
		return nil, nil, fmt.Errorf("%w: nothing behind the empty delimiter", ErrProtocol)
	}
	return frames[:i+1], frames[i+1:], nil
}

// peerError reads the reason of an ERROR command: one byte of length, then the text.
func peerError(data []byte) error {
	if len(data) == 0 || int(data[0]) > len(data)-1 {
		return fmt.Errorf("%w: ERROR command without a reason", ErrProtocol)
	}
	return fmt.Errorf("%w: %s", ErrRefused, printable(string(data[1:1+int(data[0])])))
}

// printable quotes text that a peer chose, for use in an error.
func printable(s string) string {
	if len(s) > 64 {
		return fmt.Sprintf("%q (cut)", s[:64])
	}
	return fmt.Sprintf("%q", s)
}

// noEOF turns an end of stream in the middle of something into an error that says so.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
