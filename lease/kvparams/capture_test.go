package kvparams

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const sse = "text/event-stream; charset=utf-8"

// streamed is a stream of vLLM: the params ride in the last chunk.
const streamed = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"kv_transfer_params":null}` + "\n\n" +
	`data: {"id":"c","choices":[{"index":0,"delta":{"content":"data: {\"kv_transfer_params\":{}}\n\n"}}]}` + "\n\n" +
	`data: {"id":"c","choices":[{"index":0,"delta":{"content":"!"},"finish_reason":"stop"}],"kv_transfer_params":` + offer + `}` + "\n\n" +
	`data: {"id":"c","choices":[],"usage":{"total_tokens":3}}` + "\n\n" +
	"data: [DONE]\n\n"

func capture(t testing.TB, contentType string, chunks ...string) (Handoff, error) {
	t.Helper()
	c := NewCapture(contentType)
	for _, s := range chunks {
		n, err := c.Write([]byte(s))
		require.NoError(t, err)
		require.Equal(t, len(s), n)
	}
	return c.Handoff()
}

func TestParamsAreFoundInStreams(t *testing.T) {
	want := parsed(t, offer)
	for name, stream := range map[string]string{
		"LF":       streamed,
		"CRLF":     strings.ReplaceAll(streamed, "\n", "\r\n"),
		"CR":       strings.ReplaceAll(streamed, "\n", "\r"),
		"mixed":    strings.Replace(streamed, "\n\n", "\r\n\r", 2),
		"no space": strings.ReplaceAll(streamed, "data: ", "data:"),
		"comments": ": ping\n\n" + strings.ReplaceAll(streamed, "data: ", ":{\"kv_transfer_params\":5}\nid: 7\nevent: message\nretry: 1\ndata: "),
		"BOM":      "\ufeffdata: {\"kv_transfer_params\":" + offer + "}\n\n",
		"multi-line data": "data: {\"a\":1,\ndata:\ndata:  \"kv_transfer_params\"\n: between\ndata: :\n" +
			"data: " + strings.ReplaceAll(offer, `"x":`, "\"x\":\ndata: ") + "}\n\n",
		"unknown fields":       "dataset: {\"kv_transfer_params\":1}\n\n" + streamed,
		"no last empty line":   `data: {"kv_transfer_params":` + offer + "}\n",
		"no last line end":     `data: {"kv_transfer_params":` + offer + "}",
		"first chunk too":      `data: {"kv_transfer_params":` + offer + "}\n\n" + streamed,
		"escaped key":          strings.ReplaceAll(streamed, `],"kv_transfer`, `],"kv\u005ftransfer`),
		"responses API":        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"kv_transfer_params\":" + offer + "}}\n\n",
		"one event is no JSON": "data: {oops\n\n" + streamed,
	} {
		got, err := capture(t, sse, stream)
		require.NoError(t, err, name)
		require.Equal(t, want, withRaw(got, want), name)
		for i := range len(stream) {
			if name != "CRLF" && name != "multi-line data" && i > 8 { // the start has the byte order mark
				break
			}
			got, err := capture(t, sse, stream[:i], stream[i:])
			if err != nil || len(got.raw) == 0 {
				t.Fatalf("%s, split at %d: %v", name, i, err)
			}
		}
		got, err = capture(t, sse, strings.Split(stream, "")...)
		require.NoError(t, err, name)
		require.Equal(t, want, withRaw(got, want), name)
	}
}

// withRaw drops a difference in white space, which multi-line data makes.
func withRaw(h, other Handoff) Handoff {
	if strings.ReplaceAll(string(h.raw), "\n", "") == strings.ReplaceAll(string(other.raw), "\n", "") {
		return Handoff{other.raw, other.params}
	}
	return h
}

func TestAStreamWithoutParamsIsNoHandoff(t *testing.T) {
	for name, stream := range map[string]string{
		"empty": "", "done": "data: [DONE]\n\n",
		"null":        `data: {"kv_transfer_params":null}` + "\n\n",
		"in text":     `data: {"choices":[{"delta":{"kv_transfer_params":` + offer + `}}]}` + "\n\n",
		"cut":         `data: {"kv_transfer_params":` + offer,
		"in comment":  `:{"kv_transfer_params":` + offer + "}\n\n",
		"other field": `event: {"kv_transfer_params":` + offer + "}\n\n",
		"not SSE":     `{"kv_transfer_params":` + offer + "}\n\n",
		"error":       `data: {"error":{"message":"boom","code":500}}` + "\n\n",
	} {
		_, err := capture(t, sse, stream)
		requireKey(t, err, ErrNoHandoff, "kv_transfer_params")
		if name == "cut" {
			require.ErrorContains(t, err, "event 1: ")
		}
	}
	_, err := capture(t, sse, `data: {"kv_transfer_params":{"remote_engine_id":"e"}}`+"\n\n")
	requireKey(t, err, ErrUnusable, "remote_request_id")
	_, err = capture(t, sse, `data: {"kv_transfer_params":"x"}`+"\n\n")
	require.ErrorIs(t, err, ErrUnusable)
	// n > 1: each sequence has its own. To take one would lose the other.
	_, err = capture(t, sse, streamed, strings.ReplaceAll(streamed, "[[5,6,7]]", "[[8,9]]"))
	requireKey(t, err, ErrUnusable, "kv_transfer_params")
	require.ErrorContains(t, err, "differ")
}

func TestPlainAnswersAreCaptured(t *testing.T) {
	body := `{"choices":[],"kv_transfer_params":` + offer + `}`
	for _, ct := range []string{"application/json", "", "application/json; charset=utf-8", ";;"} {
		got, err := capture(t, ct, body[:20], body[20:])
		require.NoError(t, err)
		require.Equal(t, parsed(t, offer), got)
	}
	_, err := capture(t, "application/json", `{"choices":[]}`)
	require.ErrorIs(t, err, ErrNoHandoff)
	_, err = capture(t, "application/json", "\x1f\x8b\x08")
	require.ErrorIs(t, err, ErrUnusable)
}

func TestTheStateOfACaptureCanBeAskedAtAnyTime(t *testing.T) {
	c := NewCapture(sse)
	for i := range len(streamed) {
		_, _ = c.Write([]byte(streamed[i : i+1]))
		_, _ = c.Handoff()
	}
	h, err := c.Handoff()
	require.NoError(t, err)
	require.Equal(t, parsed(t, offer), h)
}

func TestWhatIsTooLargeIsRelayedAndReported(t *testing.T) {
	huge := strings.Repeat("x", MaxCapture+1)
	_, err := capture(t, "application/json", `{"a":"`, huge, `"}`)
	requireKey(t, err, ErrTooLarge, "kv_transfer_params")
	_, err = capture(t, sse, `data: {"a":"`, huge, "\"}\n\n")
	requireKey(t, err, ErrTooLarge, "kv_transfer_params")

	// The events after it are read again, whatever the line is and where it ends.
	for _, before := range []string{"data: " + huge + "\n\n", ":" + huge + "\n", "data: {\ndata: " + huge + "\ndata: }\n\n", huge + "\r\n\r\n"} {
		h, err := capture(t, sse, before+streamed)
		require.NoError(t, err)
		require.Equal(t, parsed(t, offer), h)
	}
	var out bytes.Buffer
	c := NewCapture(sse)
	_, err = io.Copy(&out, c.Body(io.NopCloser(strings.NewReader(huge))))
	require.NoError(t, err)
	require.Equal(t, huge, out.String())
}

func TestTheRelayIsUnchanged(t *testing.T) {
	broken := errors.New("broken")
	for _, wrap := range []func(io.Reader) io.Reader{iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader, func(r io.Reader) io.Reader { return r }} {
		for _, ct := range []string{sse, "application/json"} {
			c := NewCapture(ct)
			got, err := io.ReadAll(c.Body(io.NopCloser(wrap(strings.NewReader(streamed)))))
			require.NoError(t, err)
			require.Equal(t, streamed, string(got))
		}
		c := NewCapture(sse)
		got, err := io.ReadAll(c.Body(io.NopCloser(io.MultiReader(wrap(strings.NewReader(streamed)), iotest.ErrReader(broken)))))
		require.ErrorIs(t, err, broken)
		require.Equal(t, streamed, string(got))
		_, err = c.Handoff()
		require.NoError(t, err)
	}
	closed := &closer{Reader: strings.NewReader("")}
	require.NoError(t, NewCapture(sse).Body(closed).Close())
	require.True(t, closed.closed)
}

type closer struct {
	io.Reader
	closed bool
}

func (c *closer) Close() error { c.closed = true; return nil }

// llm-d-router#2432: a capture in a relay must not hold back a stream. The
// server sends an event only after the client has the one before.
func TestAStreamPassesAReverseProxyEventByEvent(t *testing.T) {
	next := make(chan struct{})
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for event := range strings.SplitAfterSeq(streamed, "\n\n") {
			_, _ = io.WriteString(w, event)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}))
	defer d.Close()
	target, err := url.Parse(d.URL)
	require.NoError(t, err)
	found := make(chan Handoff, 1)
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var c *Capture
		proxy := httputil.NewSingleHostReverseProxy(target)
		proxy.ModifyResponse = func(res *http.Response) error {
			c = NewCapture(res.Header.Get("Content-Type"))
			res.Body = c.Body(res.Body)
			return nil
		}
		proxy.ServeHTTP(w, r)
		h, err := c.Handoff()
		if err != nil {
			t.Error(err)
		}
		found <- h
	}))
	defer router.Close()
	res, err := http.Get(router.URL)
	require.NoError(t, err)
	defer res.Body.Close()
	for event := range strings.SplitAfterSeq(streamed, "\n\n") {
		got := make([]byte, len(event))
		_, err := io.ReadFull(res.Body, got)
		require.NoError(t, err)
		require.Equal(t, event, string(got))
		next <- struct{}{}
	}
	require.Equal(t, parsed(t, offer), <-found)
}

// referenceEvents reads a whole stream the slow and plain way.
func referenceEvents(stream string) (events []string) {
	stream = strings.TrimPrefix(stream, "\ufeff")
	stream = strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\r", "\n")
	var data []string
	flush := func() {
		if s := strings.Trim(strings.Join(data, "\n"), " \t\n\v\f\r\u0085\u00a0"); s != "" {
			events = append(events, s)
		}
		data = nil
	}
	for line := range strings.SplitSeq(stream, "\n") {
		name, value, _ := strings.Cut(line, ":")
		switch {
		case line == "":
			flush()
		case name == "data":
			data = append(data, strings.TrimPrefix(value, " "))
		}
	}
	flush()
	return events
}

func referenceHandoff(stream string) (raw string, twice bool) {
	for _, e := range referenceEvents(stream) {
		o, err := parseObject([]byte(e))
		if err != nil {
			continue
		}
		objects := []*object{o}
		if sub, err := o.sub("", "response"); err == nil && sub != nil {
			objects = append(objects, sub)
		}
		for _, o := range objects {
			if v := string(o.value("kv_transfer_params")); v != "" && v != "null" {
				twice = twice || raw != "" && raw != v
				raw = v
			}
		}
	}
	return raw, twice
}

func checkStream(t interface{ Fatalf(string, ...any) }, stream string, chunks []string) {
	c := NewCapture(sse)
	var out bytes.Buffer
	w := io.MultiWriter(&out, c)
	for _, s := range chunks {
		_, _ = io.WriteString(w, s)
	}
	if out.String() != stream {
		t.Fatalf("the bytes changed")
	}
	raw, twice := referenceHandoff(stream)
	h, err := c.Handoff()
	switch {
	case twice:
		if !errors.Is(err, ErrUnusable) {
			t.Fatalf("%q: %v, want two that differ", stream, err)
		}
	case raw == "":
		if !errors.Is(err, ErrNoHandoff) {
			t.Fatalf("%q: %v, want none", stream, err)
		}
	default:
		want, wantErr := Parse([]byte(raw))
		if (err == nil) != (wantErr == nil) || !bytes.Equal(h.raw, want.raw) {
			t.Fatalf("%q: %q, %v; want %q, %v", stream, h.raw, err, want.raw, wantErr)
		}
	}
}

func TestAnyStreamInAnyChunksIsReadAlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		eol := rapid.SampledFrom([]string{"\n", "\r\n", "\r"})
		var b strings.Builder
		for range rapid.IntRange(0, 8).Draw(t, "lines") {
			line := rapid.SampledFrom([]string{"", "", "data", "data:", ": c", "event: x", `data: {"kv_transfer_params":` + offer + `}`, `data:{"a":`, "data: 1}",
				`data: {"response":{"kv_transfer_params":` + offer + `}}`, `data: {"kv_transfer_params":{}}`, "data: [DONE]", " data: {}", "data : {}", "\ufeff"}).Draw(t, "line")
			b.WriteString(line + eol.Draw(t, "eol"))
			if rapid.Bool().Draw(t, "end") {
				b.WriteString(eol.Draw(t, "eol"))
			}
		}
		stream := b.String()
		var chunks []string
		for rest := stream; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "chunk")
			chunks = append(chunks, rest[:n])
			rest = rest[n:]
		}
		checkStream(t, stream, chunks)
	})
}

func FuzzCapture(f *testing.F) {
	f.Add(streamed, uint16(3))
	f.Add(strings.ReplaceAll(streamed, "\n", "\r\n"), uint16(1))
	f.Add("data: {\"a\":\r\ndata: 1}\r\r: x\n\ndata", uint16(2))
	f.Add("\ufeffdata: {\"response\":{\"kv_transfer_params\":{}}}\n", uint16(9))
	f.Fuzz(func(t *testing.T, stream string, size uint16) {
		n := int(size)%64 + 1
		var chunks []string
		for rest := stream; rest != ""; rest = rest[min(n, len(rest)):] {
			chunks = append(chunks, rest[:min(n, len(rest))])
		}
		checkStream(t, stream, chunks)
	})
}

func BenchmarkCapture(b *testing.B) {
	chunk := []byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	c := NewCapture(sse)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		_, _ = c.Write(chunk)
	}
}

func BenchmarkPrefill(b *testing.B) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("some text ", 100_000) + `"}],"stream":true}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Prefill(body, ChatCompletions, Handoff{}); err != nil {
			b.Fatal(err)
		}
	}
}
