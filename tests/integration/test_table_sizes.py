"""Push cost by table size: a push costs what its rows cost, in a table of any size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from zenps.wire.sockets import send_frames
from zenps.worker.transport import server_sockets as servers

KIB = 1 << 10
TABLES = (1 << 20, 100_000_000, 400_000_000, 1 << 34, 1 << 40)
ROUNDS = 4


def make_rows(table: int, columns: int, count: int, seed: int) -> Tensor:
    """Unsorted indices, some of them duplicates."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(table, (1, count), generator=generator)
    indices[0, : count // 10] = indices[0, count // 10 : count // 10 * 2]
    values = torch.randn(count, columns, generator=generator)
    return torch.sparse_coo_tensor(indices, values, (table, columns), check_invariants=True)


def count_messages(tables: Sequence[int]) -> dict[int, list[int]]:
    """The pushes of this worker in each round of each table."""
    count = 0

    def send_counted(*args: object) -> None:
        nonlocal count
        count += 1
        send_frames(*args)  # type: ignore[arg-type]

    servers.send_frames = send_counted  # type: ignore[assignment,attr-defined]
    messages: dict[int, list[int]] = {}
    for table in tables:
        for step in range(ROUNDS):
            count = 0
            zps.push_pull(make_rows(table, 32, 10_000, 8 * step + zps.rank()), f"table of {table}")
            messages.setdefault(table, []).append(count)
    return messages


def test_a_push_takes_as_many_messages_into_a_table_of_any_size() -> None:
    with Cluster() as cluster:
        counted = cluster.run(count_messages, TABLES)
        cluster.drain()
    assert counted == [dict.fromkeys(TABLES, [2] * ROUNDS)] * 2


def push_many(table: int, count: int, schemes_bits: bool) -> list[Tensor]:
    results = []
    for step in range(2):
        rows = make_rows(table, 8, count // (1 + zps.rank()), 8 * step + zps.rank())
        results.append(zps.push_pull(rows, "table", average=schemes_bits))
    return results


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"cluster.same_host": "tcp", "sync.codec": "bitmap"}, marks=pytest.mark.long)],
    ids=str,
)
def test_rows_that_are_too_many_for_a_message_travel_in_fragments(settings: dict[str, object]) -> None:
    """The first round of a table expects no rows: its only chunk has megabytes, a message 64 KiB."""
    table = (1 << 40) if not settings else 30_000
    least = {"cluster.max_message_bytes": 64 * KIB, "sync.chunk_bytes": 16 * KIB}
    with Cluster(settings=least | settings) as cluster:
        pulled = cluster.run(push_many, table, 20_000, True)
        cluster.drain()
    for step in range(2):
        pushed = [make_rows(table, 8, 20_000 // (1 + rank), 8 * step + rank) for rank in range(2)]
        expected = reduce_in_rank_order(pushed, average=True)
        for results in pulled:
            assert_same_bits(results[step], expected)
