package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/nixlgo/nixlgo"
)

// The paths of the file, for serve and fetch.
const (
	filePath  = "/v1/file"
	partsPath = "/v1/parts/"
)

// server answers for the file, and shows the node.
func (s *fileServer) server(log *slog.Logger) (*http.Server, error) {
	scraped, err := metricsOf(s.node)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+filePath, func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, s.offer) })
	mux.HandleFunc("POST "+partsPath+"{n}", s.post)
	mux.Handle("GET "+metricsPath, scraped)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		s.node.Stats() // waits for the step under way: a node that hangs does not answer
		answer(w, http.StatusOK, map[string]bool{"ok": true})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		code, ready := http.StatusOK, !s.draining.Load()
		if !ready {
			code = http.StatusServiceUnavailable
		}
		answer(w, code, map[string]bool{"ready": ready})
	})
	page := leasePage{title: s.offer.Name, leases: s.node.Leases, reader: s.reader}
	mux.HandleFunc("GET /debug/leases", page.html)
	mux.HandleFunc("GET /debug/leases.json", page.json)
	return &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}, nil
}

// fileRefusal is the body of an answer that is no 200.
type fileRefusal struct {
	Error string `json:"error"`
}

// post publishes a part.
func (s *fileServer) post(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 0 || n >= s.offer.Parts {
		answer(w, http.StatusNotFound, fileRefusal{"the file has no such part"})
		return
	}
	p, params, err := s.publish(r.Context(), n, r.RemoteAddr)
	if err != nil {
		code := http.StatusInternalServerError
		if errors.Is(err, nixlgo.ErrDraining) {
			code = http.StatusServiceUnavailable
		}
		if !errors.Is(err, context.Canceled) {
			s.log.say(fileEvent{Event: "failed", Part: &n, Reader: r.RemoteAddr, Error: err.Error()}, "part %d for %s: %v", n, r.RemoteAddr, err)
		}
		answer(w, code, fileRefusal{err.Error()})
		return
	}
	if err := handOver(w, r, p, params); err != nil {
		s.log.say(fileEvent{Event: "failed", Part: &n, Reader: r.RemoteAddr, Error: err.Error()}, "part %d for %s: %v", n, r.RemoteAddr, err)
	}
}
