package main

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo"
)

// leasePage shows the leases of a node, a page at a time: of 100,000 it sends a hundred.
type leasePage struct {
	title  string
	leases func() []nixlgo.Lease
	reader func(request string) string // who holds it; empty: not known
}

// leaseRow is a lease as the page and its JSON show it.
type leaseRow struct {
	Request string  `json:"request"`
	Reader  string  `json:"reader"`
	State   string  `json:"state"` // admitted, granted, fixed or partly read
	Slot    int     `json:"slot"`  // lease.NoSlot, which is -1: none
	Blocks  int     `json:"blocks"`
	AgeS    float64 `json:"age_s"`  // since it was granted
	LeftS   float64 `json:"left_s"` // until it runs out
}

// leaseView is what a request for the page asked for, and got.
type leaseView struct {
	Title       string        `json:"title"`
	Leases      int           `json:"leases"` // that live
	Found       int           `json:"found"`  // of those, what q matches
	Blocks      int           `json:"blocks"` // that all of them pin
	Sort        string        `json:"sort"`
	Desc        bool          `json:"desc"`
	Limit       int           `json:"limit"`
	Offset      int           `json:"offset"`
	Query       string        `json:"q"`
	Rows        []leaseRow    `json:"rows"`
	TookMS      float64       `json:"took_ms"` // to collect and sort
	Columns     []leaseColumn `json:"-"`
	LongestLeft float64       `json:"-"`
}

// leaseColumn is a heading of the page.
type leaseColumn struct {
	Key, Head string
	Number    bool
	compare   func(a, b *nixlgo.Lease) int
}

var leaseColumns = []leaseColumn{
	{"request", "Request", false, func(a, b *nixlgo.Lease) int { return cmp.Compare(a.Request, b.Request) }},
	{"left", "Left", true, func(a, b *nixlgo.Lease) int { return cmp.Compare(a.Left, b.Left) }},
	{"age", "Age", true, func(a, b *nixlgo.Lease) int { return cmp.Compare(a.Age, b.Age) }},
	{"blocks", "Blocks", true, func(a, b *nixlgo.Lease) int { return cmp.Compare(a.Blocks, b.Blocks) }},
	{"state", "State", false, func(a, b *nixlgo.Lease) int { return cmp.Compare(leaseState(a), leaseState(b)) }},
	{"reader", "Reader", false, nil},
	{"slot", "Slot", true, func(a, b *nixlgo.Lease) int { return cmp.Compare(a.Slot, b.Slot) }},
}

const leaseLimit = 1000 // rows of a page at most

func leaseState(l *nixlgo.Lease) string {
	switch {
	case !l.Granted:
		return "admitted"
	case l.Readers > 0:
		return "partly read"
	case l.Fixed:
		return "fixed"
	}
	return "granted"
}

// view answers a query: what is about to run out comes first unless it says otherwise.
func (p leasePage) view(q url.Values) (*leaseView, error) {
	start := time.Now()
	v := &leaseView{Title: p.title, Sort: cmp.Or(q.Get("sort"), "left"), Query: q.Get("q"), Limit: 100, Rows: []leaseRow{}, Columns: leaseColumns}
	column := slices.IndexFunc(leaseColumns, func(c leaseColumn) bool { return c.Key == v.Sort && c.compare != nil })
	if column < 0 {
		return nil, fmt.Errorf("sort is %.40q, want request, state, slot, blocks, age or left", v.Sort)
	}
	for _, n := range []struct {
		key      string
		to       *int
		min, max int
	}{{"limit", &v.Limit, 1, leaseLimit}, {"offset", &v.Offset, 0, 1 << 31}} {
		if s := q.Get(n.key); s != "" {
			x, err := strconv.Atoi(s)
			if err != nil || x < n.min || x > n.max {
				return nil, fmt.Errorf("%s is %.40q, want %d to %d", n.key, s, n.min, n.max)
			}
			*n.to = x
		}
	}
	if s := q.Get("desc"); s != "" {
		var err error
		if v.Desc, err = strconv.ParseBool(s); err != nil {
			return nil, fmt.Errorf("desc is %.40q, want 1 or 0", s)
		}
	}
	all := p.leases()
	v.Leases = len(all)
	found := make([]*nixlgo.Lease, 0, len(all)) // to be sorted without copies
	for i := range all {
		l := &all[i]
		v.Blocks += l.Blocks
		v.LongestLeft = max(v.LongestLeft, l.Left.Seconds())
		if v.Query == "" || strings.Contains(l.Request, v.Query) || strings.Contains(p.reader(l.Request), v.Query) {
			found = append(found, l)
		}
	}
	v.Found = len(found)
	compare := leaseColumns[column].compare
	slices.SortFunc(found, func(a, b *nixlgo.Lease) int {
		c := compare(a, b)
		switch {
		case c == 0:
			return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.Nonce, b.Nonce))
		case v.Desc:
			return -c
		}
		return c
	})
	v.Offset = min(v.Offset, max(v.Found-1, 0)/v.Limit*v.Limit)
	for _, l := range found[v.Offset:min(v.Offset+v.Limit, v.Found)] {
		v.Rows = append(v.Rows, leaseRow{l.Request, p.reader(l.Request), leaseState(l), l.Slot, l.Blocks, round(l.Age.Seconds()), round(l.Left.Seconds())})
	}
	v.TookMS = round(time.Since(start).Seconds() * 1e3)
	return v, nil
}

func (p leasePage) json(w http.ResponseWriter, r *http.Request) {
	v, err := p.view(r.URL.Query())
	if err != nil {
		answer(w, http.StatusBadRequest, fileRefusal{err.Error()})
		return
	}
	answer(w, http.StatusOK, v)
}

//go:embed serve_leases.html
var leaseHTML string

var leaseTemplate = template.Must(template.New("leases").Parse(leaseHTML))

func (p leasePage) html(w http.ResponseWriter, r *http.Request) {
	v, err := p.view(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; form-action 'self'")
	_ = leaseTemplate.Execute(w, v) // a client that is gone sees nothing
}

// link is the page with some of its query changed.
func (v *leaseView) link(change func(*leaseView)) string {
	to := *v
	change(&to)
	q := url.Values{"sort": {to.Sort}}
	if to.Desc {
		q.Set("desc", "1")
	}
	if to.Limit != 100 {
		q.Set("limit", strconv.Itoa(to.Limit))
	}
	if to.Offset > 0 {
		q.Set("offset", strconv.Itoa(to.Offset))
	}
	if to.Query != "" {
		q.Set("q", to.Query)
	}
	return "?" + q.Encode()
}

// SortBy is the page sorted by a column, the other way round if it is already.
func (v *leaseView) SortBy(key string) string {
	return v.link(func(to *leaseView) { to.Desc, to.Sort, to.Offset = v.Sort == key && !v.Desc, key, 0 })
}

// Previous and Next are the pages beside this one, empty when there is none.
func (v *leaseView) Previous() string {
	if v.Offset == 0 {
		return ""
	}
	return v.link(func(to *leaseView) { to.Offset = max(v.Offset-v.Limit, 0) })
}

func (v *leaseView) Next() string {
	if v.Last() >= v.Found {
		return ""
	}
	return v.link(func(to *leaseView) { to.Offset += v.Limit })
}

// Last is the number of the last row of the page, from 1 on.
func (v *leaseView) Last() int { return v.Offset + len(v.Rows) }

// First is the number of the first row, 0 when there is none.
func (v *leaseView) First() int { return min(v.Offset+1, v.Found) }

// Pinned is what lives, for people.
func (v *leaseView) Pinned() string {
	verb := "pin"
	if v.Leases == 1 {
		verb = "pins"
	}
	return many(v.Leases, "lease") + " " + verb + " " + many(v.Blocks, "block")
}

// Sortable reports whether the page can be sorted by a column.
func (c leaseColumn) Sortable() bool { return c.compare != nil }

// Percent is how much of the longest time left this row has.
func (v *leaseView) Percent(r leaseRow) int {
	if v.LongestLeft <= 0 {
		return 0
	}
	return int(min(max(100*r.LeftS/v.LongestLeft, 0), 100))
}

// Age and Left are times for people.
func (r leaseRow) Age() string  { return seconds(r.AgeS) }
func (r leaseRow) Left() string { return seconds(r.LeftS) }

func seconds(s float64) string {
	if s >= 60 || s <= -60 {
		return time.Duration(s * float64(time.Second)).Truncate(time.Second).String()
	}
	return fmt.Sprintf("%.1f s", s)
}
