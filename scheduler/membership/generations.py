"""Generations of workers: torchrun restarts all workers of a job, or its workers leave and join again."""

from __future__ import annotations

from zenps.wire.scheduler_messages import Register

from .job import Job
from .members import Node


def is_stale(message: Register, job: Job) -> bool:
    """True if torchrun has ended the worker that registers, or soon will.

    Each node's torchrun counts only the restarts after failures of its own workers. After a failure on
    another node, its count may be lower than that node's although all of its workers are new.
    """
    if message.role != "worker" or message.generation >= job.generation:
        return False
    workers = job.members.present("worker")
    counts = [w.register.generation for w in workers if w.register.host == message.host]
    is_replaced = any(count > message.generation for count in counts)
    return job.state != "gathering" or message.view is not None or is_replaced


def is_restart(message: Register, job: Job) -> bool:
    """True if the worker that registers is the first of the next generation. It is not one that is refused.

    While the job recovers, nobody knows yet which workers are the present generation.
    """
    if message.role != "worker" or job.state == "recovering":
        return False
    if job.cluster.rejoin_seconds and (job.is_open_again or _returns(message, job)):
        return True
    return _is_started_again(message, job) and (job.state == "gathering" or job.may_restart())


def _is_started_again(message: Register, job: Job) -> bool:
    """True if the worker says that torchrun has started it again. One of another job may say so, too."""
    if message.generation > job.generation:
        return True
    if message.generation:
        workers = [node.register for node in job.members.present("worker")]
        if any(w.host == message.host and w.generation < message.generation for w in workers):
            return True  # torchrun has ended that worker, which had registered again before it died
    gone = job.members.with_state("worker", "left", "lost")
    has_left = any(node.rank == message.rank for node in gone)
    return message.restarts > 0 and not job.cluster.is_elastic and has_left


def _returns(message: Register, job: Job) -> bool:
    """True if a worker that has left registers again before all others have left.

    In an elastic job the others go on without it, unless all have come to the last barrier.
    """
    if job.cluster.is_elastic and not job.barriers.ended:
        return False
    return any(is_of_process(message, node) for node in job.members.with_state("worker", "left"))


def is_of_process(message: Register, node: Node) -> bool:
    """True if the process of ``node`` registers again. A process is only one worker at a time.

    A restarted scheduler knows a worker's rank from a view, and not whether the worker had asked for it.
    """
    before = node.register
    ranks = (before.rank,) if before.view is None else (before.rank, -1)
    return (before.host, before.pid) == (message.host, message.pid) and message.rank in ranks
