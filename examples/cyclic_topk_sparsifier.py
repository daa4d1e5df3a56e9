"""A custom sparsifier: in each step another rank chooses, and all ranks push the elements of its choice.

ScaleCom (Chen et al., NeurIPS 2020, https://arxiv.org/abs/2104.11125) has one rank in turn choose its local
top-k for all ("cyclic local top-k"), so that the union does not grow with the number of ranks. That needs a
message. ``CyclicTopK`` needs none: a rank pushes only the top-k of the range whose turn it is, and ranges go
round among the ranks, so no element is pushed by two ranks in one step.

Use it by its dotted path, with this folder on PYTHONPATH::

    ZENPS_SYNC_SPARSIFIER=cyclic_topk_sparsifier:CyclicTopK zenps launch ... -- python train.py

or install it as an entry point of the group ``zenps.sparsifier``, and use the entry point's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.sparsifiers import Sparsifier, Step


class CyclicTopK(Sparsifier):
    """The greatest elements of one of ``world`` equal ranges, another one in each step."""

    def select(self, values: Tensor, step: Step) -> Tensor:
        size, world = self.task.size, self.task.world
        turn = (self.task.rank + step.number) % world
        start, stop = turn * size // world, (turn + 1) * size // world
        wanted = min(max(1, round(step.density * size)), stop - start)
        chosen = values[start:stop].abs().nan_to_num(nan=torch.inf).topk(wanted, sorted=False).indices
        return chosen.sort().values + start
