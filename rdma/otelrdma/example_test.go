package otelrdma_test

import (
	"context"
	"fmt"
	"log"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/rdma/otelrdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// A decode node whose fetches are traced. A program on NIXL leaves Fabric out, and takes its provider from OpenTelemetry's
// SDK with an exporter of its own.
func Example() {
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	net := rdmatest.NewNetwork()
	start := func(engine string, tracer *otelrdma.Tracer) *nixlgo.Node {
		cfg := nixlgo.Config{Engine: engine, Layers: 1, Blocks: 4, BlockBytes: 64, Fabric: net.NewFabric(engine)}
		if tracer != nil {
			cfg.Trace = tracer.Trace(0)
		}
		node, err := nixlgo.New(cfg)
		if err != nil {
			log.Fatal(err)
		}
		go node.Run(context.Background())
		return node
	}
	prefill, decode := start("prefill", nil), start("decode", otelrdma.New(provider))
	defer prefill.Close()
	defer decode.Close()

	published, err := prefill.Publish(context.Background(), "request", []int{1}, 16)
	if err != nil {
		log.Fatal(err)
	}
	ctx, step := provider.Tracer("engine").Start(context.Background(), "decode")
	err = decode.Fetch(ctx, published.Params(), []int{2})
	step.End()
	fmt.Println("fetch:", err)
	for _, s := range spans.GetSpans() {
		fmt.Println(s.Name, s.Parent.SpanID() == step.SpanContext().SpanID())
	}
	// Output:
	// fetch: <nil>
	// nixlgo.handshake true
	// nixlgo.read true
	// nixlgo.verify true
	// decode false
}
