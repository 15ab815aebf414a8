package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo"
	"github.com/nixlgo/nixlgo/lease"
)

// manyLeases are n leases, of which lease i runs out after i+1 milliseconds.
func manyLeases(n int) leasePage {
	all := make([]nixlgo.Lease, n)
	for i := range all {
		k := (i*7919 + 13) % n // in no order
		all[i] = nixlgo.Lease{Life: lease.Life{Request: fmt.Sprintf("req-%06d", k), Nonce: int64(k + 100), Slot: k, Granted: true,
			Age: time.Duration(n-k) * time.Second, Left: time.Duration(k+1) * time.Millisecond}, Blocks: k % 9}
	}
	return leasePage{title: "test", leases: func() []nixlgo.Lease { return append([]nixlgo.Lease(nil), all...) },
		reader: func(request string) string { return "10.0.0." + request[len(request)-1:] }}
}

func leasesJSON(t *testing.T, p leasePage, query string) (v leaseView) {
	t.Helper()
	w := httptest.NewRecorder()
	p.json(w, httptest.NewRequest(http.MethodGet, "/debug/leases.json?"+query, nil))
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &v))
	return v
}

func requests(v leaseView) (ids []string) {
	for _, r := range v.Rows {
		ids = append(ids, r.Request)
	}
	return ids
}

func TestLeasePageSendsAPageOfManyLeases(t *testing.T) {
	p := manyLeases(10000)
	v := leasesJSON(t, p, "")
	require.Equal(t, []int{10000, 10000, 100, 0}, []int{v.Leases, v.Found, len(v.Rows), v.Offset})
	require.Equal(t, "req-000000", v.Rows[0].Request, "what runs out first comes first")
	require.Equal(t, leaseRow{Request: "req-000007", Reader: "10.0.0.7", State: "granted", Slot: 7, Blocks: 7, AgeS: 9993, LeftS: 0.008}, v.Rows[7])

	require.Equal(t, []string{"req-009999", "req-009998"}, requests(leasesJSON(t, p, "sort=request&desc=1&limit=2")))
	require.Equal(t, []string{"req-000003", "req-000004"}, requests(leasesJSON(t, p, "limit=2&offset=3")))
	require.Equal(t, []string{"req-009999"}, requests(leasesJSON(t, p, "sort=age&limit=1")))
	require.Equal(t, []string{"req-000008", "req-000017"}, requests(leasesJSON(t, p, "sort=blocks&desc=1&limit=2")), "equal ones by request")
	found := leasesJSON(t, p, "q=42")
	require.Equal(t, []int{10000, 299}, []int{found.Leases, found.Found})
	require.Equal(t, 1000, leasesJSON(t, p, "q=10.0.0.3").Found, "by reader")
	require.Equal(t, []int{9900, 100}, []int{leasesJSON(t, p, "offset=123456").Offset, len(leasesJSON(t, p, "offset=123456").Rows)}, "past the end is the last page")
	none := leasesJSON(t, manyLeases(0), "")
	require.NotNil(t, none.Rows, "an empty array, not null")
	for _, bad := range []string{"sort=reader", "sort=nonsense", "limit=0", "limit=1001", "limit=x", "offset=-1", "desc=perhaps"} {
		w := httptest.NewRecorder()
		p.json(w, httptest.NewRequest(http.MethodGet, "/debug/leases.json?"+bad, nil))
		require.Equal(t, http.StatusBadRequest, w.Code, bad)
		key, _, _ := strings.Cut(bad, "=")
		require.Contains(t, w.Body.String(), key)
	}
}

func TestLeasePageLinksToThePagesBesideIt(t *testing.T) {
	p := manyLeases(250)
	get := func(query string) string {
		w := httptest.NewRecorder()
		p.html(w, httptest.NewRequest(http.MethodGet, "/debug/leases?"+query, nil))
		require.Equal(t, http.StatusOK, w.Code)
		return w.Body.String()
	}
	first, last := get("q=req&desc=1"), get("offset=200")
	require.Contains(t, first, `<a href="?desc=1&amp;offset=100&amp;q=req&amp;sort=left">next →</a>`)
	require.NotContains(t, first, "previous")
	require.Contains(t, first, `<a href="?q=req&amp;sort=left">Left ▾</a>`, "the other way round")
	require.Contains(t, last, "201–250 of 250")
	require.Contains(t, last, `<a href="?offset=100&amp;sort=left">← previous</a>`)
	require.NotContains(t, last, "next")
	require.Contains(t, get("q=nothing"), "No lease matches")
}

// On a telephone the last columns are out of sight: the table is in a box that scrolls by touch and by keys, and says so.
func TestLeasePageFitsNarrowScreens(t *testing.T) {
	w := httptest.NewRecorder()
	manyLeases(1).html(w, httptest.NewRequest(http.MethodGet, "/debug/leases", nil))
	page := w.Body.String()
	require.Contains(t, page, `<div class="wrap" id="table" role="region" aria-label="Leases" tabindex="0"><table>`)
	require.Regexp(t, `\.wrap \{ overflow-x: auto;[^}]* no-repeat local,[^}]* no-repeat scroll`, page, "shadows where there is more")
	require.Contains(t, page, "table.scrollLeft = left", "the renewal does not scroll back")
	require.Contains(t, page, "1 lease pins 0 blocks")
}

// Requests and readers are what other machines say they are.
func TestLeasePageEscapesWhatReadersSend(t *testing.T) {
	evil := `<script>alert(1)</script>`
	p := leasePage{title: evil, leases: func() []nixlgo.Lease { return []nixlgo.Lease{{Life: lease.Life{Request: evil}}} }, reader: func(string) string { return evil }}
	server := httptest.NewServer(http.HandlerFunc(p.html))
	defer server.Close()
	resp, err := http.Get(server.URL + "?q=" + url.QueryEscape(`"><script>`))
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(body), "<script>"), "the page's own")
	require.Contains(t, resp.Header.Get("Content-Security-Policy"), "default-src 'none'")
}

func BenchmarkLeasePage(b *testing.B) {
	p := manyLeases(100_000)
	for b.Loop() {
		w := httptest.NewRecorder()
		p.html(w, httptest.NewRequest(http.MethodGet, "/debug/leases", nil))
		if w.Code != http.StatusOK {
			b.Fatal(w.Code)
		}
	}
}
