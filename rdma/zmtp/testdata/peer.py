"""A libzmq peer for the interoperability tests: one JSON command per line in, one JSON answer per line out.

A request is the decimal size of the payload wanted, as ASCII. A reply is two frames: the payload
(byte i is i * 7 % 251) and a nine-byte clock, as in vLLM's side channel.
"""
import hashlib
import json
import os
import sys
import threading
import time

import zmq

CLOCK = bytes.fromhex("cb40992af7bfc83516")
PATTERN = bytes(i * 7 % 251 for i in range(251))
ctx = zmq.Context()
ctx.set(zmq.MAX_SOCKETS, 4096)
kept = {}


def payload(size):
    return (PATTERN * (size // 251 + 1))[:size]


def open_socket(cmd, kind):
    s = ctx.socket(kind)
    s.linger = 0
    s.rcvtimeo = cmd.get("timeout", 5000)
    s.ipv6 = cmd.get("ipv6", False)
    if cmd.get("identity"):
        s.identity = cmd["identity"].encode()
    if cmd.get("heartbeat"):
        s.heartbeat_ivl = cmd["heartbeat"]
        s.heartbeat_timeout = 10 * cmd["heartbeat"]
    return s


def client(cmd):
    s = open_socket(cmd, zmq.DEALER if cmd.get("dealer") else zmq.REQ)
    s.connect("tcp://" + cmd["addr"])
    return s


def send(s, cmd, size):
    s.send_multipart([b""] * cmd.get("dealer", 0) + [str(size).encode()])


def receive(s, cmd):
    frames = s.recv_multipart()
    if cmd.get("dealer"):
        assert frames.pop(0) == b"", "no delimiter"
    return {"frames": len(frames), "size": len(frames[0]), "clock": frames[1].hex(),
            "sha256": hashlib.sha256(frames[0]).hexdigest()}


def ask(cmd):
    """One request per size, one after another: on a socket each ("fresh"), on a kept one, or on one."""
    out, s = [], kept.pop(cmd.get("keep"), None)
    for size in cmd["sizes"]:
        s = s or client(cmd)
        send(s, cmd, size)
        out.append(receive(s, cmd))
        if cmd.get("fresh"):
            s.close()
            s = None
    if cmd.get("keep"):
        kept[cmd["keep"]] = s
    elif s:
        s.close()
    return {"replies": out}


def crowd(cmd):
    """All sockets are connected and have asked before the first reply is received."""
    sockets = [client(cmd) for _ in cmd["sizes"]]
    for s, size in zip(sockets, cmd["sizes"]):
        send(s, cmd, size)
    out = [receive(s, cmd) for s in sockets]
    for s in sockets:
        s.close()
    return {"replies": out}


def undelimited(cmd):
    """A DEALER whose first message has no delimiter and whose second one does."""
    s = client({**cmd, "dealer": 1})
    s.send(b"10")
    send(s, {"dealer": 1}, 10)
    out = [receive(s, {"dealer": 1})]
    s.close()
    return {"replies": out}


def close(cmd):
    kept.pop(cmd["keep"]).close()
    return {}


def router(cmd):
    s = open_socket(cmd, zmq.ROUTER)
    s.rcvtimeo = -1
    port = s.bind_to_random_port("tcp://127.0.0.1")

    def serve():
        while True:
            peer, empty, *body = s.recv_multipart()
            if empty != b"" or cmd.get("mute"):
                continue
            time.sleep(cmd.get("delay", 0) / 1000)
            s.send_multipart([peer, b"", payload(int(body[0])), CLOCK])

    threading.Thread(target=serve, daemon=True).start()
    return {"addr": f"127.0.0.1:{port}"}


OPS = {f.__name__: f for f in (ask, crowd, undelimited, close, router)}
print(json.dumps({"libzmq": zmq.zmq_version()}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    try:
        answer = OPS[command["op"]](command)
    except Exception as e:  # the test reads the error
        answer = {"error": repr(e)}
    print(json.dumps(answer), flush=True)
os._exit(0)  # router threads never end
