package rdma

import (
	"fmt"
	"slices"

	"github.com/nixlgo/nixlgo/lease"
)

// share is what one reader rank does with one owner rank: the KV heads that it reads from it, and how it says that it is
// done. With tensor parallelism (TP) each rank holds an equal part of the heads, or, with more ranks than heads, one head
// that several ranks hold.
type share struct {
	rank    int // of the owner
	readers int // N of the read-complete: reader ranks that tell this owner rank that they are done

	heads       int // heads to read; 0: another rank in the list holds them too, and this one is only told
	localFirst  int // index of the first of them in the reader's block
	remoteFirst int // and in the owner's
	localHeads  int // heads in the reader's block
	remoteHeads int // and in the owner's
	first       bool
}

// shares lists what reader rank d of readers ranks does with an owner of owners ranks. It has to tell every rank in the
// list when it is done, renews its leases there, and reads from those that have heads for it. heads is the number of KV
// heads of the whole model; 1 stands for a cache that every rank holds whole (vllm-wire.md 1.3, 4, 6.3).
func shares(heads, d, readers, owners int) []share {
	if readers >= owners {
		owner := d * owners / readers
		localHead, n := headsOf(heads, d, readers)
		remoteHead, m := headsOf(heads, owner, owners)
		return []share{{rank: owner, readers: readers / owners, heads: n, remoteFirst: localHead - remoteHead, localHeads: n, remoteHeads: m, first: true}}
	}
	k := owners / readers
	localHead, n := headsOf(heads, d, readers)
	out := make([]share, k)
	for i, next := 0, localHead; i < k; i++ {
		s := share{rank: d*k + i, readers: 1, localHeads: n, first: i == 0}
		var remoteHead int
		remoteHead, s.remoteHeads = headsOf(heads, s.rank, owners)
		if remoteHead == next { // otherwise an earlier rank holds the same head
			s.heads, s.localFirst = s.remoteHeads, next-localHead
			next += s.heads
		}
		out[i] = s
	}
	return out
}

// headsOf is the first head of a rank and how many it holds.
func headsOf(heads, rank, ranks int) (first, n int) {
	return rank * heads / ranks, max(1, heads/ranks)
}

// divides reports whether one of a and b is a multiple of the other.
func divides(a, b int) bool { return a%b == 0 || b%a == 0 }

// ranksOf is what this rank does with the ranks of an owner, or with tell, that all of them are to be told things; the error says
// why it can do nothing with them.
func (w *Worker) ranksOf(info lease.Peer, tell bool) ([]share, error) {
	kv, tp := &w.cfg.KV, w.cfg.TPSize
	refuse := func(field string, own, remote any, why string) ([]share, error) {
		return nil, fmt.Errorf("%w with engine %q: %s is %v there and %v here%s", errShape, info.Engine, field, remote, own, why)
	}
	switch heads := kv.heads(tp); {
	case info.Engine == w.cfg.Engine:
		return nil, fmt.Errorf("remote_engine_id %q is this engine itself", info.Engine)
	case info.PPSize > 1:
		return refuse("pp_size", 1, info.PPSize, "; pipeline parallelism is not served")
	case info.TPSize < 1:
		return refuse("tp_size", tp, info.TPSize, "")
	case tell: // each rank of the owner is told by this one alone
		all := make([]share, info.TPSize)
		for rank := range all {
			all[rank] = share{rank: rank, readers: 1}
		}
		return all, nil
	case info.DCPSize > 1:
		return refuse("dcp_size", 1, info.DCPSize, "; context parallelism is not served")
	case !divides(info.TPSize, tp):
		return refuse("tp_size", tp, info.TPSize, ", and neither is a multiple of the other")
	case heads == 0 && info.TPSize != tp:
		return refuse("tp_size", tp, info.TPSize, "; reading from another needs KV.Heads, the number of KV heads of the model")
	case heads == 0:
		return shares(tp, w.cfg.Rank, tp, tp), nil // one unknown part of the heads per rank
	case !divides(heads, info.TPSize):
		return refuse("tp_size", tp, info.TPSize, fmt.Sprintf(", and %d KV heads cannot be spread evenly over %d ranks", heads, info.TPSize))
	default:
		return shares(heads, w.cfg.Rank, tp, info.TPSize), nil
	}
}

// heads is the number of KV heads of the model: 1 when every region is replicated, 0 when not known.
func (kv *KV) heads(tp int) int {
	if !slices.ContainsFunc(kv.Regions, func(r Region) bool { return !r.Replicated }) {
		return 1
	}
	return kv.Heads
}

// match checks that this rank, whose metadata is own, can read from an owner rank, and says how blocks are cut on both sides
// to do so: one cut per region, of as many descriptors here as there. The error names the field and both values.
func (kv *KV) match(own, remote *Metadata, s share) (local, there []cut, err error) {
	differ := func(field string, a, b any, why ...any) error {
		return fmt.Errorf("%w with engine %q: %s is %v there and %v here%s", errShape, remote.Engine, field, b, a, fmt.Sprint(why...))
	}
	replicated := !slices.ContainsFunc(kv.Regions, func(r Region) bool { return !r.Replicated })
	switch {
	case remote.DCPSize != 1:
		return nil, nil, differ("dcp_size", 1, remote.DCPSize)
	case remote.PCPSize != 1:
		return nil, nil, differ("pcp_size", 1, remote.PCPSize)
	case remote.SSMSizes != own.SSMSizes:
		return nil, nil, differ("ssm_sizes", own.SSMSizes, remote.SSMSizes)
	case len(own.BaseAddrs) != len(remote.BaseAddrs):
		return nil, nil, differ("number of regions", len(own.BaseAddrs), len(remote.BaseAddrs))
	case own.Attention != remote.Attention:
		return nil, nil, differ("attn_backend_name", own.Attention, remote.Attention)
	case own.Layout != remote.Layout && !replicated:
		return nil, nil, differ("kv_cache_layout", own.Layout, remote.Layout)
	case len(remote.RegionGroups) > 0 && !slices.Equal(own.RegionGroups, remote.RegionGroups):
		return nil, nil, differ("region_group_ids", own.RegionGroups, remote.RegionGroups)
	case remote.PhysicalPerLogical > maxTokens/remote.BlockSize:
		return nil, nil, differ("physical_blocks_per_logical_kv_block × block_size", own.logical(), fmt.Sprintf("%d × %d", remote.PhysicalPerLogical, remote.BlockSize))
	case own.BlockSize != remote.BlockSize && !(tokensCut(own) && tokensCut(remote)):
		return nil, nil, differ("block_size", own.BlockSize, remote.BlockSize, ", and blocks of layout ", remote.Layout, " and ", remote.Attention,
			" cannot be cut between tokens")
	case own.BlockSize != remote.BlockSize && !replicated && kv.Heads == 0:
		return nil, nil, differ("block_size", own.BlockSize, remote.BlockSize, "; reading from another needs KV.Heads, the number of KV heads of the model")
	}
	for r := range own.BlockLens {
		if len(own.RegionNames) > 0 && len(remote.RegionNames) > 0 && own.RegionNames[r] != remote.RegionNames[r] {
			return nil, nil, differ(fmt.Sprintf("region_names[%d]", r), own.RegionNames[r], remote.RegionNames[r])
		}
		s := s
		if kv.Regions[r].Replicated {
			s.heads, s.localFirst, s.remoteFirst, s.localHeads, s.remoteHeads = 0, 0, 0, 1, 1
			if s.first {
				s.heads = 1
			}
		} else if !headsCut(own.Layout) {
			if s.localHeads != s.remoteHeads {
				return nil, nil, differ("heads per rank", s.localHeads, s.remoteHeads, ", and blocks of layout ", own.Layout, " cannot be cut by head")
			}
			s.heads, s.localHeads, s.remoteHeads = min(s.heads, 1), 1, 1 // all heads are one
		}
		l, c, ok := cuts(own.BlockLens[r], own.BlockSize, remote.BlockLens[r], remote.BlockSize, s)
		if !ok {
			text := func(length, heads, tokens int) string {
				return fmt.Sprintf("%d bytes for %d heads of %d tokens", length, heads, tokens)
			}
			return nil, nil, differ(fmt.Sprintf("block_lens[%d]", r), text(own.BlockLens[r], s.localHeads, own.BlockSize),
				text(remote.BlockLens[r], s.remoteHeads, remote.BlockSize))
		}
		local, there = append(local, l), append(there, c)
	}
	if n, m := count(own, local), count(remote, there); n > maxDescriptors || m > maxDescriptors {
		return nil, nil, differ("number of descriptors", n, m, fmt.Sprintf(", at most %d are served", maxDescriptors))
	}
	return local, there, nil
}

// headsCut reports whether the heads of a block lie one behind the other, each whole, in a layout of vLLM's
// (Layer, Block, Head, tokeN, Content).
func headsCut(layout string) bool { return layout == "LBHNC" || layout == "BLHNC" || layout == "BHLNC" }

// tokensCut reports whether a block can be cut between tokens: its region has one layer, and each token's key and value
// lie side by side. CPU_ATTN has the keys of all tokens of a block first.
func tokensCut(m *Metadata) bool {
	return (m.Layout == "LBHNC" || m.Layout == "LBNHC") && m.Attention != "CPU_ATTN"
}

// cuts cuts a block of length bytes for tokens tokens here and one there, so that the descriptors of both hold the same
// tokens of the same heads. It is false when a head has not as many bytes per token here as there.
func cuts(length, tokens, thereLength, thereTokens int, s share) (here, there cut, ok bool) {
	head, thereHead := length/s.localHeads, thereLength/s.remoteHeads // bytes of one head in a block
	if length%s.localHeads != 0 || thereLength%s.remoteHeads != 0 {
		return here, there, false
	}
	if tokens == thereTokens {
		here = cut{first: s.localFirst * head, rows: min(s.heads, 1), pieces: 1, size: s.heads * head}
		there = here
		there.first = s.remoteFirst * head
		return here, there, head == thereHead
	}
	if head%tokens != 0 || thereHead%thereTokens != 0 || head/tokens != thereHead/thereTokens {
		return here, there, false
	}
	g := gcd(tokens, thereTokens)
	here = cut{first: s.localFirst * head, rows: s.heads, pitch: head, pieces: tokens / g, size: g * (head / tokens)}
	there = cut{first: s.remoteFirst * thereHead, rows: s.heads, pitch: thereHead, pieces: thereTokens / g, size: here.size}
	return here, there, true
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
