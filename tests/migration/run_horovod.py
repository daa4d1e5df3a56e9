"""Horovod's own tests through ``zenps.horovod``, on each worker of a job.

With the sources of Horovod 0.28 beside, this prints a line for each test, and ends with 1 if one has failed::

    zenps launch --workers 2 -- python tests/migration/run_horovod.py horovod/test/parallel/test_torch.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch

import zenps.horovod as hvd

STAYING = [
    "allgather_object",
    "async_sparse_allreduce",
    "barrier_with_multiple_collectives",
    "broadcast_object",
    "broadcast_state",
    "broadcast_state_options",
    "compression_fp16",
    "duplicate_names",
    "dynamic_requires_grad",
    "force_allreduce",
    "gradient_clipping",
    "horovod_allgather",
    "horovod_allgather_async_fused",
    "horovod_allgather_duplicate_name_error",
    "horovod_allgather_error",
    "horovod_allgather_grad",
    "horovod_allgather_type_error",
    "horovod_allgather_variable_size",
    "horovod_allreduce",
    "horovod_allreduce_async_fused",
    "horovod_allreduce_average",
    "horovod_allreduce_duplicate_name_error",
    "horovod_allreduce_error",
    "horovod_allreduce_grad",
    "horovod_allreduce_grad_average",
    "horovod_allreduce_inplace",
    "horovod_allreduce_max",
    "horovod_allreduce_min",
    "horovod_allreduce_postscale",
    "horovod_allreduce_prescale",
    "horovod_allreduce_product",
    "horovod_allreduce_type_error",
    "horovod_broadcast",
    "horovod_broadcast_duplicate_name_error",
    "horovod_broadcast_error",
    "horovod_broadcast_grad",
    "horovod_broadcast_inplace",
    "horovod_broadcast_rank_error",
    "horovod_broadcast_type_error",
    "horovod_grouped_allgather",
    "horovod_grouped_allgather_grad",
    "horovod_grouped_allreduce",
    "horovod_grouped_allreduce_average",
    "horovod_grouped_allreduce_grad",
    "horovod_grouped_allreduce_grad_average",
    "horovod_grouped_allreduce_inplace",
    "horovod_join_allgather",
    "horovod_join_allreduce",
    "horovod_join_broadcast",
    "horovod_rank",
    "horovod_size",
    "missing_named_parameters",
    "no_named_parameters",
    "optimizer_no_named_parameters",
    "sparse_embeddings",
    "synchronize_step_warning",
]
"""Horovod's tests, without ``test_``, that need no GPU, process set, alltoall, reducescatter or Adasum.

``broadcast_state_no_grad`` is not among them: it reads gradients of zeros that Horovod leaves behind. Nor is
``global_barrier_op``: it fails where other processes delay a rank between two of its lines.
"""

LEAVING = ["horovod_is_initialized", "horovod_reinit"]
"""Tests that leave the job and join it again, where HOROVOD_RANK says that Horovod has launched them."""


@contextlib.contextmanager
def temppath() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield os.path.join(directory, "file")


def install() -> None:
    """Puts ``zenps.horovod`` where the tests look for Horovod, and what they use of its other modules."""
    horovod: Any = types.ModuleType("horovod")
    horovod.torch = hvd
    common: Any = types.ModuleType("common")
    common.temppath = temppath
    launched_as = hvd.rank(), hvd.size()
    common.mpi_env_rank_and_size = lambda: launched_as
    common.skip_or_fail_gpu_test = lambda *_: None
    sys.modules |= {"horovod": horovod, "horovod.torch": hvd, "common": common}
    # The tests try every optimizer of torch.optim on vectors. Muon refuses them: it is for matrices only.
    torch.optim.Muon.__module__ = "not torch.optim"


class Result(unittest.TextTestResult):
    """Prints a line for each test."""

    def addSuccess(self, test: unittest.TestCase) -> None:
        print("passed", test.id().rpartition(".")[2], flush=True)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        print("skipped", test.id().rpartition(".")[2], reason, flush=True)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        print("failed", test.id().rpartition(".")[2], self.failures[-1][1], flush=True)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        print("failed", test.id().rpartition(".")[2], self.errors[-1][1], flush=True)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    install()
    specification = importlib.util.spec_from_file_location("horovod_tests", sys.argv[1])
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    names = sys.argv[2:] or [*STAYING, *LEAVING]
    succeeded = run([module.TorchTests(f"test_{name}") for name in names if name not in LEAVING])
    os.environ |= {"HOROVOD_RANK": str(hvd.rank()), "HOROVOD_SIZE": str(hvd.size())}
    succeeded &= run([module.TorchTests(f"test_{name}") for name in names if name in LEAVING])
    hvd.shutdown()
    sys.exit(0 if succeeded else 1)


def run(tests: list[unittest.TestCase]) -> bool:
    """Returns whether none has failed."""
    with open(os.devnull, "w") as nowhere:
        runner = unittest.TextTestRunner(resultclass=Result, stream=nowhere)  # type: ignore[arg-type]
        return runner.run(unittest.TestSuite(tests)).wasSuccessful()


if __name__ == "__main__":
    main()
