"""Mutation tests of the kernels: planted faults, each of which the tests must notice.

A plant is an edit of a source's text, applied to a copy. If the source changes, the edit fails, whereas a
planted copy would become outdated. Each plant names the few tests that catch it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.cuda.host.build import BUILD, Sanitizer
from zenps.kernels.gpu.sources import folder

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
    tests: str
    """The part of ``test_<part>.py``, a colon, and pytest's ``-k``."""

    @property
    def arguments(self) -> list[str]:
        part, _, keyword = self.tests.partition(": ")
        return [str(TESTS / f"test_{part}.py"), "-k", keyword]


BARRIER: Final = "__syncthreads();"
BARRIER_TESTS: Final = {
    "bitmap.cuh": "bitmap_compact: every_position_of_a_tile",
    "bitmap_codec.cu": "bitmap_codec: codecs_bytes and 1025",
    "bitmap_compact.cu": "bitmap_compact: offsets_of_cuts",
    "radix_sort.cuh": "radix_sort: test_sizes and 1025 and int32",
    "sort_compact.cu": "sort_compact: offsets_of_cuts and 1025 or last_block",
    "scan.cuh": "scan: test",
    "stages.cuh": "scan: stage",
}
"""For each source with barriers, the tests that fail without one of them."""


def dropped_barriers() -> Iterator[Plant]:
    """A plant for each barrier of each source, which removes the barrier."""
    for file, tests in BARRIER_TESTS.items():
        lines = (folder() / file).read_text(encoding="utf-8").splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if BARRIER in line]
        for number, place in enumerate(places, 1):
            around = "".join(lines[place - 1 : place + 2])
            name = f"{file} without barrier {number}"
            yield Plant(name, file, around, around.replace(BARRIER, ""), RACES, tests)


PLANTS: Final = (
    *dropped_barriers(),
    # Atomics that are none
    Plant(
        "a ticket that two may draw",
        "scan.cuh",
        "atomicAdd(tickets, 1ull)",
        "(*tickets)++",
        RACES,
        "scan: taken",
    ),
    Plant(
        "bits set without an atomic",
        "bitmap_compact.cu",
        "found[item] = atomicOr(&bitmap[position[item] / WORD_BITS], bit);",
        "bitmap[position[item] / WORD_BITS] |= bit;",
        RACES,
        "bitmap_compact: test_sums and 1025 and float32",
    ),
    Plant(
        "rows added without an atomic",
        "packs.cuh",
        "atomicAdd(&sums[part], others[part]);",
        "sums[part] += others[part];",
        RACES,
        "bitmap_compact: test_sums and 1025 and float32",
    ),
    Plant(
        "partial sums that are not published",
        "sort_compact.cu",
        "add_acq_rel(&ended[chunk], mine)",
        "atomicAdd(&ended[chunk], mine)",
        RACES,
        "sort_compact: last_block and 31",
    ),
    Plant(
        "a stage that is not published",
        "stages.cuh",
        "add_acq_rel(&stages->done, tiles_done)",
        "atomicAdd(&stages->done, tiles_done)",
        RACES,
        "scan: stage",
    ),
    Plant(
        "a stage that is not looked for",
        "stages.cuh",
        "load_acquire(&stages->done)",
        "load_relaxed(&stages->done)",
        RACES,
        "scan: stage",
    ),
    Plant(
        "a tile's bits set without an atomic",
        "bitmap_codec.cu",
        "atomicOr(&tile_words[bit / WORD_BITS], 1u << (bit % WORD_BITS));",
        "tile_words[bit / WORD_BITS] |= 1u << (bit % WORD_BITS);",
        RACES,
        "bitmap_codec: codecs_bytes and 1025",
    ),
    Plant(
        "a look-back reads what is not published",
        "scan.cuh",
        "word = load_relaxed(&state->status[predecessor]);",
        "word = state->status[predecessor];",
        RACES,
        "scan: over_tiles",
    ),
    # Wrong bounds
    Plant(
        "one row too many is placed",
        "place.cu",
        "i < count; i += grid_threads()) {\n        const int64 row",
        "i <= count; i += grid_threads()) {\n        const int64 row",
        BOUNDS,
        "place: of_the_layout",
    ),
    Plant(
        "one position too many is sorted",
        "radix_sort.cuh",
        "i < count ? positions[i] : Position(-1)",
        "i <= count ? positions[i] : Position(-1)",
        BOUNDS,
        "radix_sort: test_sizes and 33 and int32",
    ),
    Plant(
        "the row before the first",
        "sort_compact.cu",
        "(i == 0 || sorted[i - 1]",
        "(sorted[i - 1]",
        BOUNDS,
        "sort_compact: stated_bits and 33 and float32",
    ),
    Plant(
        "more bits than rows were announced",
        "bitmap_codec.cu",
        "if (number < rows) ",
        "",
        BOUNDS,
        "bitmap_codec: wrong_number_of_rows",
    ),
    Plant(
        "a stage with room for one more",
        "bitmap.cuh",
        "words[word] && rank < end",
        "words[word] && rank <= end",
        COMPARED,
        "bitmap_compact: every_position_of_a_tile",
    ),
    Plant(
        "the last pack of a gradient and its residual",
        "threshold_compact.cu",
        "if (first + LANES <= size) return",
        "if (first < size) return",
        BOUNDS,
        "threshold_compact: test_sizes and 1025",
    ),
    Plant(
        "marks of a warp that has not written them",
        "threshold_compact.cu",
        "__syncwarp();",
        "",
        RACES,
        "threshold_compact: several_tiles and 1.0 and float32",
    ),
    Plant(
        "more elements than there is room for",
        "threshold_compact.cu",
        "if (i >= capacity) return;",
        "if (i > capacity) return;",
        COMPARED,
        "threshold_compact: nothing_else_is_touched",
    ),
    Plant(
        "an element behind the range",
        "threshold_compact.cu",
        "index < stop",
        "index <= stop",
        COMPARED,
        "threshold_compact: any_gradient",
    ),
    Plant(
        "an element that is sent and kept",
        "threshold_compact.cu",
        "if (takes) residual[index] = 0.0f;",
        "",
        COMPARED,
        "threshold_compact: test_sizes",
    ),
    Plant(
        "words that are not cleared",
        "place.cu",
        "cleared[i] = 0;",
        "",
        COMPARED,
        "place: of_the_layout",
    ),
    Plant(
        "a cut counted with the tile before",
        "sort_compact.cu",
        "begin ? upper_bound(runs.cuts, runs.cut_count, sorted[begin - 1]) : 0",
        "begin ? lower_bound(runs.cuts, runs.cut_count, sorted[begin - 1]) : 0",
        COMPARED,
        "sort_compact: offsets_of_cuts and 5000",
    ),
    # Wrong results
    Plant(
        "tiles in the order of blocks",
        "scan.cuh",
        "int64(atomicAdd(tickets, 1ull))",
        "int64(blockIdx.x)",
        COMPARED,
        "scan: over_tiles",
    ),
    Plant(
        "a stage that does not wait",
        "stages.cuh",
        "< stage * tiles)",
        "< 1)",
        COMPARED,
        "scan: stage",
    ),
    Plant(
        "a look-back that does not wait",
        "scan.cuh",
        "__all_sync(ALL_LANES, word >= TOTAL_READY)",
        "true",
        COMPARED,
        "scan: over_tiles",
    ),
    Plant(
        "a look-back that counts tiles twice",
        "scan.cuh",
        "lane <= nearest ?",
        "lane <= nearest + WARP ?",
        COMPARED,
        "scan: over_tiles",
    ),
    Plant(
        "equal positions of a warp in the order of their last",
        "radix_sort.cuh",
        "__popc(alike & lanes_until) - 1;",
        "__popc(alike & ~lanes_until);",
        COMPARED,
        "radix_sort: test_sizes and 1025",
    ),
    Plant(
        "a count that the last lane has already raised",
        "radix_sort.cuh",
        "before = *counted;\n        __syncwarp();",
        "before = *counted;",
        RACES,
        "radix_sort: test_sizes and 1025",
    ),
    Plant(
        "a look-back that takes counts before they are there",
        "radix_sort.cuh",
        "if (word[k] < COUNT_READY) break;",
        "",
        COMPARED,
        "radix_sort: waits_for_what and tile_before",
    ),
    Plant(
        "what fills the last tile comes first",
        "radix_sort.cuh",
        "Position(-1);",
        "Position(0);",
        COMPARED,
        "radix_sort: test_sizes and 1025",
    ),
    Plant(
        "π does not walk on",
        "keyspace.cuh",
        "} while (value >= Word(at.granules));\n    return value;\n}\n\n// π⁻¹.",
        "} while (false);\n    return value;\n}\n\n// π⁻¹.",
        BOUNDS,
        "place: of_the_layout",
    ),
    Plant(
        "0.0 where -0.0 changes nothing",
        "common.cuh",
        "return -Sum(0);",
        "return Sum(0);",
        COMPARED,
        "sort_compact: lone_row",
    ),
    Plant(
        "ties are rounded away from zero",
        "common.cuh",
        "0x7fffu + ((bits >> 16) & 1u)",
        "0x8000u",
        COMPARED,
        "sort_compact: rounded_once and bfloat16",
    ),
    Plant(
        "partial sums that no block goes on with",
        "sort_compact.cu",
        "with_first ? first : first + 1",
        "first + 1",
        COMPARED,
        "sort_compact: last_block and 5000",
    ),
    Plant(
        "a segment counted one too far",
        "sort_compact.cu",
        "(2u << lane) - 1",
        "(1u << lane) - 1",
        COMPARED,
        "sort_compact: stated_bits and 33 and float32",
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
