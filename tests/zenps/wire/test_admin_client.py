from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from zenps.config.settings import ClusterConfig
from zenps.errors import DeadlineError
from zenps.wire.admin_client import ask
from zenps.wire.frames import MAX_ENVELOPE_BYTES, MAX_STATUS_BYTES, PROTOCOL_VERSION, encode
from zenps.wire.scheduler_messages import Drain, DrainReply, NodeStatus, Status, StatusRequest
from zenps.wire.sockets import bind_router, context

DEADLINE_SECONDS = 30.0

Answers = dict[str, bytes]


@pytest.fixture
def answers() -> Iterator[Answers]:
    """What a scheduler answers that is at ``answers["address"]``, to whatever it is asked."""
    given: Answers = {}
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        given["address"] = address.removeprefix("tcp://").encode()

        def serve() -> None:
            while not ended.is_set():
                if router.poll(20):
                    peer, _ = router.recv_multipart()
                    for answer in [given[each] for each in ("before", "answer") if each in given]:
                        router.send_multipart([peer, answer])

        ended = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield given
        finally:
            ended.set()
            thread.join()


def cluster(answers: Answers) -> ClusterConfig:
    return ClusterConfig(scheduler=answers["address"].decode())


def test_the_status_of_the_largest_job_comes(answers: Answers) -> None:
    host = "node-0123.rack-17.example.org"
    counters = dict.fromkeys(("rounds", "pushed_bytes", "pulled_bytes", "wait_seconds", "step"), 1.5e9)
    metrics = f"{host}:65535"
    worker = NodeStatus(
        "worker", 4095, host, 1 << 22, "", metrics, 12, "present", 0, 0.25, counters, 1.0, counters
    )
    servers = [msgspec.structs.replace(worker, role="server", address=f"tcp://{host}:65535")] * 1024
    status = Status("default", "running", 12, 10.0, {}, (*servers, *[worker] * 4096), owners=bytes(8192))
    answers["answer"] = encode("default", status)
    assert MAX_ENVELOPE_BYTES < len(answers["answer"]) < MAX_STATUS_BYTES
    assert ask(cluster(answers), StatusRequest(), Status, DEADLINE_SECONDS) == status


def test_no_other_answer_may_be_so_large(answers: Answers) -> None:
    unknown_field = bytes(MAX_ENVELOPE_BYTES)
    answer = (PROTOCOL_VERSION, "default", ["drain!", "no", unknown_field])
    answers["answer"] = msgspec.msgpack.encode(answer)
    advice = r"its job is 'default'; all nodes need the same version of ZenPS \(zenps --version\)$"
    with pytest.raises(DeadlineError, match=rf"^no answer from the scheduler .* {advice}"):
        ask(cluster(answers), Drain(0), DrainReply, 0.5)


def test_what_is_no_answer_is_passed_over(answers: Answers) -> None:
    answers["before"], answers["answer"] = b"garbage", encode("default", DrainReply("draining"))
    assert ask(cluster(answers), Drain(0), DrainReply, DEADLINE_SECONDS) == DrainReply("draining")
