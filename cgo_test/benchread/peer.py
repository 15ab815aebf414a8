"""One process of the peer that benchread compares with: NIXL's own Python package, used as vLLM 0.32's NixlConnector uses it.

usage: python3 peer.py owner|reader LAYERS BLOCKS BLOCK_BYTES

JSON lines: one command on stdin, one answer on stdout. A reader learns its owner with "connect"; "read" answers how many
seconds passed from the block ids to the end of the READ.
"""
import ctypes
import json
import mmap
import os
import sys
import time
import uuid

# NIXL logs on standard output, which carries the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # vLLM sets it before it imports NIXL

import numpy as np  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402

DEADLINE = 30  # seconds, for one READ or one notification


class Peer:
    def __init__(self, layers, blocks, size):
        self.layers, self.blocks, self.size = layers, blocks, size
        self.map = mmap.mmap(-1, layers * blocks * size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.words = np.frombuffer(self.map, np.uint64).reshape(layers, blocks, size // 8)
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(num_threads=4, capture_telemetry=True))
        registered = self.agent.get_reg_descs([(self.base, len(self.map), 0, "")], "DRAM")
        self.agent.register_memory(registered, backends=["UCX"])

    def prepare(self, agent, base):
        """Every block of every layer, layer-major: a block's index is layer * blocks + block."""
        blocks = [(base + i * self.size, self.size, 0) for i in range(self.layers * self.blocks)]
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(blocks, "DRAM"))

    def fill(self, command):
        block = np.arange(1, 1 + self.blocks, dtype=np.uint64)
        layer = np.arange(self.layers, dtype=np.uint64) << np.uint64(32)
        self.words[:] = (layer[:, None] + block)[:, :, None]
        return {"metadata": self.agent.get_agent_metadata().hex(), "base": self.base}

    def connect(self, command):
        self.local = self.prepare("NIXL_INIT_AGENT", self.base)
        self.owner = self.agent.add_remote_agent(bytes.fromhex(command["metadata"]))
        self.remote = self.prepare(self.owner, command["base"])
        return {}

    def indices(self, blocks):
        return (np.arange(self.layers)[:, None] * self.blocks + np.asarray(blocks)[None, :]).ravel().astype(np.int32)

    def read(self, command):
        local, remote = command["local"], command["remote"]
        self.words[:, local] = 0
        agent, end = self.agent, time.monotonic() + DEADLINE
        start = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self.local, self.indices(local), self.remote, self.indices(remote), notif_msg=b"request:1")
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < end:
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        if state != "DONE":
            raise RuntimeError(f"the READ is in state {state}")
        agent.release_xfer_handle(handle)
        layer = np.arange(self.layers, dtype=np.uint64) << np.uint64(32)
        want = layer[:, None] + np.asarray(remote, dtype=np.uint64) + np.uint64(1)
        if not (self.words[:, local] == want[:, :, None]).all():
            raise RuntimeError("the READ brought other bytes than the owner's")
        return {"seconds": took}

    def complete(self, command):
        """Waits for the notification of a READ."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if any(b"request:1" in messages for messages in self.agent.get_new_notifs().values()):
                return {}
            time.sleep(0.0002)
        raise RuntimeError("no notification of the READ")


def main():
    peer = Peer(*map(int, sys.argv[2:5]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(peer, command["cmd"])(command)
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # a process that holds UCX crashes in C's exit handlers


main()
