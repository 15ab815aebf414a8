package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/nixlgo/nixlgo/nixl/diagnose"
	"github.com/nixlgo/nixlgo/rdma"
	"github.com/nixlgo/nixlgo/rdma/zmtp"
)

// Whether two machines reach each other's side channels is found out by two doctors: one answers (Answer), the other calls
// it and asks to be called back (CheckPeer). They talk ZeroMQ as side channels do, so what lets one through lets the other.
// A request that is not a handshake ends the side channel of vLLM up to 0.33 for good, so the callback is asked for only
// where the handshake showed a doctor.

const callBack = "nixlgo_doctor_call_back" // with the address

// calledBack answers it.
type calledBack struct {
	Error string `json:"error"` // "": reached
}

// Answer answers CheckPeer of other machines on l until ctx ends. It calls back whatever address they name, with one handshake.
func Answer(ctx context.Context, l net.Listener, timeout time.Duration) error {
	server := zmtp.Server{Handler: func(ctx context.Context, request [][]byte) ([][]byte, error) {
		if len(request) != 2 || string(request[0]) != callBack {
			return [][]byte{[]byte("nixlgo doctor")}, nil // to a handshake: not what a reader expects
		}
		var r calledBack
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		if _, err := handshake(ctx, string(request[1])); err != nil && !errors.Is(err, rdma.ErrWire) && !errors.Is(err, rdma.ErrKey) {
			r.Error = err.Error()
		}
		reply, err := json.Marshal(r)
		return [][]byte{reply}, err
	}}
	return server.Serve(ctx, l)
}

// handshake asks for rank 0. An error that matches rdma.ErrWire is the answer of a doctor, or of something else that speaks
// ZeroMQ.
func handshake(ctx context.Context, address string) (*rdma.Reply, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return nil, fmt.Errorf("port %q: %w", port, err)
	}
	return rdma.Probe(ctx, host, n, 0, 0)
}

// CheckPeer finds out whether the side channel at address is reached from here, and, if a doctor answers there, whether it
// reaches own: the address of this machine's side channel, of which each part may be empty.
func CheckPeer(ctx context.Context, address, ownHost, ownPort string, timeout time.Duration) []diagnose.Finding {
	to := diagnose.Finding{Name: "side channel to " + address, Status: diagnose.OK}
	from := diagnose.Finding{Name: "side channel from " + address, Status: diagnose.OK}
	short, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	start := time.Now()
	reply, err := handshake(short, address)
	switch {
	case err == nil:
		to.Value = fmt.Sprintf("engine %q answers in %v", reply.Metadata.Engine, reply.RTT.Round(time.Microsecond))
		from.Value, from.Cause = "not tested", notCalled
		return []diagnose.Finding{to, from}
	case errors.Is(err, rdma.ErrKey):
		to.Value = "an instance answers that has a shared key"
		from.Value, from.Cause = "not tested", notCalled
		return []diagnose.Finding{to, from}
	case !errors.Is(err, rdma.ErrWire):
		to.Status, to.Value, to.Cause, to.Remedy = diagnose.Fail, rdma.HandshakeCauseOf(err).String(), err.Error(), remedies[rdma.HandshakeCauseOf(err)]
		return []diagnose.Finding{to}
	}
	back, err := askBack(ctx, address, ownHost, ownPort, timeout)
	if err != nil {
		to.Status, to.Value, to.Cause = diagnose.Fail, rdma.HandshakeProtocol.String(), "it speaks ZeroMQ, but is neither a side channel nor a doctor: "+err.Error()
		to.Remedy = remedies[rdma.HandshakeProtocol]
		return []diagnose.Finding{to}
	}
	to.Value = fmt.Sprintf("a doctor answers in %v", time.Since(start).Round(time.Microsecond))
	from.Value = "it reaches " + back.own
	if back.Error != "" {
		from.Status, from.Value, from.Cause = diagnose.Fail, "it does not reach "+back.own, back.Error
		from.Remedy = "let it through, or advertise another address of this machine, in VLLM_NIXL_SIDE_CHANNEL_HOST"
	}
	return []diagnose.Finding{to, from}
}

const notCalled = "an instance calls nobody back; run `nixlgo doctor --answer HOST:PORT` there in its place"

var remedies = map[rdma.HandshakeCause]string{
	rdma.HandshakeUnreachable: "start the instance, or correct the address: its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT",
	rdma.HandshakeTimeout:     "open the port in firewalls and network policies, or correct the address; if the instance hangs, restart it",
	rdma.HandshakeProtocol:    "name the port of a NixlConnector's side channel, or of `nixlgo doctor --answer`",
	rdma.HandshakeOther:       "correct the address",
}

// askBack listens on the own address and has the doctor at address call it.
func askBack(ctx context.Context, address, ownHost, ownPort string, timeout time.Duration) (r struct {
	calledBack
	own string
}, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*timeout) // its own try ends before
	defer cancel()
	if ownHost == "" { // the address that this machine has to the peer
		probe, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return r, err
		}
		ownHost = probe.LocalAddr().(*net.TCPAddr).IP.String()
		probe.Close()
	}
	r.own = net.JoinHostPort(ownHost, cmp.Or(ownPort, "0"))
	switch l, err := net.Listen("tcp", r.own); {
	case errors.Is(err, syscall.EADDRINUSE): // an instance that runs here is called, as by readers
	case err != nil:
		r.Error = err.Error()
		return r, nil
	default:
		r.own = net.JoinHostPort(ownHost, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
		served, stop := make(chan struct{}), cancel
		go func() {
			defer close(served)
			_ = Answer(ctx, l, timeout) // ends with ctx; before, the call back fails and says so
		}()
		defer func() {
			stop()
			<-served
		}()
	}
	c, err := zmtp.Dial(ctx, address, 0)
	if err != nil {
		return r, err
	}
	defer c.Close()
	reply, err := c.Request(ctx, [][]byte{[]byte(callBack), []byte(r.own)})
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(reply[0], &r.calledBack)
}
