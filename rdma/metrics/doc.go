// Package metrics shows the counters of workers, schedulers and side channels as Prometheus series on the caller's Registerer.
//
// Counts are per rank for a worker and per engine for a scheduler, since the process started. No label holds a request,
// engine or host. Every series is there from the start, at zero. A lease that ran out, a lease that was found lapsed, a
// READ that failed and a peer that was lost are different series.
//
// Histograms are of what one rank did. Bytes by time, sum by sum, is the throughput of one READ as if none ran beside it,
// not that of the rank: rate(nixlgo_transfer_bytes_total[1m]) is.
//
// # Coming from vLLM
//
// Every series of vLLM's NixlConnector (0.32, 0.33) and the two of its scheduler about pinned requests:
//
//	vllm:nixl_xfer_time_seconds                    nixlgo_transfer_duration_seconds, same buckets: to the step that sees the end,
//	                                               where NIXL's telemetry, which is off here, has the end itself
//	vllm:nixl_post_time_seconds                    nixlgo_transfer_post_duration_seconds, same buckets
//	vllm:nixl_bytes_transferred                    nixlgo_transfer_size_bytes, same buckets
//	vllm:nixl_num_descriptors                      nixlgo_transfer_descriptors, same buckets; before NIXL joins neighbours
//	vllm:nixl_num_failed_transfers                 nixlgo_transfer_failures_total{op,cause} + nixlgo_handshake_failures_total{cause}
//	                                               + nixlgo_notification_failures_total{cause}, which vLLM adds up; what became
//	                                               of the requests is nixlgo_load_failures_total{cause}
//	vllm:nixl_num_failed_notifications             nixlgo_notification_failures_total
//	vllm:nixl_num_kv_expired_reqs                  nixlgo_lease_expired_total, on the owner; a reader that declines a
//	                                               turn-2 read in time is nixlgo_load_failures_total{cause="expired"}
//	vllm:nixl_num_notifications_after_expiry       nixlgo_lease_late_completions_total, per notification as there
//	vllm:num_kv_pinned_requests                    nixlgo_scheduler_requests{state="pinned"}
//	vllm:num_kv_pinned_tokens                      nixlgo_lease_pinned_tokens
//
// (Counters have the suffix _total when they are scraped there.) vLLM has none of: nixlgo_verify_total{result}, whether a
// read was proved to have been under its lease throughout; nixlgo_lease_margin_seconds, how close it came; and
// nixlgo_lease_hold_duration_seconds, how long blocks were kept.
//
// Some questions, in PromQL:
//
//	rate(nixlgo_lease_expired_total[5m]) > 0                    readers do not come, or not in time
//	rate(nixlgo_verify_total{result="lapsed"}[5m]) > 0          kv_lease_duration is too short for what readers do
//	histogram_quantile(.01, sum by (le) (rate(nixlgo_lease_margin_seconds_bucket[1h]))) < 2
//	                                                            it will be soon: 1 of 100 reads had less than 2 s left
//	rate(nixlgo_verify_total{result="unverifiable"}[5m]) > 0    a router drops the lease fields, or owners run out of slots
//	nixlgo_lease_oldest_age_seconds > 600                       somebody renews a lease and never reads it
//	nixlgo_lease_slots{state="free"} == 0                       new requests are admitted without a slot
//	sum by (cause) (rate(nixlgo_load_failures_total[5m]))       why KV loads fail
//	sum by (cause) (rate(nixlgo_handshake_failures_total[5m]))  why engines cannot be connected
package metrics
