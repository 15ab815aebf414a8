package failures

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Port scanners, clients of other protocols and connections that say nothing cost the side channel no valid handshake.
// vllm#54757, vllm#51504, cases.md 18, 19
func TestSideChannelServesUnderAttack(t *testing.T) {
	p := start(t, "owner", "third", "reader", "reader")
	owner, third, early, late := p[0], p[1], p[2], p[3]
	third.mustExchange(owner)
	before := owner.level()
	stop := third.traffic(owner)
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(owner.setup.Port))
	dial := func() net.Conn {
		c, err := net.DialTimeout("tcp", addr, patience)
		require.NoError(t, err)
		return c
	}
	const idle, packets = 300, 1000
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range idle {
		conns = append(conns, dial())
	}
	early.mustExchange(owner)
	rng := rand.New(rand.NewPCG(1, 2))
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	for i := range packets {
		c := dial()
		b := make([]byte, 1+rng.IntN(2000))
		for j := range b {
			b[j] = byte(rng.Uint32())
		}
		if i%2 == 0 { // reaches the parsers behind the greeting
			b = append(append([]byte(nil), greeting...), b...)
		}
		c.SetWriteDeadline(time.Now().Add(patience))
		c.Write(b) // may be cut off
		c.Close()
		if i == packets/2 {
			late.mustExchange(owner)
		}
	}
	stop()
	require.Eventually(t, func() bool { return owner.stats().Stats.SideChannel.Bad >= packets }, patience, 20*time.Millisecond)
	for _, c := range conns {
		c.Close()
	}
	early.mustExchange(owner)
	owner.flat(before, 8) // the connections of two readers
}
