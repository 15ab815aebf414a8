package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// probeRun is what reading from one rank gave.
type probeRun struct {
	Bytes        int     `json:"bytes"`
	FirstSeconds float64 `json:"first_s"` // the first READ, which connects
	Seconds      float64 `json:"s"`       // the fastest of those after it
	GBs          float64 `json:"gb_s"`    // 10^9 bytes a second, of the fastest
	Backend      string  `json:"backend"`
	Transport    string  `json:"transport"` // as UCX says it
	Error        string  `json:"error,omitempty"`

	SHA256 []string `json:"sha256,omitempty"` // of each piece, when the job asks for it
	Lease  string   `json:"lease,omitempty"`  // held or lapsed, when the job has a slot
}

// probeJob is the standard input of the process that reads.
type probeJob struct {
	Agent   []byte
	Mem     string
	Descs   []nixl.Desc
	Library string
	Backend string
	Timeout time.Duration

	// For the blocks of one request: they are read once and hashed, then the slot is read, which has to hold the nonce.
	Hash  bool
	Slot  *nixl.Desc
	Nonce int64
}

const probeReadName = "read"

// newProbeRead is the process of probe that loads the library.
func newProbeRead() *cobra.Command {
	return &cobra.Command{
		Use:    probeReadName,
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var job probeJob
			if err := json.NewDecoder(cmd.InOrStdin()).Decode(&job); err != nil {
				return fmt.Errorf("read the job: %w", err)
			}
			run, err := job.read(cmd.Context())
			if err != nil {
				run = &probeRun{Error: err.Error()}
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(run)
		},
	}
}

// readBlocks reads the first blocks of a rank in a process of its own: the library may wait for ever or crash there, and UCX
// tells its transports on that process's standard error only.
func (c *probeConfig) readBlocks(ctx context.Context, reply *rdma.Reply) (*probeRun, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	m := reply.Metadata
	job := probeJob{Agent: m.Agent, Mem: nixl.DRAM.String(), Library: c.library, Backend: c.backend, Timeout: c.timeout}
	if len(m.RegionMemTypes) > 0 {
		job.Mem = m.RegionMemTypes[0]
	}
	// Block by block over all regions, as a reader does.
	total := 0
	for b := 0; b < m.NumBlocks && total < c.bytes; b++ {
		for r, base := range m.BaseAddrs {
			if len(m.RegionBlocks) > 0 && b >= m.RegionBlocks[r] || total > 0 && total+m.BlockLens[r] > c.bytes {
				continue
			}
			job.Descs = append(job.Descs, nixl.Desc{Addr: base + uint64(b)*uint64(m.BlockStrides[r]), Len: uint64(m.BlockLens[r]), Dev: m.Device})
			total += m.BlockLens[r]
		}
	}
	return job.run(ctx, exe)
}

// run does the job in a process of this program.
func (j *probeJob) run(ctx context.Context, exe string) (*probeRun, error) {
	in, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	const start = 20 * time.Second // to load the library and start its backend
	ctx, cancel := context.WithTimeout(ctx, start+2*j.Timeout)
	defer cancel()
	child := exec.CommandContext(ctx, exe, "probe", probeReadName)
	var out, log bytes.Buffer
	child.Stdin, child.Stdout, child.Stderr = bytes.NewReader(in), &out, &log
	child.Env = append(os.Environ(), "UCX_LOG_LEVEL=info", "UCX_LOG_FILE=stderr")
	child.WaitDelay = time.Second
	err = child.Run()
	var run probeRun
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("the process that reads did not end in %v: %w", start+2*j.Timeout, ctx.Err())
	case err != nil:
		return nil, fmt.Errorf("the process that reads: %w: %s", err, lastLine(log.String()))
	}
	if err := json.Unmarshal(out.Bytes(), &run); err != nil {
		return nil, fmt.Errorf("the answer of the process that reads: %w", err)
	}
	if run.Error != "" {
		return nil, errors.New(run.Error)
	}
	run.Transport = transport(log.String())
	return &run, nil
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

func (j *probeJob) read(ctx context.Context) (*probeRun, error) {
	if _, err := nixl.Load(j.Library); err != nil {
		return nil, err
	}
	mem, err := nixl.ParseMemType(j.Mem)
	if err != nil {
		return nil, err
	}
	a, err := nixl.NewAgent("", nixl.Config{})
	if err != nil {
		return nil, err
	}
	defer a.Close()
	if _, err := a.CreateBackend(j.Backend, nil); err != nil {
		return nil, err
	}
	total := 0
	for _, d := range j.Descs {
		total += int(d.Len)
	}
	buf, err := nixl.AllocBuffer(total)
	if err != nil {
		return nil, err
	}
	defer buf.Close()
	if _, err := a.Register(buf); err != nil {
		return nil, err
	}
	own := make([]nixl.Desc, 0, len(j.Descs))
	at := buf.Addr()
	for _, d := range j.Descs {
		own = append(own, nixl.Desc{Addr: at, Len: d.Len})
		at += d.Len
	}
	name, err := a.LoadRemote(j.Agent)
	if err != nil {
		return nil, err
	}
	local, err := a.PrepareLocal(nixl.DRAM, own)
	if err != nil {
		return nil, err
	}
	remote, err := a.PrepareRemote(name, mem, j.Descs)
	if err != nil {
		return nil, fmt.Errorf("the blocks that the instance advertises: %w", err)
	}
	t, err := a.NewTransfer(nixl.Read, local, nil, remote, nil, nixl.TransferOptions{})
	if err != nil {
		return nil, err
	}
	run := &probeRun{Bytes: total, Backend: j.Backend}
	if j.Hash {
		return run, j.readOnce(ctx, a, name, t, buf, run)
	}
	for i := range 6 {
		took, err := j.once(ctx, t)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			run.FirstSeconds = took.Seconds()
		} else if run.Seconds == 0 || took.Seconds() < run.Seconds {
			run.Seconds = took.Seconds()
		}
	}
	run.GBs = float64(total) / run.Seconds / 1e9
	return run, nil
}

// readOnce reads the blocks, hashes them, and then looks whether their lease was held until now.
func (j *probeJob) readOnce(ctx context.Context, a *nixl.Agent, owner string, t *nixl.Transfer, buf *nixl.Buffer, run *probeRun) error {
	took, err := j.once(ctx, t)
	if err != nil {
		return err
	}
	run.FirstSeconds = took.Seconds()
	for rest := buf.Bytes(); len(run.SHA256) < len(j.Descs); {
		n := j.Descs[len(run.SHA256)].Len
		sum := sha256.Sum256(rest[:n])
		run.SHA256, rest = append(run.SHA256, hex.EncodeToString(sum[:])), rest[n:]
	}
	if j.Slot == nil {
		return nil
	}
	cell, err := nixl.AllocBuffer(8)
	if err != nil {
		return err
	}
	defer cell.Close()
	if _, err := a.Register(cell); err != nil {
		return err
	}
	slot, err := a.CreateTransfer(nixl.Read, nixl.DRAM, []nixl.Desc{{Addr: cell.Addr(), Len: 8}}, owner, nixl.DRAM, []nixl.Desc{*j.Slot}, nixl.TransferOptions{})
	if err != nil {
		return fmt.Errorf("the lease slot: %w", err)
	}
	if _, err := j.once(ctx, slot); err != nil {
		return fmt.Errorf("the lease slot: %w", err)
	}
	run.Lease = "lapsed"
	if int64(binary.NativeEndian.Uint64(cell.Bytes())) == j.Nonce {
		run.Lease = "held"
	}
	return nil
}

func (j *probeJob) once(ctx context.Context, t *nixl.Transfer) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, j.Timeout)
	defer cancel()
	start := time.Now()
	if _, err := t.Post(); err != nil {
		return 0, err
	}
	if err := t.Wait(ctx); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("the READ did not end in %v: the instance is stopped, or UCX finds no way to the addresses it advertises", j.Timeout)
		}
		return 0, err
	}
	return time.Since(start), nil
}

// ucxLanes is the line in which UCX says how an endpoint to another process moves bytes:
//
//	… UCX  INFO    217c9882 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)
var ucxLanes = regexp.MustCompile(`(?m)UCX\s+INFO.*\b(int(?:ra|er)-node) cfg#\d+ +(.*\S)\s*$`)

// transport is what UCX's log says of the connection to the owner.
func transport(log string) string {
	found := ucxLanes.FindAllStringSubmatch(log, -1)
	if len(found) == 0 {
		return "transport unknown: UCX did not say"
	}
	last := found[len(found)-1]
	text := last[1] + " " + strings.Join(strings.Fields(last[2]), " ")
	if strings.Contains(last[2], "rma_am(") {
		text += " (emulated: the owner's CPU copies)"
	}
	return text
}
