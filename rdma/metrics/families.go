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

// worker are the series of one rank. WorkerStats.TransfersFailed has none: it adds READs that failed and peers that were
// lost up, which are apart in nixlgo_load_failures_total.
var worker = []family[workerStats]{
	counter("worker_steps_total", "Steps of this rank.", func(s *workerStats) int64 { return s.Steps }),

	counter("transfer_reads_total", "Block READs posted.", func(s *workerStats) int64 { return s.Reads }),
	counter("transfer_bytes_total", "Bytes of block READs that completed.", func(s *workerStats) int64 { return s.BytesRead }),
	gauge("transfer_waiting", "Requests that wait for a handshake, or for others of their engine to be read, now.", func(s *workerStats) int64 { return int64(s.Waiting) }),
	gauge("transfer_pulls", "Requests waiting, being read, checked, or in quarantine now.", func(s *workerStats) int64 { return int64(s.Pulls) }),

	split(count, "verify_total", "result", "Reads by what the check of their lease found.", func(s *workerStats) []part {
		return []part{{"ok", s.Verified}, {"lapsed", s.Lapsed}, {"unverifiable", s.Unverifiable}}
	}),
	counter("verify_skipped_total", "Reads taken without a check, because verification is off.", func(s *workerStats) int64 { return s.Unverified }),
	counter("verify_reads_total", "Slot READs posted, one for all requests of a step and owner rank.", func(s *workerStats) int64 { return s.Checks }),

	gauge("peer_connections", "Engines connected now.", func(s *workerStats) int64 { return int64(s.Peers) }),
	counter("handshake_failures_total", "Handshakes that failed.", func(s *workerStats) int64 { return s.HandshakesFailed }),
	counter("notification_failures_total", "Heartbeats and read-completes that NIXL did not take.", func(s *workerStats) int64 { return s.NotifyFailed }),
	counter("heartbeat_sent_total", "Heartbeat messages sent.", func(s *workerStats) int64 { return s.HeartbeatsSent }),

	gauge("lease_active", "Leases of this rank now, from the step that schedules the request.", func(s *workerStats) int64 { return s.Leases.Live }),
	gauge("lease_free_slots", "Slots of this rank that show no nonce now.", func(s *workerStats) int64 { return s.Leases.FreeSlots }),
	{
		describeOne("lease_oldest_age_seconds", "Time since the grant of the lease that was granted first, of those that live, at the last step; 0 without one."), level,
		func(s *workerStats, emit func(float64, ...string)) { emit(s.Leases.OldestAge.Seconds()) },
	},
	counter("lease_admitted_total", "Requests whose nonce went into a slot.", func(s *workerStats) int64 { return s.Leases.Admitted }),
	counter("lease_granted_total", "Leases that were given a deadline.", func(s *workerStats) int64 { return s.Leases.Granted }),
	counter("lease_renewed_total", "Renewals of leases by heartbeats.", func(s *workerStats) int64 { return s.Leases.Renewals }),
	split(count, "lease_released_total", "reason", "Leases that ended before their deadline.", func(s *workerStats) []part {
		return []part{{"read", s.Leases.Read}, {"aborted", s.Leases.Aborted}}
	}),
	counter("lease_expired_total", "Leases that nobody renewed or read in time.", func(s *workerStats) int64 { return s.Leases.Expired }),
	split(count, "lease_renewals_missed_total", "cause", "Renewals that found no lease: of an id that has none, or a slot with another nonce.",
		func(s *workerStats) []part {
			return []part{{"unknown", s.Leases.UnknownRenewals}, {"stale", s.Leases.StaleRenewals}}
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
	split(count, "lease_overtaken_total", "order", "Grants and aborts that came when the lease had ended.", func(s *workerStats) []part {
		return []part{{"grant", s.Leases.DroppedGrants}, {"abort", s.Leases.DroppedAborts}}
	}),
	counter("heartbeat_received_total", "Heartbeat messages received.", func(s *workerStats) int64 { return s.Leases.Heartbeats }),
	counter("notification_malformed_total", "Notifications that could not be read.", func(s *workerStats) int64 { return s.Leases.MalformedNotifications }),
}

// scheduler are the series of one engine.
var scheduler = []family[engineStats]{
	split(level, "scheduler_requests", "state", "Requests that own blocks for a reader now, running or finished and pinned.", func(s *engineStats) []part {
		return []part{{"running", s.Running}, {"pinned", s.Pinned}}
	}),
	split(level, "lease_slots", "state", "Lease slots by what they are.", func(s *engineStats) []part { return []part{{"free", s.FreeSlots}} }),
	gauge("lease_pinned_blocks", "Blocks that may not be reused before their reader is done, or the lease has ended.", func(s *engineStats) int64 { return s.PinnedBlocks }),
	gauge("lease_pinned_tokens", "Tokens that the exported ones of those blocks hold.", func(s *engineStats) int64 { return s.PinnedTokens }),
	counter("scheduler_admitted_total", "Requests scheduled for a reader.", func(s *engineStats) int64 { return s.Admitted }),
	counter("scheduler_admitted_without_slot_total", "Those of them for which no slot was free.", func(s *engineStats) int64 { return s.NoSlot }),
	counter("scheduler_exported_total", "Requests whose kv_transfer_params left.", func(s *engineStats) int64 { return s.Exported }),
	counter("scheduler_revoked_total", "Leases ended by their owner.", func(s *engineStats) int64 { return s.Revoked }),
	split(count, "scheduler_freed_total", "reason", "Requests whose blocks were freed, by how the lease ended on all ranks.", func(s *engineStats) []part {
		return byName(s.Freed[:], lease.Reason.String)
	}),
	split(count, "scheduler_reports_total", "kind", "Reports of ranks that came before the request finished, twice, or for nothing known.",
		func(s *engineStats) []part {
			return []part{{"early", s.EarlyReports}, {"repeated", s.RepeatedReports}, {"unknown", s.UnknownReports}}
		}),

	counter("load_started_total", "KV loads given to the ranks.", func(s *engineStats) int64 { return s.Pulls }),
	counter("load_received_total", "KV loads that every rank has, checked.", func(s *engineStats) int64 { return s.Received }),
	split(count, "load_failures_total", "cause", "KV loads that failed.", func(s *engineStats) []part {
		return byName(s.Failed[:], lease.Cause.String)
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

var longestStep = []family[time.Duration]{{
	describeOne("worker_longest_step_seconds", "Longest time from the start of one step to the next; heartbeats and reads wait for it."), level,
	func(d *time.Duration, emit func(float64, ...string)) { emit(d.Seconds()) },
}}
