"""Which models ``sync.consistency = ds-sync`` refuses to average."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

import zenps as zps
from tests.worker.test_prefixes import AveragingWorld
from zenps.errors import UsageError
from zenps.worker.process import PROCESS


def test_two_buffers_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would not be averaged."""
    monkeypatch.setattr(PROCESS, "_world", AveragingWorld())
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers = [*first.named_buffers(), *second.named_buffers()]
    with pytest.raises(UsageError, match="named_buffers: two tensors have the name 'running_mean'"):
        zps.DistributedOptimizer(SGD(first.parameters()), first.named_parameters(), named_buffers=buffers)
