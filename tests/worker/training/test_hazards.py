"""Modules of which training goes wrong on several ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from zenps.errors import UsageError
from zenps.worker.training.hazards import check_modules


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gradients_that_ddp_averages_are_refused() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ddp = DistributedDataParallel(model)
    with pytest.raises(UsageError, match=r"DistributedDataParallel.*register_comm_hook"):
        check_modules(list(model.parameters()))
    check_modules(list(other.parameters()))
    del ddp


@pytest.mark.usefixtures("group")
def test_a_module_that_nobody_has_any_more_is_no_hazard() -> None:
    """One that is part of a circle of references, as a trainer's, lives until it is collected."""
    model = nn.Linear(3, 2)
    gc.disable()
    try:
        ddp = DistributedDataParallel(model)
        ddp.__dict__["itself"] = ddp
        del ddp
        check_modules(list(model.parameters()))
    finally:
        gc.enable()


def test_tables_with_max_norm_are_refused() -> None:
    tables = [nn.Embedding(9, 2, max_norm=1.0), nn.Embedding(9, 2)]
    with pytest.raises(UsageError, match="max_norm"):
        check_modules(parameter for table in tables for parameter in table.parameters())
    check_modules(tables[1].parameters())


def test_proxies_that_raise_are_no_modules() -> None:
    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise RuntimeError("not loaded yet")

    proxies = [Proxy()]
    check_modules([nn.Parameter(torch.zeros(1))])
    assert proxies
