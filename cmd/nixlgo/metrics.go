package main

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/rdma/metrics"
)

// metricsPath is where each daemon shows its node to Prometheus.
const metricsPath = "/metrics"

// metricsOf shows node and this process.
func metricsOf(node *nixlgo.Node) (http.Handler, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if _, err := metrics.Register(registry, metrics.NodeSources(node)); err != nil {
		return nil, err
	}
	if err := metrics.RegisterBuildInfo(registry); err != nil {
		return nil, err
	}
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}), nil
}

// serveMetrics serves scraped, and nothing else, on l until stop is called. Without it the daemon still does its work, so a
// failure is logged.
func serveMetrics(l net.Listener, scraped http.Handler, log *slog.Logger) (stop func()) {
	mux := http.NewServeMux()
	mux.Handle("GET "+metricsPath, scraped)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("nobody can scrape the metrics any more", "address", l.Addr(), "error", err)
		}
	})
	return func() {
		_ = s.Close() // what is cut off is a scrape
		serving.Wait()
	}
}
