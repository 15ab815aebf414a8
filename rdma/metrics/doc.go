// Package metrics shows the counters of workers, schedulers and side channels as Prometheus series on the caller's Registerer.
//
// Counts are per rank for a worker and per engine for a scheduler, since the process started. No label holds a request,
// engine or host. Every series is there from the start, at zero. A lease that ran out, a lease that was found lapsed, a
// READ that failed and a peer that was lost are different series.
//
// # Coming from vLLM
//
//	vllm:nixl_bytes_transferred (sum)              nixlgo_transfer_bytes_total
//	vllm:nixl_num_failed_transfers_total           nixlgo_load_failures_total{cause}: per request and by cause, where vLLM
//	                                               adds READs, handshakes and notifications up; handshakes are in
//	                                               nixlgo_handshake_failures_total, notifications in the next
//	vllm:nixl_num_failed_notifications_total       nixlgo_notification_failures_total
//	vllm:nixl_num_kv_expired_reqs_total            nixlgo_lease_expired_total, on the owner; a reader that declines a
//	                                               turn-2 read in time is nixlgo_load_failures_total{cause="expired"}
//	vllm:nixl_num_notifications_after_expiry_total nixlgo_lease_late_completions_total
//	vllm:num_kv_pinned_requests                    nixlgo_scheduler_requests{state="pinned"}
//	vllm:num_kv_pinned_tokens                      nixlgo_lease_pinned_tokens
//
// vLLM's histograms (vllm:nixl_xfer_time_seconds, vllm:nixl_post_time_seconds, vllm:nixl_num_descriptors) have no
// counterpart here. What it has none of: nixlgo_verify_total{result}, whether a read was proved to have been under its lease
// throughout.
//
// Some questions, in PromQL:
//
//	rate(nixlgo_lease_expired_total[5m]) > 0                    readers do not come, or not in time
//	rate(nixlgo_verify_total{result="lapsed"}[5m]) > 0          kv_lease_duration is too short for what readers do
//	rate(nixlgo_verify_total{result="unverifiable"}[5m]) > 0    a router drops the lease fields, or owners run out of slots
//	nixlgo_lease_oldest_age_seconds > 600                       somebody renews a lease and never reads it
//	nixlgo_lease_slots{state="free"} == 0                       new requests are admitted without a slot
//	sum by (cause) (rate(nixlgo_load_failures_total[5m]))       why KV loads fail
package metrics
