"""One NIXL agent of NIXL's own Python API with a registered buffer, driven by JSON lines over stdin and stdout.

Commands, one a line, answered by one line each ({"error": ...} when they fail); byte strings are hex:

  {"cmd": "load", "metadata": hex}                        → {"name": agent}
  {"cmd": "forget", "name": agent}
  {"cmd": "metadata"}                                     → {"metadata": hex}
  {"cmd": "register", "size": bytes}                      → {"addr": address}   one more buffer
  {"cmd": "fill", "seed": n}                              byte i becomes (i * 7 + i // 256 + n) mod 256
  {"cmd": "sha256"}                                       → {"sha256": hex} of the buffer
  {"cmd": "transfer", "op": "READ" or "WRITE", "remote": agent, "addr": address, "offset": here, "length": bytes, "notify": hex}
  {"cmd": "notify", "to": agent, "payload": hex}
  {"cmd": "notifications"}                                → {"notifications": {agent: [hex]}}   new ones
"""
import hashlib
import json
import os
import sys
import time

# stdout carries answers only; whatever the library prints goes to stderr.
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402

name, size = sys.argv[1], int(sys.argv[2])
agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
buffers = []


def register(size):
    buffer = np.zeros(size, dtype=np.uint8)
    buffers.append((buffer, agent.register_memory([(buffer.ctypes.data, size, 0, "")], "DRAM")))
    return buffer


def transfer(op, remote, addr, offset, length, notify):
    """Through a request of its own; the notification travels with it."""
    local = agent.get_xfer_descs([(memory.ctypes.data + offset, length, 0)], "DRAM")
    other = agent.get_xfer_descs([(addr, length, 0)], "DRAM")
    handle = agent.initialize_xfer(op, local, other, remote, notify)
    state = agent.transfer(handle)
    end = time.monotonic() + 30
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"{op} ended as {state}")
    agent.release_xfer_handle(handle)


def answer(m):
    global memory
    match m.pop("cmd"):
        case "load":
            loaded = agent.add_remote_agent(bytes.fromhex(m["metadata"]))
            return {"name": loaded.decode() if isinstance(loaded, bytes) else loaded}
        case "forget":
            agent.remove_remote_agent(m["name"])
        case "metadata":
            return {"metadata": agent.get_agent_metadata().hex()}
        case "register":
            return {"addr": register(m["size"]).ctypes.data}
        case "fill":
            i = np.arange(size, dtype=np.uint64)
            memory[:] = (i * 7 + i // 256 + m["seed"]).astype(np.uint8)
        case "sha256":
            return {"sha256": hashlib.sha256(memory.tobytes()).hexdigest()}
        case "transfer":
            transfer(m["op"], m["remote"], m["addr"], m["offset"], m["length"], bytes.fromhex(m["notify"]))
        case "notify":
            agent.send_notif(m["to"], bytes.fromhex(m["payload"]))
        case "notifications":
            return {"notifications": {k: [p.hex() for p in v] for k, v in agent.get_new_notifs().items()}}
        case other:
            raise ValueError(f"unknown command {other!r}")
    return {}


memory = register(size)
print(json.dumps({"name": agent.name, "metadata": agent.get_agent_metadata().hex(), "addr": memory.ctypes.data}), file=out)
for line in sys.stdin:
    try:
        print(json.dumps(answer(json.loads(line))), file=out)
    except Exception as e:
        print(json.dumps({"error": repr(e)}), file=out)
# Python's exit runs libnl's exit handlers, which crash after a NIXL agent.
os._exit(0)
