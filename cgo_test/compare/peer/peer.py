"""The Python side of the comparison: see peer.c for the commands. `build` takes a last word: numpy or tuples."""
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


def descriptors(memory, blocks, size, form):
    base = memory.ctypes.data
    if form == "tuples":
        return [(base + b * size, size, 0) for b in blocks]
    d = np.zeros((len(blocks), 3), dtype=np.uint64)
    d[:, 0] = base + np.asarray(blocks, dtype=np.uint64) * size
    d[:, 1] = size
    return d


def numbers(count, size):
    return [i % (REGION // size) for i in range(count)]


def shuffled(count):
    return (np.arange(count, dtype=np.int64) * 7919 % count).astype(np.int32)


def prepare(ours, theirs):
    return reader.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"), reader.prep_xfer_dlist("owner", theirs, "DRAM")


def release(pair):
    for handle in pair:
        reader.release_dlist_handle(handle)


def complete(handle, state):
    while state == "PROC":
        state = reader.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(state)


def lists(count, size, rounds):
    best = [1 << 62] * 2
    blocks, indices = numbers(count, size), shuffled(count)
    ours, theirs = descriptors(target, blocks, size, "numpy"), descriptors(source, blocks, size, "numpy")
    for _ in range(rounds):
        t0 = now()
        pair = prepare(ours, theirs)
        t1 = now()
        x = reader.make_prepped_xfer("READ", pair[0], indices, pair[1], indices)
        t2 = now()
        reader.release_xfer_handle(x)
        release(pair)
        best = [min(b, t) for b, t in zip(best, (t1 - t0, t2 - t1))]
    return best


def cycle(count, size, rounds):
    best = [1 << 62] * 3
    blocks, indices = numbers(count, size), shuffled(count)
    ours, theirs = descriptors(target, blocks, size, "numpy"), descriptors(source, blocks, size, "numpy")
    for _ in range(rounds):
        pair = prepare(ours, theirs)
        x = reader.make_prepped_xfer("READ", pair[0], indices, pair[1], indices)
        t0 = now()
        state = reader.transfer(x)
        t1 = now()
        complete(x, state)
        t2 = now()
        reader.release_xfer_handle(x)
        release(pair)
        t3 = now()
        best = [min(b, t) for b, t in zip(best, (t1 - t0, t2 - t1, t3 - t2))]
    return best


def batch(size):
    """How many short READs are timed at once: reading the clock takes long beside one."""
    return max(1, 65536 // size)


def start(count, size, rounds):
    best, n = 1 << 62, batch(count * size)
    blocks, indices = numbers(count, size), shuffled(count)
    pair = prepare(descriptors(target, blocks, size, "numpy"), descriptors(source, blocks, size, "numpy"))
    for _ in range(rounds):
        xs = []
        t = now()
        for _ in range(n):
            x = reader.make_prepped_xfer("READ", pair[0], indices, pair[1], indices)
            complete(x, reader.transfer(x))
            xs.append(x)
        best = min(best, now() - t)
        for x in xs:
            reader.release_xfer_handle(x)
    release(pair)
    return [best / n]


def build(count, size, rounds, form):
    best, blocks = [1 << 62] * 2, numbers(count, size)
    if form == "numpy":
        blocks = np.array(blocks, dtype=np.uint64)
    for _ in range(rounds):
        t0 = now()
        ours, theirs = descriptors(target, blocks, size, form), descriptors(source, blocks, size, form)
        t1 = now()
        pair = prepare(ours, theirs)
        t2 = now()
        best = [min(b, t) for b, t in zip(best, (t2 - t0, t2 - t1))]
        release(pair)
    return best


def repost(size, rounds):
    one, best, n = np.zeros(1, dtype=np.int32), 1 << 62, batch(size)
    pair = prepare(descriptors(target, [0], size, "numpy"), descriptors(source, [0], size, "numpy"))
    x = reader.make_prepped_xfer("READ", pair[0], one, pair[1], one)
    for _ in range(rounds):
        t = now()
        for _ in range(n):
            complete(x, reader.transfer(x))
        best = min(best, now() - t)
    reader.release_xfer_handle(x)
    release(pair)
    return [best / n]


def drain():
    return sum(len(messages) for messages in owner.get_new_notifs().values())


def send(message, count):
    for _ in range(count):
        reader.send_notif("owner", message)


def collect(count):
    got = 0
    while got < count:
        got += drain()


def drain_once(count):
    """Only the drain can tell that all have arrived: if not, it is tried again with a longer wait."""
    wait = 0.02
    while wait < 5:
        send(b"m" * 64, count)
        time.sleep(wait)
        t = now()
        got = drain()
        took = now() - t
        if got == count:
            return took
        collect(count - got)
        wait *= 2
    raise RuntimeError(f"{count} messages did not arrive")


def batches(rounds, call):
    best = 1 << 62
    for _ in range(rounds):
        t = now()
        for _ in range(100):
            call()
        best = min(best, now() - t)
    return best / 100


def answer(what, a, b=0, rounds=0, form="numpy"):
    match what:
        case "lists":
            return lists(a, b, rounds)
        case "cycle":
            return cycle(a, b, rounds)
        case "start":
            return start(a, b, rounds)
        case "build":
            return build(a, b, rounds, form)
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
            return [drain_once(a)]
        case "empty":
            return [batches(a, drain)]
        case "nothing":
            return [0]  # Python has no such call
    raise ValueError(what)


os.sched_setaffinity(0, {int(sys.argv[1])})  # this thread; the library's run where they like
print("ready", file=out)
for line in sys.stdin:
    what, *args = line.split()
    print(*answer(what, *(int(w) if w.isdigit() else w for w in args)), file=out)
os._exit(0)  # libnl's exit handlers crash after a NIXL agent
