package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/lease/hold"
	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// holder renews leases until their holds end.
type holder struct {
	cfg   *holdConfig
	node  *nixlgo.Node
	state *holdState
	log   *slog.Logger

	mu      sync.Mutex
	stopped bool
	holds   map[string]*holding
	byLease map[leaseName]*holding
}

// holding is one hold.
type holding struct {
	holdRecord
	held  *nixlgo.Held
	timer *time.Timer
}

// leaseName tells leases apart.
type leaseName struct {
	engine, request string
	slot            lease.SlotRef
}

func nameLease(p *lease.Params) leaseName {
	n := leaseName{engine: p.RemoteEngineID, request: p.RemoteRequestID}
	if p.Lease != nil {
		n.slot = *p.Lease
	}
	return n
}

func newHolder(cfg *holdConfig, node *nixlgo.Node, state *holdState, log *slog.Logger) *holder {
	return &holder{cfg: cfg, node: node, state: state, log: log, holds: map[string]*holding{}, byLease: map[leaseName]*holding{}}
}

// resume goes on with the holds of an earlier run. What cannot be read or held is logged and stays on disk.
func (h *holder) resume() (n int, err error) {
	records, bad, err := h.state.load()
	if err != nil {
		return 0, err
	}
	for _, err := range bad {
		h.log.Error("a hold of an earlier run is lost", "error", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range records {
		// The clock may have been set meanwhile: it cannot make a hold last longer than it may.
		if latest := time.Now().Add(h.cfg.maxTTL); r.Expires.After(latest) {
			r.Expires = latest
		}
		if !time.Now().Before(r.Expires) {
			if err := h.state.drop(r.ID); err != nil {
				h.log.Error("forget a hold that expired", "id", r.ID, "error", err)
			}
			continue
		}
		held, err := h.node.Hold(&r.Params)
		if err != nil {
			h.log.Error("a hold of an earlier run is lost", "id", r.ID, "error", err)
			continue
		}
		h.add(&holding{holdRecord: *r, held: held})
	}
	return len(h.holds), nil
}

// add starts to count the time of x, whose lease is renewed already.
func (h *holder) add(x *holding) {
	h.holds[x.ID], h.byLease[nameLease(&x.Params)] = x, x
	x.timer = time.AfterFunc(time.Until(x.Expires), func() { h.expire(x) })
}

// remove forgets x. Its lease may still be renewed.
func (h *holder) remove(x *holding) {
	x.timer.Stop()
	delete(h.holds, x.ID)
	if name := nameLease(&x.Params); h.byLease[name] == x {
		delete(h.byLease, name)
	}
}

// expire ends x without a word to the owner.
func (h *holder) expire(x *holding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || h.holds[x.ID] != x || time.Now().Before(x.Expires) { // ended or extended meanwhile
		return
	}
	h.end(x)
}

// end stops renewing first: the disk may fail, and a record that stays has expired.
func (h *holder) end(x *holding) {
	if err := x.held.Close(); err != nil {
		h.log.Error("end a hold", "id", x.ID, "error", err)
	}
	h.remove(x)
	if err := h.state.drop(x.ID); err != nil {
		h.log.Error("forget a hold that expired", "id", x.ID, "error", err)
	}
}

// stop keeps the records: the next run goes on with them.
func (h *holder) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	for _, x := range h.holds {
		x.timer.Stop()
	}
}

// hold renews the lease of p for ttl; created is false when it was held already.
func (h *holder) hold(p *lease.Params, ttl time.Duration) (x hold.Hold, created bool, err error) {
	p.RemoteBlockIDs, p.Extra = nil, nil // for a reader
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped {
		return x, false, refusal(http.StatusServiceUnavailable, hold.CodeUnavailable, "the daemon is stopping")
	}
	expires := time.Now().Add(ttl)
	if old := h.byLease[nameLease(p)]; old != nil && time.Now().Before(old.Expires) {
		if expires.After(old.Expires) {
			r := old.holdRecord
			r.Expires = expires
			if err := h.state.put(&r); err != nil {
				return x, false, unwritten("the hold was not extended", err)
			}
			old.holdRecord = r
			old.timer.Reset(time.Until(expires))
		}
		return old.wire(), false, nil
	} else if old != nil {
		h.end(old)
	}
	if len(h.holds) >= h.cfg.maxHolds {
		return x, false, refusal(http.StatusTooManyRequests, hold.CodeFull, "%s held, as many as --max-holds allows", many(len(h.holds), "lease"))
	}
	held, err := h.node.Hold(p)
	if err != nil {
		return x, false, err
	}
	n := &holding{holdRecord: holdRecord{ID: rand.Text(), Expires: expires, Params: *p}, held: held}
	if err := h.state.put(&n.holdRecord); err != nil {
		return x, false, errors.Join(unwritten("nothing is held", err), held.Close(), h.state.drop(n.ID))
	}
	h.add(n)
	return n.wire(), true, nil
}

// finish ends a hold.
func (h *holder) finish(ctx context.Context, id string, release bool) error {
	x, err := h.takeOut(id)
	if err != nil {
		return err
	}
	if !release {
		return x.held.Close()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := x.held.Release(ctx); err != nil {
		return refusal(http.StatusServiceUnavailable, hold.CodeUnavailable, "the hold has ended, and the owner may not have been told: its lease runs out: %v", err)
	}
	return nil
}

// takeOut forgets a hold. Its record goes first: a daemon that is killed in between lets the lease run out.
func (h *holder) takeOut(id string) (*holding, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	x, err := h.find(id)
	if err != nil {
		return nil, err
	}
	if err := h.state.drop(id); err != nil {
		return nil, unwritten("the hold goes on", err)
	}
	h.remove(x)
	return x, nil
}

func (h *holder) find(id string) (*holding, error) {
	x := h.holds[id]
	if x == nil || !time.Now().Before(x.Expires) {
		return nil, refusal(http.StatusNotFound, hold.CodeUnknown, "no hold %.40q, or not any more", id)
	}
	return x, nil
}

func (x *holding) wire() hold.Hold {
	return hold.Hold{ID: x.ID, Engine: x.Params.RemoteEngineID, Request: x.Params.RemoteRequestID, Expires: x.Expires}
}

// handler serves the holder, and scraped at /metrics. With local, it serves only requests that are addressed to this machine: a web page that has its
// name point here cannot use it.
func (h *holder) handler(local bool, scraped http.Handler) http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			host, _, err := net.SplitHostPort(r.Host)
			if err != nil {
				host = r.Host // port 80
			}
			if local && !loopback(host) {
				h.refuse(w, r, refusal(http.StatusForbidden, hold.CodeForbidden, "Host is %.80q, want the loopback address that the daemon listens on", r.Host))
			} else if err := f(w, r); err != nil {
				h.refuse(w, r, err)
			}
		})
	}
	handle("POST "+hold.HoldsPath, h.post)
	handle("GET "+hold.HoldsPath, h.list)
	handle("GET "+hold.HoldsPath+"/{id}", h.get)
	handle("DELETE "+hold.HoldsPath+"/{id}", h.delete)
	handle("GET "+hold.HealthPath, h.health)
	handle("GET "+metricsPath, func(w http.ResponseWriter, r *http.Request) error {
		scraped.ServeHTTP(w, r)
		return nil
	})
	handle("/", func(_ http.ResponseWriter, r *http.Request) error {
		return refusal(http.StatusNotFound, hold.CodeNoResource, "%.20s %.80s is nothing that the daemon does: see `nixlgo hold --help`", r.Method, r.URL.Path)
	})
	return mux
}

func (h *holder) post(w http.ResponseWriter, r *http.Request) error {
	// A web page cannot send this type without being asked for it first.
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/json" {
		return refusal(http.StatusUnsupportedMediaType, hold.CodeMediaType, "Content-Type is %.80q, want application/json", r.Header.Get("Content-Type"))
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, h.cfg.maxBody))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return refusal(http.StatusRequestEntityTooLarge, hold.CodeTooLarge, "the body has more than the %s of --max-body", many(h.cfg.maxBody, "byte"))
	} else if err != nil {
		return invalidHold("body: %v", err)
	}
	var q hold.Request
	if err := json.Unmarshal(body, &q); err != nil {
		return invalidHold("body: want an object with kv_transfer_params: %v", err)
	}
	ttl := h.cfg.ttl
	if q.TTL != "" {
		if ttl, err = time.ParseDuration(q.TTL); err != nil || ttl <= 0 || ttl > h.cfg.maxTTL {
			return invalidHold("ttl is %.40q, want a duration up to %v, such as \"60s\"", q.TTL, h.cfg.maxTTL)
		}
	}
	handoff, err := kvparams.Parse(q.Params)
	if err != nil {
		return invalidHold("%v", err)
	}
	x, created, err := h.hold(handoff.Params(), ttl)
	if errors.Is(err, lease.ErrInvalid) {
		return invalidHold("%v", err)
	} else if err != nil {
		return err
	}
	code := http.StatusOK
	if created {
		code = http.StatusCreated
		w.Header().Set("Location", hold.HoldsPath+"/"+x.ID)
	}
	answer(w, code, x)
	return nil
}

func (h *holder) list(w http.ResponseWriter, _ *http.Request) error {
	l := hold.List{Holds: []hold.Hold{}}
	h.mu.Lock()
	for _, x := range h.holds {
		l.Holds = append(l.Holds, x.wire())
	}
	h.mu.Unlock()
	slices.SortFunc(l.Holds, func(a, b hold.Hold) int { return strings.Compare(a.ID, b.ID) })
	answer(w, http.StatusOK, l)
	return nil
}

func (h *holder) get(w http.ResponseWriter, r *http.Request) error {
	h.mu.Lock()
	x, err := h.find(r.PathValue("id"))
	if err != nil {
		h.mu.Unlock()
		return err
	}
	found := x.wire()
	h.mu.Unlock()
	answer(w, http.StatusOK, found)
	return nil
}

func (h *holder) delete(w http.ResponseWriter, r *http.Request) error {
	release := r.URL.Query()["release"]
	if len(release) != 1 || release[0] != "true" && release[0] != "false" {
		return invalidHold("say release=true or release=false once: true frees the owner's blocks at once, which is safe only " +
			"while no decoder has the kv_transfer_params; false lets the lease run out or be renewed by its decoder")
	}
	if err := h.finish(r.Context(), r.PathValue("id"), release[0] == "true"); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *holder) health(w http.ResponseWriter, _ *http.Request) error {
	h.node.Stats() // waits for the step under way: a node that hangs does not answer
	h.mu.Lock()
	n := len(h.holds)
	h.mu.Unlock()
	answer(w, http.StatusOK, hold.Health{Holds: n, Max: h.cfg.maxHolds})
	return nil
}

func refusal(status int, code hold.Code, format string, a ...any) error {
	return &hold.Error{Op: "serve", Status: status, Code: code, Message: fmt.Sprintf(format, a...)}
}

func invalidHold(format string, a ...any) error {
	return refusal(http.StatusBadRequest, hold.CodeInvalid, format, a...)
}

func unwritten(what string, err error) error {
	return refusal(http.StatusServiceUnavailable, hold.CodeUnavailable, "%s, because --state cannot be written: %v", what, err)
}

func (h *holder) refuse(w http.ResponseWriter, r *http.Request, err error) {
	e, ok := errors.AsType[*hold.Error](err)
	if !ok {
		e = &hold.Error{Status: http.StatusServiceUnavailable, Code: hold.CodeUnavailable, Message: err.Error()}
	}
	if e.Status >= http.StatusInternalServerError {
		h.log.Error("refused a request", "method", r.Method, "path", r.URL.Path, "error", err)
	}
	answer(w, e.Status, e)
}

func answer(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// A client that is gone hears nothing.
	_ = json.NewEncoder(w).Encode(v)
}
