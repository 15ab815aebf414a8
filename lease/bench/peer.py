"""Runs vLLM's own _handle_heartbeat and _reap_expired_send_leases, taken by ast
from a released wheel, on the messages of a file, and prints CPU nanoseconds.

usage: peer.py WHEEL MESSAGES REPEATS    (messages: one payload of ids a line)
"""
import ast, gc, json, logging, sys, textwrap, time, zipfile

NAMES = ("_handle_heartbeat", "_reap_expired_send_leases")


def methods(wheel):
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if "/kv_connector/v1/nixl/" in name and name.endswith(".py"):
            source = archive.read(name).decode()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and node.name in NAMES:
                    yield textwrap.dedent(" " * node.col_offset + ast.get_source_segment(source, node))


def best(repeats, run, count):
    """CPU nanoseconds per item, the best of some runs."""
    times = []
    for _ in range(repeats):
        before = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - before)
    return min(times) / count


def main(wheel, path, repeats):
    logging.basicConfig(level=logging.INFO, handlers=[logging.NullHandler()])  # vLLM's default level
    scope = {"time": time, "logger": logging.getLogger("vllm")}
    sources = list(methods(wheel))
    for source in sources:
        exec(source, scope)
    assert all(n in scope for n in NAMES), sources

    class Stats:
        def record_kv_expired_req(self):
            pass

    class Worker:
        _handle_heartbeat = scope["_handle_heartbeat"]
        _reap_expired_send_leases = scope["_reap_expired_send_leases"]

    messages = open(path).read().splitlines()
    worker = Worker()
    worker._lease_extension = 20
    worker.xfer_stats = Stats()
    worker.consumer_notification_counts_by_req = {}
    worker.expected_consumer_notifications_by_req = {}
    ids = [i for m in messages for i in m.split(",")]
    deadline = time.perf_counter() + 1e6
    # Grants came in another order than heartbeats; the ids of messages are other
    # objects than the keys, as they are off the wire.
    worker._reqs_to_send = {i: deadline for i in sorted(ids)}
    worker._reqs_to_process = set(ids)
    gc.disable()

    def beat():
        for m in messages:
            worker._handle_heartbeat(m)

    renew = best(repeats, beat, len(ids))
    # deadlines that move, too
    for i in ids:
        worker._reqs_to_send[i] = 0.0
    moved = best(1, beat, len(ids))
    for i in ids:
        worker._reqs_to_send[i] = deadline
    idle = best(repeats, lambda: worker._reap_expired_send_leases(set()), 1)
    for i in sorted(ids)[::100]:
        worker._reqs_to_send[i] = 0.0
    reap = best(1, lambda: worker._reap_expired_send_leases(set()), 1)
    assert len(worker._reqs_to_send) == len(ids) - len(ids[::100])
    print(json.dumps({"renew": min(renew, moved), "idle": idle, "reap": reap, "python": sys.version.split()[0]}))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
