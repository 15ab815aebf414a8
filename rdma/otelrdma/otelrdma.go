package otelrdma

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

// Tracer makes the spans of one engine. Its methods are safe for concurrent use.
type Tracer struct {
	tracer trace.Tracer

	mu        sync.Mutex
	begun     uint64                // requests that were
	reading   map[string]waiting    // held or fetched, by id
	published map[string]trace.Span // by id
}

// waiting is a request that somebody waits for.
type waiting struct {
	ctx    context.Context // with the span of its hold, if it has one
	peer   string
	number uint64 // in the order that they began
}

// New makes a Tracer of one engine with spans of provider.
func New(provider trace.TracerProvider) *Tracer {
	return &Tracer{tracer: provider.Tracer("github.com/nixlgo/nixlgo/rdma/otelrdma"), reading: map[string]waiting{}, published: map[string]trace.Span{}}
}

// Trace is what a rank of the engine is configured with: rdma.WorkerConfig.Trace, or that of a nixlgo.Config with rank 0.
func (t *Tracer) Trace(rank int) rdma.Trace {
	r := &ranked{t, attribute.Int("nixlgo.rank", rank)}
	return rdma.Trace{Handshake: r.handshake, Read: r.read, Verify: r.verify, Lease: lease.TableTrace{Ended: t.leaseEnded}, Begin: t.Begin}
}

// Begin puts what happens to a request under ctx, until the function that it returns is called or the next stage of the
// request begins. A hold and a publication get a span of their own. It is rdma.Trace.Begin.
func (t *Tracer) Begin(ctx context.Context, r rdma.Request) (ended func(result string, err error)) {
	if r.Stage == rdma.Publishing {
		return t.publish(ctx, r)
	}
	var span trace.Span
	if r.Stage == rdma.Holding {
		ctx, span = t.tracer.Start(ctx, "nixlgo.hold", trace.WithAttributes(attribute.String("nixlgo.role", "reader"), peer(r.Peer)))
	}
	t.mu.Lock()
	t.begun++
	number := t.begun
	t.reading[r.ID] = waiting{ctx, r.Peer, number}
	t.mu.Unlock()
	return func(result string, err error) {
		t.mu.Lock()
		if t.reading[r.ID].number == number {
			delete(t.reading, r.ID)
		}
		t.mu.Unlock()
		if span != nil {
			end(span, result, err)
		}
	}
}

func (t *Tracer) publish(ctx context.Context, r rdma.Request) func(string, error) {
	_, span := t.tracer.Start(ctx, "nixlgo.hold", trace.WithAttributes(attribute.String("nixlgo.role", "owner"), attribute.Int("nixlgo.blocks", r.Blocks)))
	t.mu.Lock()
	t.published[r.ID] = span
	t.mu.Unlock()
	return func(result string, err error) {
		t.mu.Lock()
		delete(t.published, r.ID)
		t.mu.Unlock()
		end(span, result, err)
	}
}

// leaseEnded notes what the lease of a request had left. Of several ranks, the last to end tells.
func (t *Tracer) leaseEnded(e lease.Ended, age, left time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if span := t.published[e.Request]; span != nil && (age != 0 || left != 0) { // else it was never granted
		span.SetAttributes(attribute.Int64("nixlgo.lease_left_ms", left.Milliseconds()))
	}
}

// of is the context that a request was begun with.
func (t *Tracer) of(request string) context.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w, ok := t.reading[request]; ok {
		return w.ctx
	}
	return context.Background()
}

// first is the context of the request that has waited longest for an engine.
func (t *Tracer) first(engine string) context.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	oldest := waiting{ctx: context.Background()}
	for _, w := range t.reading {
		if w.peer == engine && (oldest.number == 0 || w.number < oldest.number) {
			oldest = w
		}
	}
	return oldest.ctx
}

// ranked is a Tracer for one rank.
type ranked struct {
	*Tracer
	rank attribute.KeyValue
}

func (r *ranked) start(ctx context.Context, name string, attrs ...attribute.KeyValue) trace.Span {
	_, span := r.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(append(attrs, r.rank)...))
	return span
}

func (r *ranked) handshake(p lease.Peer) func(time.Duration, error) {
	start := time.Now()
	_, span := r.tracer.Start(r.first(p.Engine), "nixlgo.handshake", trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(start),
		trace.WithAttributes(peer(p.Engine), attribute.String("server.address", p.Host), attribute.Int("server.port", p.Port), r.rank))
	return func(took time.Duration, err error) {
		result := "ok"
		if err != nil {
			result = rdma.HandshakeCauseOf(err).String()
		}
		end(span, result, err, trace.WithTimestamp(start.Add(took)))
	}
}

func (r *ranked) read(p lease.Pull, bytes int64) func(error) {
	return endWithCause(r.start(r.of(p.Request), "nixlgo.read", peer(p.Peer.Engine), blocks(p), attribute.Int64("nixlgo.bytes", bytes)))
}

func (r *ranked) verify(p lease.Pull) func(error) {
	return endWithCause(r.start(r.of(p.Request), "nixlgo.verify", peer(p.Peer.Engine), blocks(p)))
}

func endWithCause(span trace.Span) func(error) {
	return func(err error) {
		result := "ok"
		if err != nil {
			result = strings.ReplaceAll(lease.CauseOf(err).String(), " ", "_")
		}
		end(span, result, err)
	}
}

func end(span trace.Span, result string, err error, options ...trace.SpanEndOption) {
	span.SetAttributes(attribute.String("nixlgo.result", result))
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	span.End(options...)
}

func peer(engine string) attribute.KeyValue { return attribute.String("nixlgo.peer", engine) }

func blocks(p lease.Pull) attribute.KeyValue {
	n := 0
	for _, group := range p.LocalBlocks {
		n += len(group)
	}
	return attribute.Int("nixlgo.blocks", n)
}
