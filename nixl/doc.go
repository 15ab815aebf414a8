// Package nixl binds the C API of NIXL (nixl_capi), which moves memory between
// processes by one-sided READs and WRITEs over UCX and other transports. It is
// thin: one method for each concept of the C API, named in the method's
// comment. What it adds is that no call can crash the process: arguments,
// lifetimes and states that the C library trusts are checked here. Values come
// from their constructors: a nil or zero one panics, as any nil in Go does, and
// recover works: no lock stays held.
//
// The library is loaded at run time (see [Load]); building needs no NIXL.
//
// # From an agent to a READ
//
// The owner of some memory creates an [Agent] with a backend, allocates a
// [Buffer], registers it, and sends its metadata to the reader by a channel of
// its own:
//
//	owner, err := nixl.NewAgent("", nixl.Config{})
//	_, err = owner.CreateBackend("UCX", nil)
//	memory, err := nixl.AllocBuffer(1 << 20)
//	_, err = owner.Register(memory)
//	blob, err := owner.LocalMetadata()
//
// The reader does the same for the memory that it reads into, and loads what the
// owner sent. Then it prepares one [List] of the owner's memory and one of its
// own, once, and starts a [Transfer] for each READ by naming descriptors of both
// by index:
//
//	name, err := reader.LoadRemote(blob)
//	remote, err := reader.PrepareRemote(name, nixl.DRAM, theirs)
//	local, err := reader.PrepareLocal(nixl.DRAM, ours)
//	x, _, err := reader.Start(nixl.Read, local, []int32{7, 8}, remote, []int32{3, 4}, nixl.TransferOptions{})
//	err = x.Wait(ctx)
//
// Descriptors that are neighbours on both sides are joined into one, so blocks
// in order are much faster than blocks at random. [PollAll] polls any number of
// transfers in one call.
//
// Agents send each other short messages with [Agent.Notify] and
// [Agent.Notifications]; a transfer can carry one that arrives when it is done.
//
// # Who owns what
//
//	object         made by                     ends with                              until then
//	Agent          NewAgent                    Close, which ends all that follows
//	Backend        CreateBackend               its agent
//	Buffer         AllocBuffer                 Close; unmapped when no living agent   registered memory stays mapped
//	                                           ever registered it
//	FileRange      NewFileRange                Close; its file descriptor stays open  as a Buffer
//	                                           as long as a Buffer stays mapped
//	BlockRange,    NewBlockRange,              the collector; they only describe
//	ObjectRange    NewObjectRange
//	DeviceRange,   Device, Host                the caller frees the memory, after     peers can reach the memory
//	HostRange                                  the agents that registered it
//	MemoryView     ViewLocal, ViewRemote       Close; or its agent                    its registrations cannot be closed
//	Registration   Register                    Close, refused while lists or          peers can reach the memory,
//	                                           transfers refer to it; or its agent    over TCP even afterwards
//	List           PrepareLocal, PrepareRemote Close; or its agent                    its registrations cannot be closed
//	Transfer       Start, NewTransfer,         Close, refused until it is settled;    the local memory of a READ is the
//	               CreateTransfer              or its agent                           library's from its post until settled
//	Notification   Notifications               the collector; it is Go memory
//	metadata       LocalMetadata               the collector; it is Go memory
//
// A Close is safe to repeat. An agent, list or transfer that is collected
// without Close is a leak: Config.Logger is told, and nothing is freed.
//
// The bytes of a READ land in memory that the reader must not use for anything
// else until the transfer is settled ([Transfer.Settled]). Nothing stops a
// transfer once it is posted: not a deadline, not Close, not a dead peer, only
// the end of its agent. A negative status alone is no proof that writing ended.
//
// # Concurrency
//
// Everything may be called from any goroutine at any time, also beside Close.
// Calls on one agent exclude each other for the length of one crossing into C,
// so long lists are prepared and posted one after the other; agents are
// independent. Nobody holds a lock or a thread while waiting: [Transfer.Wait]
// sleeps between polls. Each agent that posted something has one goroutine,
// which polls what nobody else polls and ends with the agent.
//
// # Errors
//
// Errors are of type [*Error] and match the sentinels of this package with
// errors.Is. ErrInvalid means that the call was refused and nothing changed.
// ErrPeer means that a sound request failed: the peer or the way to it. The C
// library itself answers both with one status.
//
// # Functions of the C API that have no method of their own
//
// Each method names the C functions that it is made of. These are in none, since
// another call does their job (make api-coverage checks both):
//
//	nixl_capi_create_agent                  create_configured_agent: its defaults are unsafe with goroutines
//	nixl_capi_mem_list_is_empty             mem_list_size: the list is copied and freed in one crossing
//	nixl_capi_mem_type_to_string            MemType.String: the types are constants of the ABI
//	nixl_capi_opt_args_get_notif_msg        TransferOptions: reads back what this package set just before
//	nixl_capi_opt_args_get_custom_param     TransferOptions: as above
//	nixl_capi_opt_args_get_has_notif        TransferOptions: as above
//	nixl_capi_opt_args_get_skip_desc_merge  TransferOptions: as above
//	nixl_capi_xfer_dlist_get_type           []Desc: descriptors live in Go slices, and a C list only for one crossing
//	nixl_capi_xfer_dlist_desc_count         []Desc: len
//	nixl_capi_xfer_dlist_len                []Desc: len
//	nixl_capi_xfer_dlist_is_empty           []Desc: len
//	nixl_capi_xfer_dlist_trim               []Desc: slices.Clip
//	nixl_capi_xfer_dlist_rem_desc           []Desc: slices.Delete
//	nixl_capi_xfer_dlist_print              []Desc: Desc.String
//	nixl_capi_reg_dlist_get_type            Memory: one region is one registration, its list lives for one crossing
//	nixl_capi_reg_dlist_desc_count          Memory: as above
//	nixl_capi_reg_dlist_is_empty            Memory: as above
//	nixl_capi_reg_dlist_trim                Memory: as above
//	nixl_capi_reg_dlist_rem_desc            Memory: as above
//	nixl_capi_reg_dlist_clear               Memory: as above
//	nixl_capi_reg_dlist_resize              Memory: as above
//	nixl_capi_reg_dlist_print               Memory: as above
//
// A library that is older than a function answers errors.ErrUnsupported to the
// calls that need it, and the error names the function and the first release with it.
//
// # Files, block devices, objects and GPUs
//
// A [FileRange], [BlockRange] or [ObjectRange] that is registered is remote memory
// of the agent itself: a READ or WRITE names the agent's own name as the remote
// one. [Device] describes memory of a GPU.
//
// # Metadata that the library carries
//
// With Config.Listen, agents can also send each other metadata by themselves
// ([Agent.SendMetadata], [Agent.FetchRemote]), and with NIXL_ETCD_ENDPOINTS in the
// environment through etcd. What comes this way is not checked before the library
// parses it. A peer that was fetched is known only to the library: it is asked
// again for every list and every post.
//
// # Environment
//
// [Load] sets these variables before it opens the library, unless they are set;
// those of one transport only where UCX_TLS allows it:
//
//	UCX_DEBUG_SIGNO=0               UCX takes SIGHUP otherwise
//	UCX_LOG_FILE=stderr             UCX prints on standard output otherwise
//	UCX_TCP_USER_TIMEOUT=10s        silent packet loss becomes an error
//	UCX_TCP_CONN_NB=y               a host that does not answer holds up no other peer
//	UCX_TCP_TX_SEG_SIZE=64K         faster large READs over TCP
//	UCX_CMA_TX_QUOTA=16             faster READs of many blocks over shared memory
//	UCX_USE_MT_MUTEX=y              READs do not lose a core to a spin lock
//	UCX_RCACHE_MAX_UNRELEASED=1024  bounds UCX's registration cache
//	UCX_HANDLE_ERRORS=none          always, also over a user's value: with bt, a nil
//	                                dereference in Go would kill the process
//
// [EnvDefaults] gives the same table to programs. NIXL and UCX print their own
// diagnostics on standard error; NIXL_LOG_LEVEL and UCX_LOG_LEVEL set how many.
// The plugin GUSLI, for block devices, prints on standard output.
//
// # What calls cost
//
// A call of C takes 26 ns beside what the library does; around a READ, which
// leaves nothing of its caller in the processor's caches, about 0.2 µs. So what
// goes together crosses together: [Agent.Start] makes and posts, a list and its
// indices cross as they are, PollAll polls all, and a drain takes all messages.
// A Transfer is one allocation; to post it again, to poll, and to drain nothing
// is none. In cgo_test/compare all of it is measured beside C and NIXL's Python
// API, with what bounds it (make bench-binding).
//
// # Trust
//
// Whoever holds an agent's metadata can read and write its registered memory,
// and can crash its process. The names that notifications come from are what
// the sender says. Metadata and the transports belong on networks that are
// trusted.
//
// A library is code: [Load] opens a .nixl that it comes across, in the working
// directory for instance, only if it belongs to the effective user or root, as
// do the file in it and the directories between, and no group or other user may
// write to them. It says so in Library.Tried otherwise. What is named, by a path
// or in the environment, is opened as it is.
//
// # Damaged metadata
//
// [Agent.LoadRemote] parses metadata before the library does: natively a changed
// memory type, length or count crashes the process, and a blob that is cut makes
// the peer's name unusable. Of 100,000 blobs with bits, bytes, lengths and counts
// changed, cut, spliced, with fields doubled and left out, none does so here.
//
// What is inside UCX's addresses and keys is UCX's own. The version of the one and
// the memory type of the other are checked, at which UCX stops and crashes most.
// Damage elsewhere in them can still have two effects, with UCX 1.23: a crash, as
// UCX reads its address without looking at its end (1 in 1,000 such blobs; of
// 29,952 with one byte of address or key changed, 6), and a name that the agent
// can never load again, if UCX cannot unpack a key (9 in 1,000). Who sends
// metadata over a channel that may damage it sends a digest, too.
//
// # Readers that die over TCP
//
// Over TCP, UCX answers a READ from the owner's progress thread. When the reader
// dies in the middle of one, with answers still queued, the UCX of these wheels
// (1.23) touches memory of requests that never were set up, and the owner's
// process ends by SIGSEGV or SIGABRT: 7 of 81 readers killed in a READ of 32 MiB
// took it along. No setting avoids it; UCX_PROTO_ENABLE=n does, but NIXL's READs
// do not work with it. RDMA transports do not answer READs in software.
//
// # File descriptors
//
// When UCX's accept meets the limit of open files (EMFILE), it closes its TCP
// listener for good: no new peer reaches the agent, and it reaches none, until
// the process makes a new agent. Raise RLIMIT_NOFILE well above the number of
// peers; two descriptors each.
//
// # Leaving through libc
//
// The wheel's UCX crashes in a destructor that libc's exit runs. A Go program
// leaves by a system call and never notices, but two kinds of program do leave
// through libc: c-shared libraries in a C host, which should end with _exit, and
// test binaries built with -race, whose TestMain should end with
// syscall.Exit(m.Run()).
package nixl
