package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nixlgo/nixlgo/nixl"
	"github.com/nixlgo/nixlgo/nixl/diagnose"
)

// benchConfig is the command line of bench.
type benchConfig struct {
	listen, connect string
	timeout         time.Duration

	backend, devices          string
	opType                    string
	initiatorSeg, targetSeg   string
	startBlock, maxBlock      int
	startBatch, maxBatch      int
	iterations, warmup        int
	largeFactor               int
	threads, depth            int
	totalBuffer               int
	check, prepared, recreate bool
	leaseIterations           int
	lease                     time.Duration
	seed                      uint64
	workload                  workload
	format                    format
	report                    string
	library                   string
}

func newBench() *cobra.Command {
	var c benchConfig
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure NIXL transfers and leased, verified reads between two processes or machines",
		Long: "bench measures transfers between an initiator and a target, with nixlbench's flags, columns and precision, and beside\n" +
			"them what a leased, verified read costs. Without --listen and --connect it starts the target here, as a process of its\n" +
			"own. Between two machines, run `nixlgo bench --listen` on one and the measurement with --connect on the other.\n\n" +
			"Columns of nixlbench:\n" +
			"  B/W        bytes of all transfers ÷ their time, GB = 10^9 bytes\n" +
			"  Avg Lat.   that time ÷ transfers of a thread ÷ batch: of one block, not of a transfer\n" +
			"  Prep       making the request: once for each thread, or each time with --recreate-xfer\n" +
			"  Post       the post call alone\n" +
			"  Tx         from the end of the post until a poll finds the transfer done\n" +
			"Columns of nixlgo:\n" +
			"  Xfer       Post and Tx together, from the begin of the post until a poll finds the transfer done\n" +
			"and of the same batch published, read and verified through nixlgo.Node, one request after the other, with the reader's\n" +
			"blocks in random order:\n" +
			"  Fetch      from the call of Fetch to its verdict\n" +
			"  Verify     the check of the lease: time (p50), and share of the fetch\n" +
			"  Margin     the least time that a lease had left when the owner heard that it was read\n\n" +
			"P99 is the sample that 99 % of the others lie below; of 100 samples or less, it is the longest one.",
		Example: "  nixlgo bench --max-block-size 1048576\n" +
			"  nixlgo bench --model llama-3.1-8b --isl 2048 --op-type READ --report bench.html\n" +
			"  nixlgo bench --listen 10.0.0.2:18515                      # one machine\n" +
			"  nixlgo bench --connect 10.0.0.2:18515 --op-type READ      # the other\n" +
			"  nixlgo bench --backend UCX --op_type READ --start_batch_size 8 --max_batch_size 8   # as for nixlbench",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.complete(cmd.Flags()); err != nil {
				return usageError{err}
			}
			if _, err := nixl.Load(c.library); err != nil {
				return err
			}
			if c.listen != "" {
				errs := cmd.ErrOrStderr()
				return listenForBench(cmd.Context(), c.listen, c.timeout,
					func(at net.Addr) { fmt.Fprintf(errs, "waiting at %s for nixlgo bench --connect\n", at) }, func(err error) { fmt.Fprintln(errs, err) })
			}
			if err := useDevices(c.devices); err != nil {
				return err
			}
			err := c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
			if err != nil && cmd.Context().Err() != nil { // the signal ended the target, and what failed then says only that
				return context.Cause(cmd.Context())
			}
			return err
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.listen, "listen", "", "be the target, at this HOST:PORT of a private network, for one initiator")
	f.StringVar(&c.connect, "connect", "", "measure with the target that listens at this HOST:PORT")
	f.DurationVar(&c.timeout, "timeout", time.Minute, "longest wait for the other side, each time")
	c.workload.flags(f)
	f.StringVar(&c.backend, "backend", "UCX", "NIXL plugin, of those that move memory")
	f.StringVar(&c.devices, "device-list", "all", "network devices, such as eth0 or mlx5_0, by comma")
	f.StringVar(&c.opType, "op-type", "WRITE", "READ or WRITE")
	f.StringVar(&c.initiatorSeg, "initiator-seg-type", "DRAM", "memory of the initiator: DRAM")
	f.StringVar(&c.targetSeg, "target-seg-type", "DRAM", "memory of the target: DRAM")
	f.IntVar(&c.startBlock, "start-block-size", 4<<10, "smallest block, bytes; doubled until --max-block-size")
	f.IntVar(&c.maxBlock, "max-block-size", 64<<20, "largest block, bytes")
	f.IntVar(&c.startBatch, "start-batch-size", 1, "fewest blocks of a transfer; doubled until --max-batch-size")
	f.IntVar(&c.maxBatch, "max-batch-size", 1, "most blocks of a transfer")
	f.IntVar(&c.iterations, "num-iter", 1000, "transfers of each row; 20 with a model")
	f.IntVar(&c.warmup, "warmup-iter", 100, "transfers before them that do not count; 2 with a model")
	f.IntVar(&c.largeFactor, "large-blk-iter-ftr", 16, "so many times fewer with blocks above 1 MiB")
	f.IntVar(&c.threads, "num-threads", 1, "threads that transfer at the same time, and share the transfers")
	f.IntVar(&c.depth, "pipeline-depth", 1, "transfers of a thread in flight; they share the batch")
	f.IntVar(&c.totalBuffer, "total-buffer-size", 8<<30, "most bytes of the buffer of each side; only what is used is taken, and again for leased reads")
	f.BoolVar(&c.check, "check-consistency", false, "check every byte after the last transfer of a row, and after each leased read")
	f.BoolVar(&c.prepared, "prepared-xfer", false, "make requests of prepared lists, whose neighbouring blocks NIXL joins")
	f.BoolVar(&c.recreate, "recreate-xfer", false, "make a new request for each transfer")
	f.IntVar(&c.leaseIterations, "lease-iter", 100, "leased reads of each row, 20 with a model; 0: none, and no columns of them")
	f.DurationVar(&c.lease, "lease", 30*time.Second, "lease duration")
	f.Uint64Var(&c.seed, "seed", 1, "of the order of blocks in leased reads")
	libraryFlag(f, &c.library)
	formatFlags(f, &c.format, true)
	f.StringVar(&c.report, "report", "", "HTML file for a report with charts; it needs no network")
	for name, why := range unservedFlags {
		f.String(name, "", why)
		f.Lookup(name).Hidden = true
	}
	for _, name := range []string{"enable-pt", "reregister-mem"} { // which are switches
		f.Lookup(name).NoOptDefVal = "true"
	}
	return cmd
}

// ucxDevices is UCX_NET_DEVICES for a device list, which the machine has to have.
func ucxDevices(list string) (string, error) {
	if list == "all" {
		return "", nil
	}
	devices, wrong := diagnose.ThisHost().NetDevices(list)
	if wrong != "" {
		return "", fmt.Errorf("--device-list %s: %s", list, wrong)
	}
	return devices, nil
}

// useDevices has this process use the devices of a list. It sets UCX's variable: the parameter that NIXL has for it puts a port
// behind the last name, which only devices of RDMA have.
func useDevices(list string) error {
	devices, err := ucxDevices(list)
	if err != nil || devices == "" {
		return err
	}
	return os.Setenv("UCX_NET_DEVICES", devices)
}

// unservedFlags are nixlbench's that change what is measured, and mean nothing here. Others are unknown.
var unservedFlags = map[string]string{
	"etcd-endpoints":    "the two sides find each other by --listen and --connect, without etcd",
	"runtime-type":      "the two sides find each other by --listen and --connect",
	"asio-address":      "use --listen and --connect",
	"asio-port":         "use --listen and --connect",
	"scheme":            "only pairs of one initiator and one target are measured",
	"mode":              "only pairs of one initiator and one target are measured",
	"num-initiator-dev": "one device of each side is measured; use --device-list to choose it",
	"num-target-dev":    "one device of each side is measured; use --device-list to choose it",
	"worker-type":       "only NIXL is measured",
	"enable-pt":         "NIXL's progress thread is always on in this binding",
	"reregister-mem":    "memory is registered once",
	"filepath":          "storage is not measured, use nixlbench for that",
	"config-file":       "there is no file of flags",
}

// modelIterations are the defaults with --model, whose transfers can be gigabytes.
var modelIterations = map[string]int{"num-iter": 20, "warmup-iter": 2, "lease-iter": 20}

var storageBackends = []string{"GDS", "GDS_MT", "POSIX", "HF3FS", "OBJ", "GUSLI", "AZURE_BLOB", "INFINIA"}

// complete refuses what cannot be measured and works out what one flag says of another.
func (c *benchConfig) complete(f *pflag.FlagSet) error {
	for name, why := range unservedFlags {
		if f.Changed(name) {
			if name == "enable-pt" && f.Lookup(name).Value.String() == "true" {
				continue
			}
			return fmt.Errorf("--%s: %s; leave it out", name, why)
		}
	}
	if c.listen != "" && c.connect != "" {
		return errors.New("--listen and --connect contradict each other: one side each")
	}
	if c.timeout < 100*time.Millisecond {
		return fmt.Errorf("--timeout %s is less than 100ms", c.timeout)
	}
	if c.connect != "" {
		if err := checkConnect(c.connect); err != nil {
			return fmt.Errorf("--connect: %w", err)
		}
	}
	if c.listen != "" {
		if err := checkListen(c.listen); err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
		var stray []string
		f.Visit(func(g *pflag.Flag) {
			if !slices.Contains([]string{"listen", "timeout", "library"}, g.Name) {
				stray = append(stray, "--"+g.Name)
			}
		})
		if stray != nil {
			return fmt.Errorf("%s with --listen: what is measured is said on the side that connects", strings.Join(stray, " "))
		}
		return nil
	}
	c.opType = strings.ToUpper(c.opType)
	switch {
	case c.opType != "READ" && c.opType != "WRITE":
		return fmt.Errorf("--op-type %q: want READ or WRITE", c.opType)
	case slices.Contains(storageBackends, strings.ToUpper(c.backend)):
		return fmt.Errorf("--backend %s: storage is not measured, use nixlbench for that", c.backend)
	case c.devices == "":
		return errors.New("--device-list is empty; leave it out for all devices")
	case c.devices != "all" && c.backend != "UCX":
		return fmt.Errorf("--device-list is of UCX alone: leave it out with --backend %s", c.backend)
	}
	if _, err := ucxDevices(c.devices); err != nil {
		return err
	}
	for _, s := range []struct{ flag, value string }{{"initiator-seg-type", c.initiatorSeg}, {"target-seg-type", c.targetSeg}} {
		if strings.ToUpper(s.value) != "DRAM" {
			return fmt.Errorf("--%s %s: only DRAM is measured", s.flag, s.value)
		}
	}
	if c.workload.model != "" || c.workload.file != "" {
		for _, name := range []string{"start-block-size", "max-block-size", "start-batch-size", "max-batch-size"} {
			if f.Changed(name) {
				return fmt.Errorf("--%s contradicts --model and --model-file, which say the sizes", name)
			}
		}
		s, err := c.workload.shape()
		if err != nil {
			return err
		}
		c.startBlock, c.maxBlock, c.startBatch, c.maxBatch = s.BlockBytes, s.BlockBytes, s.Batch, s.Batch
		for name, p := range map[string]*int{"num-iter": &c.iterations, "warmup-iter": &c.warmup, "lease-iter": &c.leaseIterations} {
			if !f.Changed(name) {
				*p = modelIterations[name]
			}
		}
	} else {
		for _, name := range workloadFlags {
			if f.Changed(name) {
				return fmt.Errorf("--%s says nothing without --model or --model-file", name)
			}
		}
	}
	return c.validate()
}

func (c *benchConfig) validate() error {
	const most = 1 << 40
	if err := checkBounds(bound{"start-block-size", c.startBlock, 1, most}, bound{"max-block-size", c.maxBlock, c.startBlock, most},
		bound{"start-batch-size", c.startBatch, 1, 1 << 24}, bound{"max-batch-size", c.maxBatch, c.startBatch, 1 << 24},
		bound{"num-iter", c.iterations, 1, 1 << 30}, bound{"warmup-iter", c.warmup, 0, 1 << 30}, bound{"lease-iter", c.leaseIterations, 0, 1 << 20},
		bound{"large-blk-iter-ftr", c.largeFactor, 1, 1 << 20}, bound{"num-threads", c.threads, 1, 1024}, bound{"pipeline-depth", c.depth, 1, 1 << 16},
		bound{"total-buffer-size", c.totalBuffer, 1, most}); err != nil {
		return err
	}
	if c.maxBatch > most/c.maxBlock || c.maxBatch*c.maxBlock > c.totalBuffer/c.threads {
		return fmt.Errorf("--num-threads %d × batches of %d × blocks of %d bytes need more than --total-buffer-size %d (%s)",
			c.threads, c.maxBatch, c.maxBlock, c.totalBuffer, byteSize(int64(c.totalBuffer)))
	}
	if c.startBatch%c.depth != 0 {
		return fmt.Errorf("--pipeline-depth %d does not divide batches of %s (--start-batch-size)", c.depth, many(c.startBatch, "block"))
	}
	if c.lease < 100*time.Millisecond || c.lease > time.Hour {
		return fmt.Errorf("--lease %s is not in 100ms…1h", c.lease)
	}
	return nil
}
