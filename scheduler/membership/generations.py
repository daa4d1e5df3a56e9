"""Generations of workers: torchrun ends all workers of a job, and starts a new generation of them."""

from __future__ import annotations

from zenps.wire.messages import Register

from .job import Job


def is_stale(message: Register, job: Job) -> bool:
    """True if a worker registers that torchrun has ended, or soon will.

    The agent of each node counts only restarts for a failure of its own workers. After a failure on another
    node its count may be lower than that node's, while all of its workers are new.
    """
    if message.generation >= job.generation:
        return False
    workers = job.members.present("worker")
    counts = [w.register.generation for w in workers if w.register.host == message.host]
    return job.state != "gathering" or message.view is not None or max(counts, default=0) > message.generation


def is_restart(message: Register, job: Job) -> bool:
    """True if torchrun has ended all workers, and this one is the first of the next generation."""
    if message.generation > job.generation:
        return True
    if job.state not in ("confirming", "running", "draining") or not message.restarts:
        return False
    gone = job.members.with_state("worker", "left", "lost")
    return not job.cluster.is_elastic and any(node.rank == message.rank for node in gone)
