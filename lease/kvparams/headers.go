package kvparams

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Request headers by which llm-d's endpoint picker and its sidecar name
// instances. The hosts-ports values are lists for [HostPorts].
const (
	// HeaderPrefiller names P, or several to choose from; the first is meant
	// unless the router samples.
	HeaderPrefiller = "x-prefiller-host-port"
	// HeaderEncoders names the encode instances.
	HeaderEncoders = "x-encoder-hosts-ports"
	// HeaderDataParallel names the instance of a data-parallel rank.
	HeaderDataParallel = "x-data-parallel-host-port"
	// HeaderDataParallelRank is the rank, a decimal number.
	HeaderDataParallelRank = "x-data-parallel-rank"
	// HeaderCacheSource names the instance with the longest cached prefix.
	HeaderCacheSource = "x-kv-cache-source-host-port"
	// HeaderRequestID becomes part of the engine's request id. P and D get the
	// same one, and each request a new one. It must have no comma: heartbeats
	// join ids by it, so that such a lease is never renewed.
	HeaderRequestID = "x-request-id"
)

// HostPort is a host name or IP address (IPv6 without brackets) and a TCP port.
type HostPort struct {
	Host string
	Port int
}

// String is the form to dial, with brackets around an IPv6 address.
func (h HostPort) String() string { return net.JoinHostPort(h.Host, strconv.Itoa(h.Port)) }

// HostPorts reads header values, each a list by comma of host:port with
// brackets around IPv6 addresses. Empty elements are skipped (RFC 9110,
// 5.6.1); no values are no addresses. Anything else out of place is an error
// that matches [ErrInvalid] and quotes the element, and no address is returned:
// a client could have sent the header. Compare what comes back with an allow
// list before dialling.
func HostPorts(values []string) ([]HostPort, error) {
	var all []HostPort
	for _, value := range values {
		for element := range strings.SplitSeq(value, ",") {
			if element = strings.Trim(element, " \t"); element == "" {
				continue
			}
			h, err := parseHostPort(element)
			if err != nil {
				return nil, err
			}
			all = append(all, h)
		}
	}
	return all, nil
}

func parseHostPort(s string) (HostPort, error) {
	const op = "read address"
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return HostPort{}, fail(ErrInvalid, op, "", "%.80q is not host:port, nor [IPv6]:port", s)
	}
	if !validHost(host) || strings.Contains(host, ":") != strings.HasPrefix(s, "[") {
		return HostPort{}, fail(ErrInvalid, op, "", "%.80q has no host name or address", s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return HostPort{}, fail(ErrInvalid, op, "", "%.80q has no port from 1 to 65535", s)
	}
	return HostPort{Host: host, Port: int(n)}, nil
}

// validHost takes an IP address, or a name of letters, digits, '-', '_' and '.'.
func validHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	if s == "" || len(s) > 253 {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return true
}
