"""The Python side of the comparison: see peer.c for the commands. `cycle` takes a last word: numpy or tuples."""
import os
import sys
import time

out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # the library prints there

import numpy as np  # noqa: E402
from nixl_cu12 import _bindings as bind  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402

REGION = 64 << 20
now = time.perf_counter_ns


class Config(bind.nixlAgentConfig):
    """The progress thread sleeps as long as in the other programs; the Python API has no setting for that."""

    def __setattr__(self, name, value):
        if name == "pthrDelay":
            value = 1000
        elif name == "syncMode":
            value = bind.NIXL_THREAD_SYNC_RW if hasattr(bind, "NIXL_THREAD_SYNC_RW") else value
        super().__setattr__(name, value)


bind.nixlAgentConfig = Config


def new_agent(name):
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})  # shared memory has no other
    memory = np.ones(REGION, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, REGION, 0, "")], "DRAM")
    return agent, memory


owner, source = new_agent("owner")
reader, target = new_agent("reader")
reader.add_remote_agent(owner.get_agent_metadata())
owner.add_remote_agent(reader.get_agent_metadata())


def descriptors(memory, count, size, form):
    base, slots = memory.ctypes.data, REGION // size
    if form == "tuples":
        return [(base + i % slots * size, size, 0) for i in range(count)]
    d = np.zeros((count, 3), dtype=np.uint64)
    d[:, 0] = base + np.arange(count, dtype=np.uint64) % slots * size
    d[:, 1] = size
    return d


def complete(handle, state):
    while state == "PROC":
        state = reader.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(state)


def cycle(count, size, rounds, move, form):
    best = [1 << 62] * 5
    ours, theirs = descriptors(target, count, size, form), descriptors(source, count, size, form)
    indices = (np.arange(count, dtype=np.int64) * 7919 % count).astype(np.int32)
    for _ in range(rounds):
        t0 = now()
        local = reader.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
        remote = reader.prep_xfer_dlist("owner", theirs, "DRAM")
        t1 = now()
        x = reader.make_prepped_xfer("READ", local, indices, remote, indices)
        t2 = t3 = t4 = now()
        if move:
            state = reader.transfer(x)
            t3 = now()
            complete(x, state)
            t4 = now()
        reader.release_xfer_handle(x)
        reader.release_dlist_handle(local)
        reader.release_dlist_handle(remote)
        t5 = now()
        best = [min(b, t) for b, t in zip(best, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4))]
    return best


def repost(size, rounds):
    one = np.zeros(1, dtype=np.int32)
    local = reader.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(target, 1, size, ""), "DRAM")
    remote = reader.prep_xfer_dlist("owner", descriptors(source, 1, size, ""), "DRAM")
    x = reader.make_prepped_xfer("READ", local, one, remote, one)
    best = 1 << 62
    for _ in range(rounds):
        t = now()
        complete(x, reader.transfer(x))
        best = min(best, now() - t)
    reader.release_xfer_handle(x)
    reader.release_dlist_handle(local)
    reader.release_dlist_handle(remote)
    return [best]


def drain():
    return sum(len(messages) for messages in owner.get_new_notifs().values())


def send(message, count):
    for _ in range(count):
        reader.send_notif("owner", message)


def collect(count):
    got = 0
    while got < count:
        got += drain()


def answer(what, a, b=0, rounds=0, move=1, form="numpy"):
    match what:
        case "cycle":
            return cycle(a, b, rounds, move, form)
        case "repost":
            return repost(a, b)
        case "notify":
            message, t = b"m" * a, now()
            send(message, b)
            collect(b)
            return [(now() - t) / b]
        case "latency":
            message, best = b"m" * a, 1 << 62
            for _ in range(b):
                t = now()
                send(message, 1)
                collect(1)
                best = min(best, now() - t)
            return [best]
        case "drain":
            send(b"m" * 64, a)
            time.sleep(0.5)  # all have arrived; the count is checked below
            t = now()
            got = drain()
            took = now() - t
            if got != a:
                raise RuntimeError(f"{got} of {a} messages had arrived")
            return [took]
        case "empty":
            t = now()
            for _ in range(a):
                drain()
            return [(now() - t) / a]
    raise ValueError(what)


print("ready", file=out)
for line in sys.stdin:
    what, *args = line.split()
    print(*answer(what, *(int(w) if w.isdigit() else w for w in args)), file=out)
os._exit(0)  # libnl's exit handlers crash after a NIXL agent
