package otelrdma_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/otelrdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// TestMain leaves by the system call: the exit of libc runs a destructor of the wheel's libnl that crashes under -race.
func TestMain(m *testing.M) { syscall.Exit(m.Run()) }

// spans collects what was traced.
type spans struct {
	t        *testing.T
	exporter *tracetest.InMemoryExporter
	provider *sdktrace.TracerProvider
}

func newSpans(t *testing.T) *spans {
	x := tracetest.NewInMemoryExporter()
	p := sdktrace.NewTracerProvider(sdktrace.WithSyncer(x))
	t.Cleanup(func() { require.NoError(t, p.Shutdown(context.WithoutCancel(t.Context()))) })
	return &spans{t, x, p}
}

// under runs f under a span of the caller's.
func (s *spans) under(f func(ctx context.Context)) trace.SpanContext {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	ctx, span := s.provider.Tracer("caller").Start(ctx, "caller")
	defer span.End()
	f(ctx)
	return span.SpanContext()
}

// take returns and forgets the spans that ended, by name: the first of each.
func (s *spans) take() map[string]tracetest.SpanStub {
	found := map[string]tracetest.SpanStub{}
	for _, x := range s.exporter.GetSpans() {
		if _, again := found[x.Name]; !again {
			found[x.Name] = x
		}
	}
	s.exporter.Reset()
	return found
}

func attributes(s tracetest.SpanStub) map[string]any {
	m := map[string]any{}
	for _, a := range s.Attributes {
		m[string(a.Key)] = a.Value.AsInterface()
	}
	return m
}

func (s *spans) requireChild(span tracetest.SpanStub, parent trace.SpanContext) {
	s.t.Helper()
	require.Equal(s.t, parent.SpanID(), span.Parent.SpanID(), span.Name)
	require.Equal(s.t, parent.TraceID(), span.SpanContext.TraceID(), span.Name)
	require.False(s.t, span.EndTime.Before(span.StartTime), span.Name)
}

// open runs a node that is traced, on NIXL or on the network.
func (s *spans) open(net *rdmatest.Network, name string, change ...func(*nixlgo.Config)) *nixlgo.Node {
	s.t.Helper()
	cfg := nixlgo.Config{Engine: name, Layers: 2, Blocks: 8, BlockBytes: 4096, Trace: otelrdma.New(s.provider).Trace(0)}
	if net != nil {
		cfg.Fabric = net.NewFabric(name)
	}
	for _, f := range change {
		f(&cfg)
	}
	n, err := nixlgo.New(cfg)
	require.NoError(s.t, err)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(context.Background()) }()
	s.t.Cleanup(func() {
		require.NoError(s.t, n.Close())
		require.NoError(s.t, <-ended)
	})
	return n
}

// both runs a test over real NIXL and over the in-memory fabric.
func both(t *testing.T, f func(t *testing.T, net *rdmatest.Network)) {
	t.Run("NIXL", func(t *testing.T) { f(t, nil) })
	t.Run("in memory", func(t *testing.T) { f(t, rdmatest.NewNetwork()) })
}

func TestAFetchIsAHandshakeAReadAndACheckUnderTheCallersSpan(t *testing.T) {
	both(t, func(t *testing.T, net *rdmatest.Network) {
		s, p := newSpans(t), newSpans(t)
		owner, reader := p.open(net, "P"), s.open(net, "D")
		var published *nixlgo.Publication
		prefill := p.under(func(ctx context.Context) {
			var err error
			published, err = owner.Publish(ctx, "req", []int{1, 2}, 32)
			require.NoError(t, err)
		})
		caller := s.under(func(ctx context.Context) { require.NoError(t, reader.Fetch(ctx, published.Params(), []int{5, 6})) })
		require.Len(t, s.exporter.GetSpans(), 4, "and the caller's own")
		got := s.take()
		for name, want := range map[string]map[string]any{
			"nixlgo.handshake": {"nixlgo.peer": "P", "nixlgo.rank": int64(0), "nixlgo.result": "ok", "server.address": "127.0.0.1", "server.port": int64(owner.Port())},
			"nixlgo.read":      {"nixlgo.peer": "P", "nixlgo.rank": int64(0), "nixlgo.result": "ok", "nixlgo.blocks": int64(2), "nixlgo.bytes": int64(2 * 2 * 4096)},
			"nixlgo.verify":    {"nixlgo.peer": "P", "nixlgo.rank": int64(0), "nixlgo.result": "ok", "nixlgo.blocks": int64(2)},
		} {
			s.requireChild(got[name], caller)
			require.Equal(t, want, attributes(got[name]), name)
			require.Equal(t, codes.Unset, got[name].Status.Code)
			require.Equal(t, trace.SpanKindClient, got[name].SpanKind)
		}
		require.False(t, got["nixlgo.read"].StartTime.Before(got["nixlgo.handshake"].EndTime))
		require.False(t, got["nixlgo.verify"].StartTime.Before(got["nixlgo.read"].EndTime))

		<-published.Done()
		hold := p.take()["nixlgo.hold"]
		p.requireChild(hold, prefill)
		a := attributes(hold)
		require.InDelta(t, 30_000, a["nixlgo.lease_left_ms"], 29_000)
		delete(a, "nixlgo.lease_left_ms")
		require.Equal(t, map[string]any{"nixlgo.role": "owner", "nixlgo.blocks": int64(2), "nixlgo.result": "read"}, a)
	})
}

func TestAHoldIsASpanWithTheHandshakeBelowIt(t *testing.T) {
	both(t, func(t *testing.T, net *rdmatest.Network) {
		s := newSpans(t)
		owner, reader := newSpans(t).open(net, "P"), s.open(net, "D")
		p, err := owner.Publish(t.Context(), "req", []int{1}, 16)
		require.NoError(t, err)
		var h *nixlgo.Held
		queue := s.under(func(ctx context.Context) {
			h, err = reader.HoldContext(ctx, p.Params())
			require.NoError(t, err)
			require.Eventually(t, func() bool { return reader.Stats().Worker.HeartbeatsSent > 0 }, 20*time.Second, time.Millisecond)
		})
		step := s.under(func(ctx context.Context) { require.NoError(t, h.Fetch(ctx, []int{5})) })
		got := s.take()
		hold := got["nixlgo.hold"]
		s.requireChild(hold, queue)
		require.Equal(t, map[string]any{"nixlgo.role": "reader", "nixlgo.peer": "P", "nixlgo.result": "fetch"}, attributes(hold))
		s.requireChild(got["nixlgo.handshake"], hold.SpanContext)
		s.requireChild(got["nixlgo.read"], step)
		s.requireChild(got["nixlgo.verify"], step)

		q, err := owner.Publish(t.Context(), "other", []int{2}, 16)
		require.NoError(t, err)
		router := s.under(func(ctx context.Context) { require.NoError(t, reader.Release(ctx, q.Params())) })
		got = s.take()
		s.requireChild(got["nixlgo.hold"], router)
		require.Equal(t, "release", attributes(got["nixlgo.hold"])["nixlgo.result"])
		require.NotContains(t, got, "nixlgo.read")
	})
}

func requireFailed(t *testing.T, span tracetest.SpanStub, result, text string) {
	t.Helper()
	require.Equal(t, codes.Error, span.Status.Code, span.Name)
	require.Contains(t, span.Status.Description, text)
	require.Equal(t, result, attributes(span)["nixlgo.result"])
}

func TestALapseIsAFailedCheckAfterAGoodRead(t *testing.T) {
	both(t, func(t *testing.T, net *rdmatest.Network) {
		s, o := newSpans(t), newSpans(t)
		owner, reader := o.open(net, "P"), s.open(net, "D")
		var p *nixlgo.Publication
		o.under(func(ctx context.Context) {
			var err error
			p, err = owner.Publish(ctx, "req", []int{1}, 16)
			require.NoError(t, err)
			require.NoError(t, p.Revoke())
			<-p.Done()
		})
		require.Equal(t, "aborted", attributes(o.take()["nixlgo.hold"])["nixlgo.result"])
		caller := s.under(func(ctx context.Context) {
			require.ErrorIs(t, reader.Fetch(ctx, p.Params(), []int{5}), lease.ErrLapsed)
		})
		got := s.take()
		requireFailed(t, got["nixlgo.verify"], "lapsed", "does not hold the nonce")
		s.requireChild(got["nixlgo.verify"], caller)
		require.Equal(t, codes.Unset, got["nixlgo.read"].Status.Code)
	})
}

func TestALostPeerIsAFailedReadAndThenAFailedHandshake(t *testing.T) {
	both(t, func(t *testing.T, net *rdmatest.Network) {
		s, l := newSpans(t), newSpans(t)
		owner, reader, late := newSpans(t).open(net, "P"), s.open(net, "D"), l.open(net, "E")
		publish := func(id string, block int) *lease.Params {
			p, err := owner.Publish(t.Context(), id, []int{block}, 16)
			require.NoError(t, err)
			return p.Params()
		}
		first, second := publish("first", 1), publish("second", 2)
		require.NoError(t, reader.Fetch(t.Context(), first, []int{5}))
		require.NoError(t, owner.Close())
		s.exporter.Reset()

		caller := s.under(func(ctx context.Context) { require.ErrorIs(t, reader.Fetch(ctx, second, []int{5}), lease.ErrPeerLost) })
		got := s.take()
		s.requireChild(got["nixlgo.read"], caller)
		requireFailed(t, got["nixlgo.read"], "peer_lost", "peer lost")
		require.NotContains(t, got, "nixlgo.verify")

		caller = l.under(func(ctx context.Context) { require.ErrorIs(t, late.Fetch(ctx, second, []int{5}), lease.ErrHandshake) })
		got = l.take()
		l.requireChild(got["nixlgo.handshake"], caller)
		requireFailed(t, got["nixlgo.handshake"], "unreachable", "connection refused")
		require.NotContains(t, got, "nixlgo.read")
	})
}

// A request that nobody read ends as expired, with nothing left.
func TestAnExpiredLeaseIsAFailedHoldOfItsOwner(t *testing.T) {
	s := newSpans(t)
	owner := s.open(rdmatest.NewNetwork(), "P", func(c *nixlgo.Config) {
		c.Lease = lease.DefaultConfig()
		c.Lease.Duration = 50 * time.Millisecond
	})
	s.under(func(ctx context.Context) {
		p, err := owner.Publish(ctx, "req", []int{1}, 16)
		require.NoError(t, err)
		<-p.Done()
	})
	hold := s.take()["nixlgo.hold"]
	requireFailed(t, hold, "expired", "lease expired")
	require.LessOrEqual(t, attributes(hold)["nixlgo.lease_left_ms"], int64(0))
}

func TestAFetchThatIsGivenUpEndsItsSpans(t *testing.T) {
	net := rdmatest.NewNetwork()
	s := newSpans(t)
	owner, reader := newSpans(t).open(net, "P"), s.open(net, "D")
	p, err := owner.Publish(t.Context(), "req", []int{1}, 16)
	require.NoError(t, err)
	net.HoldReads(true)
	s.under(func(ctx context.Context) {
		ctx, cancel := context.WithCancelCause(ctx)
		go func() {
			for len(net.Reads()) == 0 {
				time.Sleep(100 * time.Microsecond)
			}
			cancel(errors.New("client left"))
		}()
		require.ErrorIs(t, reader.Fetch(ctx, p.Params(), []int{5}), nixlgo.ErrQuarantined)
	})
	requireFailed(t, s.take()["nixlgo.read"], "aborted", "aborted")
}

func TestAHandshakeIsOfTheRequestThatHasWaitedLongestForItsEngine(t *testing.T) {
	s := newSpans(t)
	tr := otelrdma.New(s.provider).Trace(0)
	begin := func(id, engine string) (of trace.SpanContext, ended func(string, error)) {
		of = s.under(func(ctx context.Context) {
			ended = tr.Begin(ctx, rdma.Request{ID: id, Stage: rdma.Fetching, Peer: engine})
		})
		return of, ended
	}
	_, other := begin("a", "Q")
	first, ended := begin("b", "P")
	second, _ := begin("c", "P")
	for range 20 { // of a map
		s.exporter.Reset()
		tr.Handshake(lease.Peer{Engine: "P"})(time.Second, nil)
		s.requireChild(s.take()["nixlgo.handshake"], first)
	}
	ended("", nil)
	other("", nil)
	tr.Handshake(lease.Peer{Engine: "P"})(time.Second, nil)
	h := s.take()["nixlgo.handshake"]
	s.requireChild(h, second)
	require.Equal(t, time.Second, h.EndTime.Sub(h.StartTime), "as long as it took, not until the step saw it")
}

// What nobody has begun is traced all the same, as a root.
func TestARequestWithoutContextIsARoot(t *testing.T) {
	s := newSpans(t)
	tr := otelrdma.New(s.provider).Trace(3)
	tr.Handshake(lease.Peer{Engine: "P"})(0, nil)
	tr.Read(lease.Pull{Request: "r", Peer: lease.Peer{Engine: "P"}}, 8)(nil)
	for _, x := range s.take() {
		require.False(t, x.Parent.IsValid())
		require.Contains(t, x.Attributes, attribute.Int("nixlgo.rank", 3))
	}
}
