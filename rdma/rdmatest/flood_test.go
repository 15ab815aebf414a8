package rdmatest_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/rdmatest"
)

// buffer is written by the step and by timers.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.b.Reset()
	return b.b.String()
}

// cases.md 25 with a peer that does not stop: 10,000 bad notifications are two lines, and none is missing from the count.
func TestAFloodOfBadNotificationsIsAFewLinesWithTheCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out buffer
		lines := func() []string { return strings.Split(strings.TrimSuffix(out.take(), "\n"), "\n") }
		net := rdmatest.NewNetwork()
		mem := net.NewMemory(4 * blockLen)
		owner := net.NewFabric("owner", mem)
		w, err := rdma.NewWorker(owner, rdma.WorkerConfig{Engine: "P", Logger: slog.New(slog.NewTextHandler(&out, nil)),
			KV: rdma.KV{Regions: []rdma.Region{{Base: mem.Addr(), BlockLen: blockLen, Blocks: 4}}}})
		require.NoError(t, err)
		metadata, err := owner.Metadata()
		require.NoError(t, err)
		send := func(peer *rdmatest.Fabric, payload string) {
			_, err := peer.Load(metadata)
			require.NoError(t, err)
			require.NoError(t, peer.Notify("owner", []byte(payload)))
		}
		step := func() {
			_, err := w.Step(time.Now(), lease.Plan{})
			require.NoError(t, err)
		}
		rude, other := net.NewFabric("rude"), net.NewFabric("other")
		for i := range 10_000 {
			send(rude, fmt.Sprint("nonsense ", i))
			if i%100 == 0 {
				step()
			}
		}
		send(other, "HB:")
		step()
		got := lines()
		require.Len(t, got, 2, "one a peer")
		require.Regexp(t, `level=WARN msg="ignored a notification" engine=P rank=0 peer=rude error=.*nonsense 0`, got[0])
		require.Contains(t, got[1], "peer=other")

		time.Sleep(time.Minute)
		synctest.Wait()
		got = lines()
		require.Len(t, got, 1, "the other has no more to say")
		require.Regexp(t, `peer=rude error=.*nonsense 9999.* suppressed=9999$`, got[0])
		require.EqualValues(t, 10_001, w.Stats().Leases.MalformedNotifications)

		send(rude, "more")
		send(rude, "and more")
		step()
		require.Len(t, lines(), 1)
		require.NoError(t, w.Close())
		require.Regexp(t, "and more.* suppressed=1$", lines()[0], "Close loses no count")
	})
}
