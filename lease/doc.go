// Package lease holds KV-cache blocks under renewable leases, and lets a reader
// prove after an RDMA READ that the lease was held for the whole time.
//
// It decides and does nothing else: no I/O, no clock, no goroutine. Time comes in
// with every call, decisions go out as plain values. Package rdma carries them
// out over NIXL.
//
// # The parts
//
// An engine is one model instance with one rank per GPU. It may own blocks that
// others read, read blocks that others own, or both.
//
//	Scheduler  one per engine: slots, nonces, params, heartbeats, who is freed when
//	Table      one per rank, the owner's side: lives, deadlines, notifications
//	Slots      the registered memory in which a rank shows its nonces
//	Pulls      one per rank, the reader's side: block READs, checks, their outcome
//	Plan       what a step has to do on every rank; Result, what a rank reports back
//
// A step of an engine:
//
//	plan := scheduler.BuildPlan(now)
//	on every rank: admit, grant, abort; cancel, read; heartbeat, release
//	on every rank: notifications, then ended READs, then checks, then Reap
//	outcome := scheduler.OnResults(now, results of all ranks)
//	the engine frees, runs and fails what the outcome says
//
// # A lease, on one rank
//
//	                 Admit                 Grant
//	(no life) ────────────────▶ admitted ────────────────▶ granted ◀─┐ heartbeat:
//	             slot = nonce      │                          │  └────┘ deadline =
//	             no deadline       │ Abort, or a              │          max(old, now + extension)
//	                               │ read-complete            │ read-complete of every reader,
//	                               │ with the nonce           │ Reap after the deadline, or Abort
//	                               ▼                          ▼
//	                        slot = 0, then Ended{read | expired | aborted}; never again
//
// The Scheduler lends slot and nonce when a request is first scheduled, and
// builds the params when it finishes, so a nonce in a slot means that the blocks
// are held and its presence in params means that they are written. It frees the
// blocks when the last rank reported, and lends the slot again only then.
//
// A reader reads the blocks, and after the last of them the slot, on every rank
// that it read. Slots are zeroed before blocks are freed, so if each slot still
// holds exactly the nonce, the blocks were held for the whole READ. If not, the
// load fails with [ErrLapsed]; if it cannot tell, with [ErrUnverifiable]. No clock
// is compared.
//
// # Where the specification is silent
//
// What loses no block, stops no healthy pair and believes no stale message:
//
//   - A peer is an engine at an address ([Peer]). A request with an old or wrong
//     address fails alone; the lease is renewed at the address that its params
//     name, and released there, or where another request has read it.
//   - Requests of one engine that share a lease are counted. The owner is told
//     when the last of them has ended and no other has come before the next
//     plan, so no rank tells it by itself. A lease is known by its nonce, at
//     whatever address; without one also by the address.
//   - After a lapse nothing is sent: the lease is over, and its id may name
//     another request. A load that failed otherwise leaves the lease to another
//     reader, and to its deadline, unless the engine prefills the request itself
//     ([Recompute]) or its caller has given it up ([StatusAborted]).
//   - A read-complete without a nonce counts for the one life of its id that was
//     granted. Before that nobody can have read, so it is of an earlier life, and
//     dropped. Once the next life is granted the wire cannot tell: a reader that
//     shows no nonce (vLLM up to 0.33), and reports an expired lease late, ends
//     the next lease of the same id if one runs. Its reader finds that out by its
//     check; one that does not verify does not. Owners without ids that come
//     again, as vLLM's are, cannot meet it.
//   - A rank that refuses an admission, or a whole plan ([ErrPlan]), reports what
//     is in it as over. A rank that was started anew has ended all that its
//     predecessor held. A request that lost its lease before it finished gets no
//     params.
//   - A clock is worth its age: an owner's is asked for again every ten minutes,
//     and its error grows by 200 ppm meanwhile, 100 for either side.
//
// # What the specification says, and which test shows it
//
// Lease lifecycle:
//
//	P pins the KV blocks with an initial lease duration     TestAnOwnerLendsASlotInTheStepThatSchedulesAndExportsAtFinish
//	D completes the transfer, P frees immediately           TestAReadCompleteEndsTheLeaseAtOnce
//	each heartbeat extends by lease_duration * 2/3          TestAHeartbeatExtendsButNeverShortens
//	no heartbeat, the lease expires, P reclaims             TestAnUnreadLeaseExpires
//	kv_lease_duration, derived interval and extension       TestIntervalAndExtensionAreDerivedFromTheDuration
//	the defaults of the configuration                       TestDefaultsAreThoseOfTheSpecification
//	max(old_expiry, now + lease_extension)                  TestAHeartbeatExtendsButNeverShortens
//	one message renews all requests pinned for D            TestHeartbeatsAreSplitAtTheCap
//
// Scheduler-side tracking:
//
//	heartbeats start when a request enters D's scheduler    TestHeartbeatsStartWhenARequestIsQueued
//	requests are grouped by remote_engine_id                TestHeartbeatsStartWhenARequestIsQueued
//	throttled by the interval                               TestHeartbeatsAreThrottledPerPeer
//	stops when the load completes or the request ends       TestHeartbeatsStopWithTheLoadOrTheRequest
//	deferred until the handshake completes                  TestHeartbeatsAreDeferredUntilTheHandshakeCompletes
//	messages starting with "HB:"                            TestMessagesHaveTheirExactBytes
//	heartbeats after a long forward pass still count        TestOnlyWhatWasNotReapedCanBeRenewed
//	several Ds refresh one lease with no downside           TestModelOfATableAgreesWithIt
//
// Bidirectional transfer:
//
//	decoder_kv_blocks_ttl is a fixed timeout                TestAFixedLeaseIsNotRenewed
//	D caches blocks that P can pull on the next turn        TestADecoderKeepsItsBlocksForTheNextTurn
//	D communicates back the expiry time                     TestADecoderKeepsItsBlocksForTheNextTurn
//	P estimates the clock offset from the round trip        TestTheClockOffsetKeepsTheSampleWithTheSmallestError
//	and knows when blocks are expired, and recomputes       TestAReadbackIsDeclinedNearItsDeadline
//	the heartbeat mechanism does not apply here             TestAReadbackIsVerifiedAndPublishedAgain
//
// Lease verification, owner:
//
//	slot and nonce at first scheduling, same step           TestAnOwnerLendsASlotInTheStepThatSchedulesAndExportsAtFinish
//	exported as remote_lease_slot and remote_lease_nonce    TestParamsAreWrittenAsVLLMWritesThem
//	zeroed before it is reported, read or expired           TestASlotIsZeroBeforeItsLifeIsReported
//	a slot is reused only after the blocks were freed       TestBlocksAndSlotComeBackWhenTheLastRankReported
//	nonces are unique                                       TestNoncesAreUnpredictableAndNeverRepeat
//	kv_lease_slots defaults to KV blocks + max_num_seqs     TestThereAreAsManySlotsAsBlocksAndSequences
//	a request without a free slot gets no lease             TestARequestWithoutASlotIsPinnedWithoutLeaseFields
//	P ignores notifications for an earlier request          TestEventsOfAnOldLifeDoNotTouchTheNewOne
//	                                                        TestALateReadCompleteDoesNotEndTheNextLifeOfItsId
//
// Lease verification, reader:
//
//	the check comes after all block READs, on every rank    TestAPullIsCheckedOnEveryRankAfterAllItsBlocks
//	checks of one step share one READ per remote rank       TestChecksOfOneStepShareAReadAndLaterOnesDoNotJoin
//	only if every slot still holds the nonce                TestAnyOtherValueThanTheNonceIsALapse
//	else the load fails and kv_load_failure_policy applies  TestAFailedLoadIsReportedOnceWithItsCause
//	missing lease fields fail the load                      TestMissingLeaseFieldsFailTheLoadBeforeAnyRead
//	a failed slot READ fails the load                       TestWhatCannotBeVerifiedFails
//	false pulls without verification                        TestWithoutVerificationThePullIsDoneWithItsBlocks
//	D sends the notification, which carries the nonce       TestMessagesHaveTheirExactBytes
//	a matching nonce proves that P held the blocks          TestModelKeepsItsPropertiesInAnyOrder
//
// The protocol is also a model for SPIN, in lease/spec, whose files say what is
// in it: go run ./lease/spec.
//
// # What can be seen of it
//
// Stats of a Table and of a Scheduler count everything that happened; package
// rdma/metrics makes series of them. For spans and histograms, [TableTrace] and
// [SchedulerTrace] are called for each lease and each fetch.
package lease
