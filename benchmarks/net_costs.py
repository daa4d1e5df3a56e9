"""Predicted cost of a scheme on a workload of ``bench_net.py``, by :mod:`zenps.schemes.costs`."""

from __future__ import annotations

from net_worker import BFLOAT16, GLOO
from workloads import Character

from zenps.schemes.costs import predict
from zenps.schemes.traffic import Cost, Links, Tensor


def expect(scheme: str, character: Character, workers: int, mbit: float) -> Cost:
    """Bytes and seconds of one synchronisation; for a number of workers that ``character`` has."""
    levels = [size for size in sorted(character.union_rows) if size <= workers]
    tensor = Tensor(
        rows=character.rows,
        columns=character.columns,
        item_bytes=2 if scheme == BFLOAT16 else 4,
        density=character.density,
        unions=tuple(character.union_rows[size] / character.rows for size in levels),
        skew=character.skew[workers],
        union_skew=character.union_skew[workers],
        blocks=character.blocks,
        union_blocks=character.union_blocks[workers],
        block_skew=character.block_skew[workers],
        union_block_skew=character.union_block_skew[workers],
    )
    links = Links(workers=workers, bytes_per_second=mbit * 1e6 / 8)
    return predict({GLOO: "allreduce", BFLOAT16: "zenps"}.get(scheme, scheme), tensor.permuted(links), links)
