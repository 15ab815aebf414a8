package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/rdma"
)

// blockRead is what a look at the blocks of a request gave.
type blockRead struct {
	Bytes  int
	Blocks []string // SHA-256 of each block, over all regions and ranks
	Tokens int      // of a block
	Lease  string   // held or lapsed on every rank; empty: the params have no slot
}

// readRequest reads the blocks that params name on every rank of their owner, without a word to it: no lease is renewed or
// ended by it.
func readRequest(ctx context.Context, p *lease.Params, library string, key []byte, timeout time.Duration) (*blockRead, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	peer := p.Peer()
	if peer.PPSize > 1 || peer.DCPSize > 1 {
		return nil, fmt.Errorf("pipeline and context parallelism (pp_size %d, dcp_size %d) are not served", peer.PPSize, peer.DCPSize)
	}
	r := &blockRead{}
	var sums [][]string // per block
	for rank := range peer.TPSize {
		short, cancel := context.WithTimeout(ctx, timeout)
		reply, err := rdma.ProbeWithKey(short, peer.Host, peer.Port, 0, rank, key)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("side channel %s:%d, tp rank %d: %w", peer.Host, peer.Port, rank, err)
		}
		if reply.Metadata.Engine != peer.Engine {
			return nil, fmt.Errorf("side channel %s:%d is engine %q, and the params are of %q: the owner was restarted, or remote_host was replaced by another's",
				peer.Host, peer.Port, reply.Metadata.Engine, peer.Engine)
		}
		job, of, err := blockJob(reply.Metadata, p)
		if err != nil {
			return nil, err
		}
		job.Library, job.Timeout = library, timeout
		run, err := job.run(ctx, exe)
		if err != nil {
			return nil, fmt.Errorf("tp rank %d: %w", rank, err)
		}
		r.Tokens = reply.Metadata.BlockSize * reply.Metadata.PhysicalPerLogical
		r.Bytes += run.Bytes
		if run.Lease != "" && r.Lease != "lapsed" {
			r.Lease = run.Lease
		}
		for i, sum := range run.SHA256 {
			for of[i] >= len(sums) {
				sums = append(sums, nil)
			}
			sums[of[i]] = append(sums[of[i]], sum)
		}
	}
	for _, s := range sums {
		r.Blocks = append(r.Blocks, digest(s))
	}
	return r, nil
}

// digest is one hash of many.
func digest(hashes []string) string {
	sum := sha256.Sum256([]byte(strings.Join(hashes, " ")))
	return hex.EncodeToString(sum[:])
}

// blockJob is the read of a request's blocks from one rank. Piece i belongs to block of[i], as the params count them.
func blockJob(m *rdma.Metadata, p *lease.Params) (job *probeJob, of []int, err error) {
	job = &probeJob{Agent: m.Agent, Mem: nixl.DRAM.String(), Backend: "UCX", Hash: true}
	if len(m.RegionMemTypes) > 0 {
		job.Mem = m.RegionMemTypes[0]
	}
	block := 0
	for g, ids := range p.RemoteBlockIDs {
		for _, id := range ids {
			for r, base := range m.BaseAddrs {
				if len(m.RegionGroups) > 0 && m.RegionGroups[r] >= 0 && m.RegionGroups[r] != g {
					continue
				}
				have := m.NumBlocks
				if len(m.RegionBlocks) > 0 {
					have = m.RegionBlocks[r]
				}
				for k := range m.PhysicalPerLogical {
					kernel := id*m.PhysicalPerLogical + k
					if kernel >= have {
						return nil, nil, fmt.Errorf("remote_block_ids names block %d, and region %d has %d", id, r, have/m.PhysicalPerLogical)
					}
					job.Descs = append(job.Descs, nixl.Desc{Addr: base + uint64(kernel)*uint64(m.BlockStrides[r]), Len: uint64(m.BlockLens[r]), Dev: m.Device})
					of = append(of, block)
				}
			}
			block++
		}
	}
	if l := p.Lease; l != nil && m.SlotsCount > 0 {
		if l.Slot >= m.SlotsCount {
			return nil, nil, fmt.Errorf("remote_lease_slot is %d, and the owner has %s", l.Slot, many(m.SlotsCount, "slot"))
		}
		job.Slot, job.Nonce = &nixl.Desc{Addr: m.SlotsBase + uint64(l.Slot)*8, Len: 8}, l.Nonce
	}
	return job, of, nil
}
