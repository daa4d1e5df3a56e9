"""Faults planted in the kernels, each of which the tests must notice.

A plant is an edit of a source's text, applied to a copy: so that it stands beside what it breaks, and a source
that changed makes it fail, not rot. Each names tests that catch it, as few as will do.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, NamedTuple

from tests.cuda.host.build import BUILD, Sanitizer
from zenps.kernels.sources import folder

__all__ = ["PLANTS", "Plant", "sow"]

TESTS = Path(__file__).parent

# By what a plant is caught: the tests' own comparisons, or one of the sanitizers' reports.
COMPARED, RACES, BOUNDS = Sanitizer.NONE, Sanitizer.THREAD, Sanitizer.ADDRESS


class Plant(NamedTuple):
    """``new`` instead of ``old`` in ``cuda/<file>``."""

    name: str
    file: str
    old: str
    new: str
    caught_by: Sanitizer
    tests: tuple[str, ...]
    """pytest's arguments; files without their folder."""

    @property
    def arguments(self) -> list[str]:
        file, *rest = self.tests
        return [str(TESTS / file), *rest]


def dropped(name: str, file: str, around: str, *tests: str) -> Plant:
    """A barrier that is left out. ``around`` are the lines about it, with the barrier as ``…``."""
    barrier = "__syncthreads();"
    return Plant(name, file, around.replace("…", barrier), around.replace("…", ""), RACES, tests)


PLANTS: Final = (
    # The barriers, one after the other
    dropped(
        "block sum, after the warps' sums",
        "scan.cuh",
        "warp_sums[warp] = before + value;\n    …",
        "test_scan.py",
        "-k",
        "block_sums",
    ),
    dropped(
        "block sum, before the next",
        "scan.cuh",
        "…\n    return warps_before + before;",
        "test_scan.py",
        "-k",
        "block_sums",
    ),
    dropped(
        "ticket, before it is read",
        "scan.cuh",
        "atomicAdd(&state->tickets, 1ull));\n    …",
        "test_scan.py",
        "-k",
        "taken",
    ),
    dropped(
        "ticket, before the next",
        "scan.cuh",
        "const int64 taken = *tile;\n    …",
        "test_scan.py",
        "-k",
        "taken",
    ),
    dropped(
        "sum over tiles, before it is read",
        "scan.cuh",
        "…\n    const int64 before = *shared_before;",
        "test_scan.py",
        "-k",
        "over_tiles",
    ),
    dropped(
        "sum over tiles, before the next",
        "scan.cuh",
        "const int64 before = *shared_before;\n    …",
        "test_scan.py",
        "-k",
        "over_tiles",
    ),
    dropped(
        "listed bits, before they are used",
        "bitmap.cuh",
        "…\n        for (uint32 at = begin",
        "test_bitmap_compact.py",
        "-k",
        "every_position_of_a_tile",
    ),
    dropped(
        "listed bits, before the next",
        "bitmap.cuh",
        "use(at, listed[at - begin]);\n        …",
        "test_bitmap_compact.py",
        "-k",
        "every_position_of_a_tile",
    ),
    dropped(
        "bitmap's tile, before bits are set",
        "bitmap_codec.cu",
        "…\n    for (int64 i = bounds[0]",
        "test_bitmap_codec.py",
        "-k",
        "codecs_bytes and 1025",
    ),
    dropped(
        "bitmap's tile, before it is written",
        "bitmap_codec.cu",
        "…\n    const int64 first = blockIdx.x * TILE_WORDS;",
        "test_bitmap_codec.py",
        "-k",
        "codecs_bytes and 1025",
    ),
    dropped(
        "dense scan, before the first pieces are read",
        "scan_compact.cu",
        "…\n    while (tile < tiles)",
        "test_scan_compact.py",
        "-k",
        "test_sizes and 1025",
    ),
    dropped(
        "dense scan, before rows are written",
        "scan_compact.cu",
        "…\n            const int64 begin = *shared_before",
        "test_scan_compact.py",
        "-k",
        "several_tiles and 20002 and float32",
    ),
    dropped(
        "dense scan, before the next window",
        "scan_compact.cu",
        "values[begin + i] = staged[i];\n            }\n            …",
        "test_scan_compact.py",
        "-k",
        "several_tiles and 20002 and float32",
    ),
    dropped(
        "dense claims, before non-zeros are read",
        "hash_compact.cu",
        "…\n\n    const Table<Key> table",
        "test_hash_compact.py",
        "-k",
        "dense_sizes and 1025 and float32",
    ),
    # Atomics that are none
    Plant(
        "a ticket that two may draw",
        "scan.cuh",
        "atomicAdd(&state->tickets, 1ull)",
        "state->tickets++",
        RACES,
        ("test_scan.py", "-k", "taken"),
    ),
    Plant(
        "a slot is looked at, then written",
        "hash_compact.cu",
        "return held == EMPTY<Key> ? atomicCAS(slots + slot, EMPTY<Key>, position) : held;",
        "if (held == EMPTY<Key>) slots[slot] = position;\n        return held;",
        RACES,
        ("test_hash_compact.py", "-k", "test_sizes and 1025"),
    ),
    Plant(
        "bits set without an atomic",
        "bitmap_compact.cu",
        "found[item] = atomicOr(&bitmap[position[item] / WORD_BITS], bit);",
        "bitmap[position[item] / WORD_BITS] |= bit;",
        RACES,
        ("test_bitmap_compact.py", "-k", "test_sums and 1025 and float32"),
    ),
    Plant(
        "rows added without an atomic",
        "bitmap_compact.cu",
        "atomicAdd(&sums[target * columns + cell.pack * LANES + lane], row.lane[lane]);",
        "sums[target * columns + cell.pack * LANES + lane] += row.lane[lane];",
        RACES,
        ("test_bitmap_compact.py", "-k", "test_sums and 1025 and float32"),
    ),
    Plant(
        "hashed rows added without an atomic",
        "hash_compact.cu",
        "atomicAdd(&sums[rank[item] * columns + column[item]], value[item]);",
        "sums[rank[item] * columns + column[item]] += value[item];",
        RACES,
        ("test_hash_compact.py", "-k", "test_sizes and 1025"),
    ),
    Plant(
        "a tile's bits set without an atomic",
        "bitmap_codec.cu",
        "atomicOr(&tile_words[bit / WORD_BITS], 1u << (bit % WORD_BITS));",
        "tile_words[bit / WORD_BITS] |= 1u << (bit % WORD_BITS);",
        RACES,
        ("test_bitmap_codec.py", "-k", "codecs_bytes and 1025"),
    ),
    Plant(
        "a look-back reads what is not published",
        "scan.cuh",
        "word = load_relaxed(&state->status[predecessor]);",
        "word = state->status[predecessor];",
        RACES,
        ("test_scan.py", "-k", "over_tiles"),
    ),
    # Wrong bounds
    Plant(
        "one row too many is placed",
        "place.cu",
        "if (i >= count) return;\n    const int64 row",
        "if (i > count) return;\n    const int64 row",
        BOUNDS,
        ("test_place.py", "-k", "of_the_layout"),
    ),
    Plant(
        "one row too many claims",
        "hash_compact.cu",
        "if (row < rows) {",
        "if (row <= rows) {",
        BOUNDS,
        ("test_hash_compact.py", "-k", "test_sizes and 1025"),
    ),
    Plant(
        "the row before the first",
        "sort_compact.cu",
        "(i == 0 || sorted[i - 1]",
        "(sorted[i - 1]",
        BOUNDS,
        ("test_sort_compact.py", "-k", "stated_bits and 33 and float32"),
    ),
    Plant(
        "the tensor's last pack",
        "scan_compact.cu",
        "if (row + LANES <= rows)",
        "if (row < rows)",
        BOUNDS,
        ("test_scan_compact.py", "-k", "test_sizes and 1025"),
    ),
    Plant(
        "more bits than rows were announced",
        "bitmap_codec.cu",
        "if (before + bit_rank < rows) ",
        "",
        BOUNDS,
        ("test_bitmap_codec.py", "-k", "wrong_number_of_rows"),
    ),
    Plant(
        "a target one beyond the last row",
        "scatter.cu",
        "target < out_rows",
        "target <= out_rows",
        COMPARED,
        ("test_scatter.py", "-k", "target_outside"),
    ),
    Plant(
        "a stage with room for one more",
        "scan_compact.cu",
        "if (place < STAGE)",
        "if (place <= STAGE)",
        COMPARED,
        ("test_scan_compact.py", "-k", "several_tiles and 20002 and float32"),
    ),
    Plant(
        "rows beyond the capacity",
        "hash_compact.cu",
        "held[item] == EMPTY<Key> || i >= capacity",
        "held[item] == EMPTY<Key>",
        BOUNDS,
        ("test_hash_compact.py", "-k", "more_positions_than_capacity"),
    ),
    # Wrong results
    Plant(
        "tiles in the order of blocks",
        "scan.cuh",
        "int64(atomicAdd(&state->tickets, 1ull))",
        "int64(blockIdx.x)",
        COMPARED,
        ("test_scan.py", "-k", "over_tiles"),
    ),
    Plant(
        "a look-back that does not wait",
        "scan.cuh",
        "__all_sync(ALL_LANES, word >= TOTAL_READY)",
        "true",
        COMPARED,
        ("test_scan.py", "-k", "over_tiles"),
    ),
    Plant(
        "a look-back that counts tiles twice",
        "scan.cuh",
        "lane <= nearest ?",
        "lane <= nearest + WARP ?",
        COMPARED,
        ("test_scan.py", "-k", "over_tiles"),
    ),
    Plant(
        "position 0 is no position",
        "hash_compact.cu",
        "constexpr Key EMPTY = ~Key(0);",
        "constexpr Key EMPTY = Key(0);",
        COMPARED,
        ("test_hash_compact.py", "-k", "first_and_last"),
    ),
    Plant(
        "π does not walk on",
        "keyspace.cuh",
        "} while (value >= at.granules);\n    return value;\n}\n\n// π⁻¹",
        "} while (false);\n    return value;\n}\n\n// π⁻¹",
        COMPARED,
        ("test_place.py", "-k", "of_the_layout"),
    ),
    Plant(
        "0.0 where -0.0 changes nothing",
        "common.cuh",
        "return -Sum(0);",
        "return Sum(0);",
        COMPARED,
        ("test_sort_compact.py", "-k", "lone_row"),
    ),
    Plant(
        "ties are rounded away from zero",
        "common.cuh",
        "0x7fffu + ((bits >> 16) & 1u)",
        "0x8000u",
        COMPARED,
        ("test_sort_compact.py", "-k", "rounded_once and bfloat16"),
    ),
    Plant(
        "a segment counted one too far",
        "sort_compact.cu",
        "(2u << lane) - 1",
        "(1u << lane) - 1",
        COMPARED,
        ("test_sort_compact.py", "-k", "stated_bits and 33 and float32"),
    ),
)


def sow(plant: Plant) -> Path:
    """The folder of a copy of the sources that has the plant.

    Raises:
        ValueError: the source does not have the text that the plant replaces, or has it more than once.
    """
    original = (folder() / plant.file).read_text(encoding="utf-8")
    if original.count(plant.old) != 1:
        raise ValueError(f"{plant.name}: expected {plant.old!r} once in {plant.file}; renew the plant")
    copy = BUILD / "plants" / plant.name.replace(" ", "-")
    shutil.copytree(folder(), copy, dirs_exist_ok=True)
    (copy / plant.file).write_text(original.replace(plant.old, plant.new), encoding="utf-8")
    return copy
