package lease_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nixlgo/nixlgo/lease"
)

// A lease from its first scheduling to its end, on an engine of one rank.
func Example() {
	now := time.Unix(0, 0)
	owner, _ := lease.NewScheduler(lease.SchedulerConfig{
		Config: lease.DefaultConfig(), Engine: "P", Host: "localhost", Port: 5600, Blocks: 16, MaxSeqs: 4, Seed: 1,
	})
	cells := make([]int64, owner.Slots()) // registered memory, in earnest
	rank, _ := lease.NewTable(lease.TableConfig{Extension: owner.Config().Extension(), Slots: lease.NewSlots(cells)})
	step := func() lease.Outcome {
		plan := owner.BuildPlan(now)
		for _, a := range plan.Admit {
			_ = rank.Admit(now, a)
		}
		for _, g := range plan.Grant {
			_ = rank.Grant(now, g)
		}
		rank.Reap(now)
		return owner.OnResults(now, []lease.Result{{Rank: 0, Sent: rank.Ended(nil)}})
	}

	request := &lease.Params{DoRemoteDecode: true}
	blocks := [][]int{{5, 6, 7}}
	_ = owner.OnNewRequest(now, "cmpl-1", request)
	_ = owner.OnBlocksAllocated(now, "cmpl-1", request, blocks)
	step() // prefill runs, the nonce is in its slot
	params, delayed, _ := owner.RequestFinished(now, "cmpl-1", lease.StatusLengthCapped, blocks, 40)
	step() // the deadline starts
	fmt.Println("delayed:", delayed, "blocks:", params.RemoteBlockIDs, "nonce shows:", cells[params.Lease.Slot] == params.Lease.Nonce)

	now = now.Add(25 * time.Second)
	_ = rank.Notify(now, "D", []byte("HB:cmpl-1"))
	due, _ := rank.NextDeadline()
	fmt.Println("renewed for:", due.Sub(now))

	_ = rank.Notify(now, "D", lease.AppendReadComplete(nil, "cmpl-1", 1, params.Lease.Nonce))
	for _, f := range step().Free {
		fmt.Println("free:", f.Request, f.Blocks, f.Reason)
	}
	fmt.Println("slot:", cells[params.Lease.Slot])
	// Output:
	// delayed: true blocks: [[5 6 7]] nonce shows: true
	// renewed for: 20s
	// free: cmpl-1 [[5 6 7]] read
	// slot: 0
}

// The check of a pull whose lease lapsed while it was read.
func ExamplePulls() {
	pulls := lease.NewPulls()
	_ = pulls.Start(lease.Pull{
		Request: "chatcmpl-9", RemoteRequest: "cmpl-1", Lease: &lease.SlotRef{Slot: 3, Nonce: 8817}, Verify: true,
	}, []int{0})
	_ = pulls.BlocksRead("chatcmpl-9", 0, nil)
	for _, check := range pulls.NextChecks() {
		fmt.Println("read slots", check.Slots, "of rank", check.Rank)
		_ = pulls.Checked(check, []int64{0}, nil) // the owner has zeroed it
	}
	for _, f := range pulls.Finished(nil) {
		fmt.Println(f.Pull.Request, f.Cause, errors.Is(f.Err, lease.ErrLapsed))
	}
	// Output:
	// read slots [3] of rank 0
	// chatcmpl-9 lapsed true
}

// Integers come as doubles or strings from some routers.
func ExampleParams_UnmarshalJSON() {
	var p lease.Params
	err := json.Unmarshal([]byte(`{"do_remote_prefill": true, "remote_port": 5600.0, "remote_block_ids": [[5, 6]],
		"remote_lease_slot": 3, "remote_lease_nonce": "4503599627370497"}`), &p)
	fmt.Println(err, p.RemotePort, p.RemoteBlockIDs, *p.Lease)
	fmt.Println(json.Unmarshal([]byte(`{"remote_port": 5600.5}`), &p))
	// Output:
	// <nil> 5600 [[5 6]] {3 4503599627370497}
	// lease: read params: remote_port is 5600.5, want a whole number from 1 to 65535: invalid
}

// Heartbeats are split at a size cap.
func ExampleAppendHeartbeat() {
	targets := []lease.Target{{Request: "cmpl-1"}, {Request: "cmpl-2"}, {Request: "cmpl-3"}}
	var msg []byte
	var err error
	for len(targets) > 0 {
		if msg, targets, err = lease.AppendHeartbeat(msg[:0], targets, 16); err != nil {
			fmt.Println(err)
		}
		fmt.Printf("%s\n", msg)
	}
	// Output:
	// HB:cmpl-1,cmpl-2
	// HB:cmpl-3
}

func ExampleParseConfig() {
	c, _ := lease.ParseConfig([]byte(`{"kv_lease_duration": 60}`))
	fmt.Println(c.Duration, c.Interval(), c.Extension(), c.Verification)
	_, err := lease.ParseConfig([]byte(`{"kv_lease_durations": 60}`))
	fmt.Println(err)
	// Output:
	// 1m0s 10s 40s true
	// lease: parse config: unknown key "kv_lease_durations", do you mean "kv_lease_duration"?: invalid
}
