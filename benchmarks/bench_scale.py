"""Benchmark of scale: what the scheduler and a server do in jobs of 16 to 4096 workers, without any network.

Both are pure state machines, which one process drives here with a message of each node. So the times are
those of the protocol itself, which decodes each push and encodes each answer: sockets, sums and keys come on
top. ``--docs`` writes a page of the results.
"""

from __future__ import annotations

import argparse
import math
import socket as net
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from sync_report import Machine, describe_machine, find_versions

from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.tracker import Membership
from zenps.server.reducers.base import AllreduceOutcome, Answer
from zenps.server.rounds.states import HeldPush, Key, Reduce
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.connections import LOOK_SECONDS, MAX_SHARE, _bytes_received
from zenps.wire.frames import Decoder, encode
from zenps.wire.messages import Push, Result, ToServer
from zenps.wire.scheduler_link import BEATS_PER_LEASE
from zenps.wire.scheduler_messages import Barrier, Heartbeat, Leave, Register, View
from zenps.wire.views import ViewEncoder

HERE = Path(__file__).resolve().parent
WORKERS = (16, 64, 256, 1024, 4096)
WORKERS_PER_SERVER = 4
LEASE_SECONDS = ClusterConfig().lease_seconds
ROUNDS = 20
LOAD = {"rounds": 1e6, "pushed_bytes": 1e12, "pulled_bytes": 1e12, "wait_seconds": 1e3, "step": 1e5}


class Scheduler(msgspec.Struct):
    """Seconds of one thread, and bytes."""

    register_seconds: float
    """For all nodes to register."""
    change_seconds: float
    """From the leave of a server until all nodes' views are encoded."""
    view_bytes: int
    """The largest view."""
    encoded_bytes: int
    """In a change of members, by the scheduler."""
    sent_bytes: int
    """In a change of members, to all nodes."""
    heartbeat_seconds: float
    """One heartbeat and its answer, encoded."""
    tick_seconds: float
    """What is done ten times a second."""
    barrier_seconds: float
    """From the first arrival to the answers for all workers."""
    status_seconds: float
    status_bytes: int


class Server(msgspec.Struct):
    """Seconds of one thread."""

    push_seconds: float
    """One push, decoded, until it is held."""
    reply_seconds: float
    """One rank's share of the answers of a round, which are encoded once, and of the round's end."""
    tick_seconds: float
    """With one round open, twice a second."""
    look_seconds: float
    """A look for messages without end: one connection is asked as often as there are workers."""


class Size(msgspec.Struct):
    """The measurements of one size of job."""

    workers: int
    servers: int
    scheduler: Scheduler
    server: Server


class Report(msgspec.Struct):
    """The JSON file."""

    machine: Machine
    versions: dict[str, str]
    sizes: list[Size]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all sizes, and writes the JSON file and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "scale.json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="where the page goes")
    options = parser.parse_args(arguments)
    measure(WORKERS[0])  # the first calls of a process are slower
    sizes = [measure(workers) for workers in options.workers]
    report = Report(describe_machine(), find_versions(), sizes)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    print(page(report))
    if options.docs:
        options.docs.write_text(page(report), "utf-8")


# ── measurements ────────────────────────────────────────────────────────────────────────────────


def measure(workers: int) -> Size:
    """Drives a scheduler and a server of a job of this size."""
    servers = max(workers // WORKERS_PER_SERVER, 2)
    return Size(workers, servers, measure_scheduler(workers, servers), measure_server(workers))


def measure_scheduler(workers: int, servers: int) -> Scheduler:
    """A job from its first registration to the leave of a server."""
    registers = {_peer("server", n): _register("server", n) for n in range(servers)}
    registers |= {_peer("worker", n): _register("worker", n) for n in range(workers)}
    membership = Membership("job", ClusterConfig(workers=workers, servers=servers), {}, 0.0)

    def gather() -> None:
        for peer, message in registers.items():
            membership.on_message(peer, message, 0.0)

    def beat(epoch: int) -> None:
        for peer in registers:
            for send in membership.on_message(peer, Heartbeat(epoch, LOAD), 1.0):
                if not isinstance(send.message, View):
                    encode("job", send.message)

    def meet() -> None:
        for number in range(workers):
            membership.on_message(_peer("worker", number), Barrier(1), 2.0)

    register_seconds = seconds_of(gather)
    beat(1)
    heartbeat_seconds = seconds_of(lambda: beat(1)) / len(registers)
    tick_seconds = seconds_of(lambda: [membership.on_tick(2.0 + n / 10) for n in range(10)]) / 10
    barrier_seconds = seconds_of(meet)
    status_bytes = len(encode("job", membership.status(2.0)))
    status_seconds = seconds_of(lambda: encode("job", membership.status(2.0)))
    encoder, frames = ViewEncoder("job"), list[tuple[bytes, bytes]]()

    def change() -> None:
        sends = membership.on_message(_peer("server", 0), Leave(), 3.0)
        for number in range(1, servers):
            sends += membership.on_message(_peer("server", number), Heartbeat(2, LOAD), 3.0)
        frames.extend(encoder.encode(send.message) for send in sends if isinstance(send.message, View))

    change_seconds = seconds_of(change)
    assert len(frames) == workers + servers - 1
    sizes = [len(envelope) + len(frame) for envelope, frame in frames]
    shared = {id(frame): len(frame) for _, frame in frames}
    encoded_bytes = sum(shared.values()) + sum(len(envelope) for envelope, _ in frames)
    return Scheduler(
        *(register_seconds, change_seconds, max(sizes), encoded_bytes, sum(sizes)),
        *(heartbeat_seconds, tick_seconds, barrier_seconds, status_seconds, status_bytes),
    )


def measure_server(workers: int) -> Server:
    """Rounds of one chunk each, to which all workers push."""
    rounds = ServerRounds(1 << 30, math.inf)
    peers = {rank: _peer("worker", rank) for rank in range(workers)}
    rounds.on_view(1, peers, {}, 0.0)
    decoder: Decoder[ToServer] = Decoder("job", ToServer)
    values = memoryview(bytes(1024))
    reduced: list[Reduce] = []

    def push(envelopes: Mapping[bytes, bytes], now: float) -> None:
        for peer, envelope in envelopes.items():
            message = decoder.decode(envelope, [values])
            assert isinstance(message, Push)
            actions = rounds.on_push(HeldPush(peer, message, None, values.nbytes), now)
            reduced.extend(action for action in actions if isinstance(action, Reduce))

    def answer(key: Key, outcome: AllreduceOutcome) -> None:
        for reply in rounds.replies(key, outcome):
            encode("job", reply.message, reply.frames)
        rounds.finish(key, outcome, 0.0)

    pushing = replying = 0.0
    for step in range(ROUNDS):
        envelopes = {peer: encode("job", _push(rank, step), [values]) for rank, peer in peers.items()}
        pushing += seconds_of(partial(push, envelopes, float(step)))
        result = Result(1, "t", step, 0, 256, "none")
        outcome = AllreduceOutcome([Answer(result, [values])], 256)
        replying += seconds_of(partial(answer, reduced.pop().key, outcome))
    rounds.on_push(HeldPush(peers[0], _push(0, ROUNDS), None, values.nbytes), float(ROUNDS))
    tick_seconds = seconds_of(lambda: rounds.on_tick(float(ROUNDS)))
    with (
        net.create_server(("127.0.0.1", 0)) as listener,
        net.create_connection(listener.getsockname()) as peer,
    ):
        descriptor = peer.fileno()
        look_seconds = seconds_of(lambda: [_bytes_received(descriptor) for _ in range(workers)])
    return Server(pushing / ROUNDS / workers, replying / ROUNDS / workers, tick_seconds, look_seconds)


def seconds_of(action: Callable[[], object]) -> float:
    """Processor time."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _peer(role: str, number: int) -> bytes:
    return f"{role}-{number:032x}".encode()


def _push(rank: int, step: int) -> Push:
    return Push(1, rank, "t", step, 0, 1, "dense", "float32", (256,), 256, 1, 256, "none", True)


def _register(role: str, number: int) -> Register:
    host, address = f"{role}-{number}.zenps.example.org", f"10.0.{number // 256}.{number % 256}"
    if role == "worker":
        return Register("worker", number, host, 1, "", f"{address}:9100", {})
    return Register("server", -1, host, 1, f"tcp://{address}:5000", f"{address}:9100", {})


# ── the page ────────────────────────────────────────────────────────────────────────────────────

HEAD = """<!-- Written by benchmarks/bench_scale.py from its own JSON file. Do not edit. -->
# Scale

What the scheduler and a server do in jobs of {first} to {last} workers, with one server for every four.
Both are pure state machines, which one process drives here without a network: sockets, sums and keys
come on top. Times are processor time of one thread ({machine}).

```sh
python benchmarks/bench_scale.py --json benchmarks/results/scale.json --docs docs/scale.md
```
"""

GROWTH = """
A heartbeat takes the scheduler {heartbeat} µs in these jobs, so its work in a lease grows with the
number of nodes n. Only a barrier's messages look at all earlier arrivals. A change of
members sends the view, which names all nodes, to each of them. The view is encoded once for servers and
once for workers: encoding grows with n, and the bytes on the network with n².

From {first} to {last} workers, one push takes a server {push} µs, and one answer {answer} µs.
A round has a push of each worker, so its work and its bytes grow with the number of workers. A
tick, here with one round open, looks through the workers for one round only; for each other round it takes
some microseconds, however many workers there are. A look for messages without end asks the kernel about
each connection, ten times a second; where that would take more than {share:.0%} of the server's thread,
looks come less often. Here one connection was asked as often as there are workers.
"""

NEEDS = """
## What a cluster of that size needs

*Scheduler, busy*: the share of its one thread that heartbeats and ticks take, with the default lease of
{lease:g} s. *A change on 10 Gbit/s*: how long the scheduler's link is busy with the views. Workers go
on meanwhile, and a server's death is noticed by its lease, which takes longer. *Descriptors*: each
connection takes one; `ulimit -n` must be some hundred above this number, for everything else. *Server,
one small tensor*: its thread's time for the messages of a round of all workers, without sockets and
sums. A step of t tensors takes a server at least t times that, divided by the number of servers if
tensors are small.
"""

LIMITS = """
An envelope may have 1 MiB, and a status 4 MiB: a view of 4096 workers and 1024 servers has {view}, and
its status {status}. A restarted scheduler gets a view from each node, which is as many bytes as a
change of members.
"""


def page(report: Report) -> str:
    """The page of documentation."""
    sizes = report.sizes
    largest = sizes[-1]
    machine = f"{report.machine.cpu}, Python {report.versions['python']}"
    parts = [HEAD.format(first=sizes[0].workers, last=largest.workers, machine=machine)]
    parts += ["\n## Scheduler\n\n", table(SCHEDULER, sizes), "\n## Server\n\n", table(SERVER, sizes)]
    growth = GROWTH.format(
        share=MAX_SHARE,
        first=sizes[0].workers,
        last=largest.workers,
        heartbeat=between(size.scheduler.heartbeat_seconds for size in sizes),
        push=between(size.server.push_seconds for size in sizes),
        answer=between(size.server.reply_seconds for size in sizes),
    )
    parts += [growth, NEEDS.format(lease=LEASE_SECONDS), "\n", table(NEEDED, sizes)]
    view, status = mega(largest.scheduler.view_bytes), mega(largest.scheduler.status_bytes)
    parts += [LIMITS.format(view=view, status=status)]
    parts += ["\nThe data: [scale.json](../benchmarks/results/scale.json).\n"]
    return "".join(parts)


Column = tuple[str, Callable[[Size], str]]


def table(columns: Sequence[Column], sizes: Sequence[Size]) -> str:
    """A Markdown table with a line for each size."""
    every: list[Column] = [
        ("workers", lambda s: f"{s.workers}"),
        ("servers", lambda s: f"{s.servers}"),
        *columns,
    ]
    lines = [[name for name, _ in every], ["---:"] * len(every)]
    lines += [[show(size) for _, show in every] for size in sizes]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def milli(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


def micro(seconds: float) -> str:
    """Microseconds."""
    return f"{1e6 * seconds:.2g} µs"


def between(seconds: Iterable[float]) -> str:
    """The least and the greatest of some times, in microseconds."""
    times = [1e6 * each for each in seconds]
    return f"{min(times):.2g} to {max(times):.2g}"


def mega(count: float) -> str:
    """Megabytes."""
    return f"{count / 1e6:.3g} MB"


def busy(size: Size) -> float:
    """The share of the scheduler's thread that heartbeats and ticks take."""
    beats = (size.workers + size.servers) * BEATS_PER_LEASE / LEASE_SECONDS
    return beats * size.scheduler.heartbeat_seconds + 10 * size.scheduler.tick_seconds


def look(size: Size) -> str:
    """The share of the server's thread that looks take, and how often they come."""
    seconds = size.server.look_seconds
    every = max(LOOK_SECONDS, seconds / MAX_SHARE)
    return f"{seconds / every:.2%}, every {every:.2g} s"


SCHEDULER: Sequence[Column] = (
    ("all register", lambda s: milli(s.scheduler.register_seconds)),
    ("a heartbeat", lambda s: micro(s.scheduler.heartbeat_seconds)),
    ("a tick", lambda s: milli(s.scheduler.tick_seconds)),
    ("a barrier", lambda s: milli(s.scheduler.barrier_seconds)),
    ("a change of members", lambda s: milli(s.scheduler.change_seconds)),
    ("encoded for it", lambda s: mega(s.scheduler.encoded_bytes)),
    ("sent for it", lambda s: mega(s.scheduler.sent_bytes)),
)
SERVER: Sequence[Column] = (
    ("a push", lambda s: micro(s.server.push_seconds)),
    ("an answer", lambda s: micro(s.server.reply_seconds)),
    ("a tick", lambda s: milli(s.server.tick_seconds)),
    ("a look at all connections", lambda s: milli(s.server.look_seconds)),
    ("looks, of the thread", look),
)
NEEDED: Sequence[Column] = (
    ("scheduler, busy", lambda s: f"{busy(s):.1%}"),
    ("a change on 10 Gbit/s", lambda s: milli(s.scheduler.sent_bytes * 8 / 1e10)),
    ("scheduler's descriptors", lambda s: f"{s.workers + s.servers}"),
    ("a server's", lambda s: f"{s.workers}"),
    ("a worker's", lambda s: f"{s.servers}"),
    (
        "server, one small tensor",
        lambda s: milli(s.workers * (s.server.push_seconds + s.server.reply_seconds)),
    ),
)


if __name__ == "__main__":
    main()
