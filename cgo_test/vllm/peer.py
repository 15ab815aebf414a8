#!/usr/bin/env python3
"""Run one real vLLM engine (CPU) with its NixlConnector, driven by JSON lines over stdin and stdout.

Every line on stdin is one command:

  {"cmd": "generate", "id": "r1", "tokens": [1, 2], "max_tokens": 1, "kv_transfer_params": {...}}
  {"cmd": "abort", "id": "r1"}
  {"cmd": "blocks", "ids": [1, 2]}
  {"cmd": "status"}
  {"cmd": "quit"}

Every line on stdout is one event:

  ready   engine id, NIXL agent name, geometry of the KV cache, the inputs and the value of the compatibility hash
  output  a request's tokens, finish_reason and kv_transfer_params; on the way out its blocks with the sha256 of each region
  freed   the scheduler has let go of a request: its blocks can be used again
  blocks  the raw bytes (hex) of blocks, region after region
  status  the requests the scheduler still knows (running or pinned by a lease) and the number of free blocks
  wire    with --wire: what passed through a zmq socket or the NIXL agent
  error   what went wrong: with "line", a bad command, and the engine goes on; without it, the end of the process

With "tensor_parallel_size" among --engine-args the KV cache lies in other processes: ready then has no geometry, and there
are no digests, bytes or wire events of transfers.

vLLM's log goes to stderr. The engine ends on quit or at the end of stdin. Nothing of vLLM or of NIXL is replaced:
wrappers only write down what a method was given and what it returned.
"""
import argparse
import ctypes
import functools
import hashlib
import json
import os
import pathlib
import queue
import sys
import sysconfig
import threading

MODEL_HELP = "model folder; the engine is given its last path element, so the compatibility hash is the same on every machine"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["kv_producer", "kv_consumer", "kv_both"], required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True, help=MODEL_HELP)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--port", type=int, required=True, help="side channel, on 127.0.0.1")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32, help="tokens; CPU attention wants a multiple of 32")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--extra", type=json.loads, default={}, help="kv_connector_extra_config, as JSON")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--wire", action="store_true", help="emit wire events")
    return parser.parse_args()


ARGS = arguments()

# stdout carries events only; whatever else prints there goes to stderr.
EVENTS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
EMIT = threading.Lock()


def emit(event, **fields):
    with EMIT:
        EVENTS.write(json.dumps({"event": event, **fields}) + "\n")


SITE = sysconfig.get_path("purelib")
for name, value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",      # engine, scheduler and worker in this process, where we can look at them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "UCX_TLS": "tcp",
    "NIXL_PLUGIN_DIR": f"{SITE}/.nixl_cu12.mesonpy.libs/plugins",
}.items():
    os.environ.setdefault(name, value)
os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ARGS.port)
os.chdir(ARGS.model.resolve().parent)

import vllm  # noqa: E402
import vllm.config.utils  # noqa: E402
import zmq  # noqa: E402


def after(owner, name, note):
    """Call note(result, *arguments) after every call of owner.name."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*a, **kw):
        result = inner(*a, **kw)
        note(result, *a, **kw)
        return result

    setattr(owner, name, call)


def watch_wire():
    from vllm.distributed.nixl_utils import NixlWrapper as agent

    def frames(what, socket, parts):
        kind = {zmq.REQ: "REQ", zmq.ROUTER: "ROUTER"}.get(socket.type)
        if kind:
            emit("wire", what=what, socket=kind, frames=[bytes(part).hex() for part in parts])

    def send(result, socket, data, *a, **kw):
        if socket.type == zmq.REQ:
            frames("zmq send", socket, [data])

    after(zmq.Socket, "send", send)
    after(zmq.Socket, "send_multipart", lambda result, socket, parts, *a, **kw: frames("zmq send", socket, parts))
    after(zmq.Socket, "recv_multipart", lambda result, socket, *a, **kw: frames("zmq receive", socket, result))

    def plain(x):
        return x.tolist() if hasattr(x, "tolist") else list(x)

    after(agent, "add_remote_agent", lambda result, self, blob: emit("wire", what="add remote agent", agent=str(result), blob=blob.hex()))
    after(agent, "send_notif", lambda result, self, to, notif_msg=b"", **kw: emit("wire", what="send notification", to=str(to), message=notif_msg.hex()))
    after(agent, "make_prepped_xfer", lambda result, self, op, lh, local, rh, remote, notif_msg=b"", **kw: emit(
        "wire", what="make transfer", op=op, local=plain(local), remote=plain(remote), notification=notif_msg.hex()))
    after(agent, "check_xfer_state", lambda result, self, *a: result == "PROC" or emit("wire", what="transfer ended", state=result))
    after(agent, "get_new_notifs", lambda result, self, *a, **kw: result and emit(
        "wire", what="notifications", notifications={name: [m.hex() for m in messages] for name, messages in result.items()}))


class Engine:
    def __init__(self):
        self.hash_inputs = None
        after(vllm.config.utils, "hash_factors", lambda result, factors: self.note_hash(factors))
        if ARGS.wire:
            watch_wire()
        options = {
            "model": ARGS.model.name, "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True,
            "max_model_len": 512, "max_num_batched_tokens": 2048, "max_num_seqs": 8,
            "block_size": ARGS.block_size, "num_gpu_blocks_override": ARGS.blocks, "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": ARGS.prefix_caching, "disable_log_stats": True,
            "kv_transfer_config": {
                "kv_connector": ARGS.connector, "kv_role": ARGS.role, "engine_id": ARGS.engine_id,
                "kv_buffer_device": "cpu", "kv_connector_extra_config": ARGS.extra,
            },
        }
        self.llm = vllm.LLM(**(options | ARGS.engine_args)).llm_engine
        self.core = self.llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = None      # with tensor parallelism it lives in processes of its own, where nobody looks
        if self.llm.vllm_config.parallel_config.tensor_parallel_size == 1:
            from vllm.distributed.kv_transfer import get_kv_transfer_group
            self.worker = get_kv_transfer_group().connector_worker
            self.bases = self.worker.kv_caches_base_addr[self.worker.engine_id][self.worker.tp_rank]
        self.block_ids = {}     # request → its blocks while the scheduler knows it

    def note_hash(self, factors):
        if "nixl_connector_version" in factors:
            self.hash_inputs = dict(factors)

    def ready(self):
        if not self.worker:
            emit("ready", pid=os.getpid(), vllm=vllm.__version__, engine_id=ARGS.engine_id, host="127.0.0.1", port=ARGS.port)
            return
        from vllm.v1.attention.backends import cpu_attn
        payload = self.worker.xfer_handshake_metadata
        head = self.hash_inputs["head_size"]
        dtype = self.llm.vllm_config.model_config.dtype
        emit("ready", pid=os.getpid(), vllm=vllm.__version__, engine_id=self.worker.engine_id, agent=self.worker.nixl_wrapper.name,
             host="127.0.0.1", port=ARGS.port, compatibility_hash=payload.compatibility_hash, hash_inputs=self.hash_inputs,
             cpu_attention_isa=cpu_attn._get_attn_isa(dtype, self.worker.block_size, head),
             num_blocks=self.worker.num_blocks, block_size=self.worker.block_size, kv_cache_layout=self.worker.kv_cache_layout,
             base_addresses=list(self.bases), block_lens=list(self.worker.block_len_per_layer),
             block_strides=list(self.worker.block_stride_per_layer), region_names=list(self.worker.region_names))

    def block(self, i):
        """The bytes of block i, region after region, out of the registered memory; no region when that is another process's."""
        if not self.worker:
            return []
        if not 0 <= i < self.worker.num_blocks:
            raise ValueError(f"block {i} is not in 0..{self.worker.num_blocks - 1}")
        return [ctypes.string_at(base + stride * i, length) for base, stride, length in
                zip(self.bases, self.worker.block_stride_per_layer, self.worker.block_len_per_layer)]

    def command(self, m):
        match m["cmd"]:
            case "generate":
                params = m.get("kv_transfer_params")
                self.llm.add_request(m["id"], {"prompt_token_ids": m["tokens"]}, vllm.SamplingParams(
                    max_tokens=m.get("max_tokens", 1), temperature=0, ignore_eos=True, detokenize=False,
                    extra_args={"kv_transfer_params": params} if params else None))
            case "abort":
                self.llm.abort_request([m["id"]])
            case "blocks":
                emit("blocks", blocks=[{"id": i, "regions": [b.hex() for b in self.block(i)]} for i in m["ids"]])
            case "status":
                emit("status", requests=list(self.scheduler.requests), free_blocks=self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
            case "quit":
                self.end(0)
            case other:
                raise ValueError(f"unknown command {other!r}")

    def step(self):
        for request in self.scheduler.requests:
            if ids := self.scheduler.kv_cache_manager.get_block_ids(request):
                self.block_ids[request] = ids[0]
        for o in self.llm.step():
            if not o.finished:
                continue
            # The scheduler appends "-" and eight hex digits to the id that a caller gave. A request that began
            # and finished within this one step was never seen with blocks; its params name them.
            internal = next((k for k in [*self.block_ids, *self.scheduler.requests] if k.rpartition("-")[0] == o.request_id), None)
            ids = self.block_ids.get(internal, [])
            if o.kv_transfer_params and o.kv_transfer_params.get("remote_block_ids"):
                ids = [i for group in o.kv_transfer_params["remote_block_ids"] for i in group]
            emit("output", id=o.request_id, internal_id=internal, tokens=list(o.outputs[0].token_ids), finish_reason=o.outputs[0].finish_reason,
                 cached_tokens=o.num_cached_tokens, kv_transfer_params=o.kv_transfer_params,
                 blocks=[{"id": i, "sha256": [hashlib.sha256(b).hexdigest() for b in self.block(i)]} for i in ids])
        for request in [r for r in self.block_ids if r not in self.scheduler.requests]:
            emit("freed", internal_id=request, blocks=self.block_ids.pop(request))

    def run(self):
        lines = queue.Queue()

        def read():
            for line in sys.stdin:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            busy = self.scheduler.has_requests()
            try:
                line = lines.get(timeout=0.001 if busy else None)
                if line is None:
                    self.end(0)
                try:
                    self.command(json.loads(line))
                except Exception as e:
                    emit("error", line=line, error=repr(e))
            except queue.Empty:
                pass
            if self.scheduler.has_requests():
                self.step()

    def end(self, code):
        self.core.shutdown()
        # Python's exit would run UCX's and libnl's exit handlers, which crash after a NIXL agent.
        os._exit(code)


if __name__ == "__main__":
    try:
        engine = Engine()
        engine.ready()
        engine.run()
    except BaseException as e:
        emit("error", error=repr(e))
        os._exit(1)
