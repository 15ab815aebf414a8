package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nixlgo/nixlgo/lease"
	"github.com/nixlgo/nixlgo/rdma"
)

const (
	count = prometheus.CounterValue
	level = prometheus.GaugeValue
)

type (
	workerStats = rdma.WorkerStats
	engineStats = lease.SchedulerStats
)

var (
	byCause  = []string{"cause"}
	byKind   = []string{"kind"}
	byOp     = []string{"op"}
	byOrder  = []string{"order"}
	byReason = []string{"reason"}
	byResult = []string{"result"}
	byState  = []string{"state"}
)

// Values of labels that stand in more than one family.
const (
	opRead        = "read"   // READs of blocks
	opVerify      = "verify" // READs of lease slots
	causePeerLost = "peer_lost"
	causeTransfer = "transfer"
)

var (
	bounds      = rdma.StatsBounds()
	leaseBounds = lease.LeaseSeconds()
)

// worker are the series of one rank.
var worker = []family[workerStats]{
	counter("worker_steps_total", "Steps of this rank.", func(s *workerStats) int64 { return s.Steps }),

	split(count, "transfer_posted_total", "READs posted: of blocks (read), one a request and owner rank, and of lease slots (verify), one a step and owner rank.",
		byOp, func(s *workerStats) []part { return []part{of(s.Reads, opRead), of(s.Checks, opVerify)} }),
	split(count, "transfer_failures_total", "READs that failed, because the peer, or the transport to it, is gone or for another reason.",
		[]string{"op", "cause"}, func(s *workerStats) []part {
			return []part{of(s.ReadsLost, opRead, causePeerLost), of(s.ReadsFailed, opRead, causeTransfer),
				of(s.ChecksLost, opVerify, causePeerLost), of(s.ChecksFailed, opVerify, causeTransfer)}
		}),
	counter("transfer_bytes_total", "Bytes of block READs that completed.", func(s *workerStats) int64 { return s.BytesRead }),
	histogram("transfer_duration_seconds", "Time from the post of a block READ that completed to the step that saw it.",
		bounds.ReadTime, func(s *workerStats) *lease.Histogram { return &s.ReadTime }),
	histogram("transfer_post_duration_seconds", "Time that the post of a block READ took.",
		bounds.PostTime, func(s *workerStats) *lease.Histogram { return &s.PostTime }),
	histogram("transfer_size_bytes", "Bytes of a block READ that completed.",
		bounds.ReadSize, func(s *workerStats) *lease.Histogram { return &s.ReadSize }),
	histogram("transfer_descriptors", "Descriptors of a block READ that completed, before NIXL joins neighbours.",
		bounds.ReadDescriptors, func(s *workerStats) *lease.Histogram { return &s.ReadDescriptors }),
	gauge("transfer_waiting", "Requests that wait for a handshake, or for others of their engine to be read, now.", func(s *workerStats) int64 { return int64(s.Waiting) }),
	gauge("transfer_pulls", "Requests waiting, being read, checked, or in quarantine now.", func(s *workerStats) int64 { return int64(s.Pulls) }),

	split(count, "verify_total", "Reads by what the check of their lease found.", byResult, func(s *workerStats) []part {
		return []part{of(s.Verified, "ok"), of(s.Lapsed, "lapsed"), of(s.Unverifiable, "unverifiable")}
	}),
	counter("verify_skipped_total", "Reads taken without a check, because verification is off.", func(s *workerStats) int64 { return s.Unverified }),
	histogram("verify_duration_seconds", "Time from the post of a slot READ that completed to the step that saw it, one for all requests of a step and owner rank.",
		bounds.CheckTime, func(s *workerStats) *lease.Histogram { return &s.CheckTime }),

	split(level, "peers", "Engines that this rank knows now: connected, not connected, with a handshake under way, and lost with a READ still active.",
		byState, func(s *workerStats) []part {
			return []part{of(int64(s.Peers), "connected"), of(int64(s.PeersIdle), "idle"),
				of(int64(s.PeersConnecting), "connecting"), of(int64(s.PeersBroken), "broken")}
		}),
	counter("peer_evictions_total", "Engines forgotten because they were not used for engine_ttl.", func(s *workerStats) int64 { return s.PeersEvicted }),
	histogram("handshake_duration_seconds", "Time that a handshake took which succeeded, all ranks of the owner together.",
		bounds.HandshakeTime, func(s *workerStats) *lease.Histogram { return &s.HandshakeTime }),
	split(count, "handshake_failures_total", "Handshakes that failed.", byCause, func(s *workerStats) []part {
		return byName(s.HandshakesFailed[:], 0, rdma.HandshakeCause.String)
	}),
	split(count, "notification_failures_total", "Heartbeats and read-completes that were not sent, because the peer, or the transport to it, is gone or for another reason.",
		byCause, func(s *workerStats) []part {
			return []part{of(s.NotifyLost, causePeerLost), of(s.NotifyFailed, causeTransfer)}
		}),
	counter("heartbeat_sent_total", "Heartbeat messages sent.", func(s *workerStats) int64 { return s.HeartbeatsSent }),

	gauge("lease_active", "Leases of this rank now, from the step that schedules the request.", func(s *workerStats) int64 { return s.Leases.Live }),
	gauge("lease_free_slots", "Slots of this rank that show no nonce now.", func(s *workerStats) int64 { return s.Leases.FreeSlots }),
	seconds("lease_oldest_age_seconds", "Time since the grant of the lease that was granted first, of those that live, at the last step; 0 without one.",
		func(s *workerStats) time.Duration { return s.Leases.OldestAge }),
	{
		describeOne("lease_hold_duration_seconds", "Time from the grant of a lease to its end.", "reason"),
		func(desc *prometheus.Desc, s *workerStats, out chan<- prometheus.Metric) {
			for r := lease.ReasonRead; int(r) < len(s.Leases.Held); r++ {
				out <- constHistogram(desc, &s.Leases.Held[r], leaseBounds, label(r.String()))
			}
		},
	},
	histogram("lease_margin_seconds", "What the deadline of a lease that was read had left then. When the low buckets fill, the lease is too short.",
		leaseBounds, func(s *workerStats) *lease.Histogram { return &s.Leases.Margin }),
	counter("lease_admitted_total", "Requests whose nonce went into a slot.", func(s *workerStats) int64 { return s.Leases.Admitted }),
	counter("lease_granted_total", "Leases that were given a deadline.", func(s *workerStats) int64 { return s.Leases.Granted }),
	counter("lease_renewed_total", "Renewals of leases by heartbeats.", func(s *workerStats) int64 { return s.Leases.Renewals }),
	split(count, "lease_released_total", "Leases that ended before their deadline.", byReason, func(s *workerStats) []part {
		return []part{of(s.Leases.Read, "read"), of(s.Leases.Aborted, "aborted")}
	}),
	counter("lease_expired_total", "Leases that nobody renewed or read in time.", func(s *workerStats) int64 { return s.Leases.Expired }),
	split(count, "lease_renewals_missed_total", "Renewals that found no lease: of an id that has none, or a slot with another nonce.",
		byCause, func(s *workerStats) []part {
			return []part{of(s.Leases.UnknownRenewals, "unknown"), of(s.Leases.StaleRenewals, "stale")}
		}),
	counter("lease_completions_total", "Read-complete messages received.", func(s *workerStats) int64 { return s.Leases.ReadCompletes }),
	counter("lease_late_completions_total", "Read-completes that no lease was found for, counted when the search was given up.",
		func(s *workerStats) int64 { return s.Leases.StaleReadCompletes + s.Leases.DroppedReadCompletes }),
	counter("lease_unmatched_completions_total", "Read-completes that no lease was found for when they came: early ones, and later the late ones.",
		func(s *workerStats) int64 { return s.Leases.UnmatchedReadCompletes }),
	counter("lease_early_completions_total", "Read-completes that came before their lease and were kept for it.",
		func(s *workerStats) int64 { return s.Leases.EarlyReadCompletes }),
	counter("lease_duplicate_completions_total", "Read-completes by a reader that was counted before.",
		func(s *workerStats) int64 { return s.Leases.DuplicateReadCompletes }),
	counter("lease_refused_completions_total", "Read-completes without a nonce that came before export or could be for several leases.",
		func(s *workerStats) int64 { return s.Leases.RefusedReadCompletes }),
	counter("lease_nonceless_completions_total", "Read-completes taken without a nonce for a lease that has one (vLLM up to 0.33).",
		func(s *workerStats) int64 { return s.Leases.NoncelessReadCompletes }),
	split(count, "lease_overtaken_total", "Grants and aborts that came when the lease had ended.", byOrder, func(s *workerStats) []part {
		return []part{of(s.Leases.DroppedGrants, "grant"), of(s.Leases.DroppedAborts, "abort")}
	}),
	counter("heartbeat_received_total", "Heartbeat messages received.", func(s *workerStats) int64 { return s.Leases.Heartbeats }),
	counter("notification_malformed_total", "Notifications that could not be read.", func(s *workerStats) int64 { return s.Leases.MalformedNotifications }),
}

// scheduler are the series of one engine.
var scheduler = []family[engineStats]{
	split(level, "scheduler_requests", "Requests that own blocks for a reader now, running or finished and pinned.", byState, func(s *engineStats) []part {
		return []part{of(s.Running, "running"), of(s.Pinned, "pinned")}
	}),
	split(level, "lease_slots", "Lease slots by what they are; together they are all that there are.", byState, func(s *engineStats) []part {
		return []part{of(s.FreeSlots, "free"), of(s.UsedSlots, "used")}
	}),
	gauge("lease_pinned_blocks", "Blocks that may not be reused before their reader is done, or the lease has ended.", func(s *engineStats) int64 { return s.PinnedBlocks }),
	gauge("lease_pinned_tokens", "Tokens that the exported ones of those blocks hold.", func(s *engineStats) int64 { return s.PinnedTokens }),
	gauge("lease_pinned_bytes", "Bytes of those blocks on all ranks; 0 where the engine has not told the size of a block.", func(s *engineStats) int64 { return s.PinnedBytes }),
	counter("scheduler_admitted_total", "Requests scheduled for a reader.", func(s *engineStats) int64 { return s.Admitted }),
	counter("scheduler_admitted_without_slot_total", "Those of them for which no slot was free.", func(s *engineStats) int64 { return s.NoSlot }),
	counter("scheduler_exported_total", "Requests whose kv_transfer_params left.", func(s *engineStats) int64 { return s.Exported }),
	counter("scheduler_revoked_total", "Leases ended by their owner.", func(s *engineStats) int64 { return s.Revoked }),
	split(count, "scheduler_freed_total", "Requests whose blocks were freed, by how the lease ended on all ranks.", byReason, func(s *engineStats) []part {
		return byName(s.Freed[:], lease.ReasonRead, lease.Reason.String)
	}),
	split(count, "scheduler_reports_total", "Reports of ranks that came before the request finished, twice, or for nothing known.",
		byKind, func(s *engineStats) []part {
			return []part{of(s.EarlyReports, "early"), of(s.RepeatedReports, "repeated"), of(s.UnknownReports, "unknown")}
		}),

	counter("load_started_total", "KV loads given to the ranks.", func(s *engineStats) int64 { return s.Pulls }),
	counter("load_received_total", "KV loads that every rank has, checked.", func(s *engineStats) int64 { return s.Received }),
	split(count, "load_failures_total", "KV loads that failed.", byCause, func(s *engineStats) []part {
		return byName(s.Failed[:], lease.CauseLapsed, lease.Cause.String)
	}),
	counter("load_released_total", "Owners told that nothing will be read.", func(s *engineStats) int64 { return s.Released }),
	gauge("heartbeat_leases", "Leases of other engines that are renewed now.", func(s *engineStats) int64 { return s.Tracked }),
	gauge("heartbeat_peers", "Engines whose leases are renewed or read now.", func(s *engineStats) int64 { return s.Peers }),
	counter("heartbeat_planned_total", "Heartbeats given to the ranks, one a peer.", func(s *engineStats) int64 { return s.Heartbeats }),
	counter("heartbeat_failures_total", "Reports of ranks that a peer could not be heartbeated.", func(s *engineStats) int64 { return s.HeartbeatsFailed }),
}

var sideChannel = []family[rdma.SideChannelStats]{
	counter("handshake_answered_total", "Handshake requests answered.", func(s *rdma.SideChannelStats) int64 { return s.Answered }),
	counter("handshake_refused_total", "Malformed requests and connections, and requests for ranks that are not here.",
		func(s *rdma.SideChannelStats) int64 { return s.Bad }),
}

var longestStep = []family[time.Duration]{
	seconds("worker_longest_step_seconds", "Longest time from the start of one step to the next; heartbeats and reads wait for it.",
		func(d *time.Duration) time.Duration { return *d }),
}
