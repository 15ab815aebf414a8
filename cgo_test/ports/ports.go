// Package ports finds TCP ports for tests and the programs beside them.
package ports

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
)

// Free returns a port that nothing listens on, on any interface, and that the kernel gives to no client by itself. A port of
// the kernel's choice, closed to be listened on later, is one that it may give to a connection in between; and a client that
// keeps dialling such a port while nobody listens connects, in the end, to itself.
func Free() (int, error) {
	first := 32768
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		var last int
		if _, err := fmt.Sscan(string(b), &first, &last); err != nil {
			return 0, fmt.Errorf("ip_local_port_range: %w", err)
		}
	}
	const lowest = 10000
	if first <= lowest {
		return 0, fmt.Errorf("the kernel gives ports from %d on to clients: none from %d on is left for tests (net.ipv4.ip_local_port_range)", first, lowest)
	}
	var failed error
	for range 100 {
		port := lowest + rand.IntN(first-lowest)
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err == nil {
			return port, l.Close()
		}
		failed = errors.Join(failed, err)
	}
	return 0, failed
}
