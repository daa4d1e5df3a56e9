"""Tests of the host runtime itself: its results, the kernels that it aborts, and its sanitizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cuda.host.build import SAMPLES, Sanitizer
from tests.cuda.host.launcher import SANITIZER, HostLauncher, KernelError
from tests.cuda.host.rerun import Rerun
from zenps.kernels.gpu.launcher import scan_state

WARP = 32

FAULTS = {
    "DIFFERENT_COLLECTIVES": r"but thread \d+ calls",
    "EXITED_LANE": "of which 0x20 have exited",
    "MISSING_LANE": "of which 0xffff0000 have exited or never were",
    "LEAVES_ITSELF_OUT": "which leaves itself out",
    "EXITED_THREAD": "barrier of (a|the) block",
    "DIFFERENT_BARRIERS": "another kind of barrier",
    "DEADLOCK": "deadlock: waits in __syncwarp with mask 0x",
    "BARRIER_DEADLOCK": "deadlock",
    "ENDLESS_LOOP": "waits in a loop for what never comes",
    "SHARED_TOO_LARGE": "more than 48 KiB",
    "SHARED_OVERRUN": "32 bytes was written beyond its end",
    "TRAP": r"__trap\(\)",
}

KERNELS = (
    "turn_around<true, true>",
    "turn_around<false, true>",
    "turn_around<true, false>",
    *(f"shuffle<{kind}>" for kind in ("int32", "uint32", "int64", "uint64", "float", "double")),
    "vote",
    "part",
    *(f"count<{kind}>" for kind in ("int32", "uint32", "uint64")),
    "sum<float>",
    "sum<double>",
    "claim<true>",
    "claim<false>",
    "look_back_chain<true>",
    "look_back_chain<false>",
    "overrun",
    "misalign",
    *(f"misbehave<{fault}>" for fault in FAULTS),
)


@pytest.fixture(params=range(3 if SANITIZER is Sanitizer.NONE else 1))
def samples(request: pytest.FixtureRequest) -> HostLauncher:
    return samples_launcher(request.param)


def samples_launcher(seed: int = 0) -> HostLauncher:
    return HostLauncher(seed=seed, folder=SAMPLES, expressions={"samples": KERNELS})


def longs(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def turn_around(launcher: HostLauncher, kernel: str, times: int = 3) -> bool:
    numbers = torch.arange(6 * 96)
    launcher.launch("samples", kernel, 6, 96, [numbers, times])
    return torch.equal(numbers, torch.arange(6 * 96).view(6, 96).flip(1).flatten())


def test_barriers_keep_steps_apart(samples: HostLauncher) -> None:
    assert turn_around(samples, "turn_around<true, true>")


def test_a_missing_barrier_is_noticed() -> None:
    assert not all(turn_around(samples_launcher(seed), "turn_around<false, true>") for seed in range(3))


DTYPES = {
    "int32": torch.int32,
    "uint32": torch.int32,
    "int64": torch.int64,
    "uint64": torch.int64,
    "float": torch.float32,
    "double": torch.float64,
}


@pytest.mark.parametrize("kind", DTYPES)
def test_shuffles(samples: HostLauncher, kind: str) -> None:
    threads = torch.arange(2 * 64)
    out = torch.zeros(len(threads), 5, dtype=DTYPES[kind])
    samples.launch("samples", f"shuffle<{kind}>", 2, 64, [out])
    lane = threads % WARP
    sources = torch.stack(
        [
            threads - lane + 3,
            torch.where(lane >= 2, threads - 2, threads),
            torch.where(lane < 30, threads + 2, threads),
            threads ^ 1,
            threads - lane % 8 + 3,
        ],
        dim=1,
    )
    assert torch.equal(out, (sources * 1000003).to(out.dtype))


@pytest.mark.parametrize("numbers", [[1], [2], [1, 2], [5, 5, 4, 3, 2, 2, 1]], ids=str)
def test_votes(samples: HostLauncher, numbers: list[int]) -> None:
    threads = 3 * 64
    given = torch.tensor(numbers).repeat(threads)[:threads].contiguous()
    out = longs(threads, 6)
    samples.launch("samples", "vote", 3, 64, [given, out])
    for thread, row in enumerate(out.tolist()):
        warp = given[thread // WARP * WARP :][:WARP]
        block = given[thread // 64 * 64 :][:64]
        odd, odd_of_block = warp & 1, block & 1
        lanes = [
            sum(1 << lane for lane in range(WARP) if mask[lane]) for mask in (odd, warp == given[thread])
        ]
        assert row == [
            lanes[0],
            int(odd.any()),
            int(odd.all()),
            lanes[1],
            int(odd_of_block.sum()),
            int(odd_of_block.any()) + 2 * int(odd_of_block.all()),
        ]


def test_halves_of_a_warp_may_diverge(samples: HostLauncher) -> None:
    out = longs(64)
    samples.launch("samples", "part", 1, 64, [out])
    expected = torch.arange(64)
    for turn in range(4):
        summed = expected + expected[torch.arange(64) ^ 8]
        expected = torch.where((torch.arange(64) % WARP < 16) & (turn > 0), expected, summed)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["int32", "uint32", "uint64"])
def test_atomics_lose_nothing(samples: HostLauncher, kind: str) -> None:
    counter, greatest, bits = (torch.zeros(1, dtype=DTYPES[kind]) for _ in range(3))
    samples.launch("samples", f"count<{kind}>", 5, 64, [counter, greatest, bits])
    assert [int(counter), int(greatest), int(bits)] == [320, 319, 2**31 - 1]


@pytest.mark.parametrize("kind", ["float", "double"])
def test_atomic_sums(samples: HostLauncher, kind: str) -> None:
    total = torch.zeros(1, dtype=DTYPES[kind])
    samples.launch("samples", f"sum<{kind}>", 5, 64, [total])
    assert float(total) == 160


@pytest.mark.parametrize("blocks", [1, 4, 100])
def test_a_look_back_waits_for_the_blocks_before(samples: HostLauncher, blocks: int) -> None:
    before = longs(blocks)
    samples.launch(
        "samples", "look_back_chain<true>", blocks, 64, [scan_state(blocks, before.device), before]
    )
    tiles = torch.arange(blocks)
    assert torch.equal(before, tiles * (tiles + 1) // 2)


def test_waiting_for_a_block_that_cannot_start_is_found(samples: HostLauncher) -> None:
    state, before = scan_state(100, torch.device("cpu")), longs(100)
    with pytest.raises(KernelError, match="waits in a loop"):
        samples.launch("samples", "look_back_chain<false>", 100, 32, [state, before])


def test_schedules_differ_by_seed_and_nothing_else() -> None:
    def claimed(seed: int) -> list[int]:
        slots = longs(64)
        samples_launcher(seed).launch("samples", "claim<true>", 1, 64, [slots, 64])
        assert sorted(slots.tolist()) == [*range(1, 65)]
        return slots.tolist()

    assert claimed(1) == claimed(1)
    assert claimed(1) != claimed(2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_misbehaves_is_aborted(samples: HostLauncher, fault: str) -> None:
    block = 16 if fault == "MISSING_LANE" else 32
    with pytest.raises(KernelError, match=rf"^misbehave<{fault}>: block \d+, thread \d+: .*{FAULTS[fault]}"):
        samples.launch("samples", f"misbehave<{fault}>", 6, block, [longs(32)])
    assert turn_around(samples, "turn_around<true, true>"), "the next launch suffered"


def test_guard_zones(samples: HostLauncher) -> None:
    numbers = samples.guarded(longs(50))
    samples.launch("samples", "overrun", 1, 64, [numbers, 50, 0])
    assert numbers.tolist() == [*range(50)]
    with pytest.raises(KernelError, match="wrote behind a tensor of 400 bytes"):
        samples.launch("samples", "overrun", 1, 64, [numbers, 50, 1])


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([longs(50)], "expected 3 arguments, got 1"),
        ([longs(50), longs(1), 0], "argument 1 .* parameter 'i'"),
        ([longs(50), 1 << 63, 0], "argument 1 .* parameter 'i'"),
        ([torch.zeros(50, dtype=torch.complex128), 50, 0], "argument 0 .* parameter '8'"),
        ([longs(50, 2)[:, 0], 50, 0], "argument 0 .* parameter '8'"),
    ],
)
def test_arguments_that_a_gpu_would_misread(args: list[Tensor | int], problem: str) -> None:
    with pytest.raises(KernelError, match=problem):
        samples_launcher().launch("samples", "overrun", 1, 64, args)


def test_no_blocks_are_no_launch() -> None:
    samples_launcher().launch("samples", "overrun", 0, 64, [])


def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "bare.cu").write_text("__global__ void bare(long long* out) { __shared__ int x; *out = x; }")
    with pytest.raises(RuntimeError, match="__shared__"):
        HostLauncher(folder=tmp_path, expressions={}).launch("bare", "bare", 1, 32, [longs(1)])


# ---------------------------------------------------------------------------------------------------------
# The sanitizers, in a process of their own. The tests named planted_… fail only there.


@pytest.fixture(scope="module", params=[Sanitizer.THREAD, Sanitizer.ADDRESS])
def sanitized(request: pytest.FixtureRequest) -> Iterator[tuple[Sanitizer, Rerun]]:
    with Rerun(request.param) as rerun:
        yield request.param, rerun


planted = pytest.mark.skipif(SANITIZER is Sanitizer.NONE, reason="for the sanitizers")


@planted
def test_planted_race_of_claims() -> None:
    for seed in range(4):
        samples_launcher(seed).launch("samples", "claim<false>", 4, 32, [longs(256), 256])


@planted
def test_planted_first_barrier_missing() -> None:
    turn_around(samples_launcher(), "turn_around<false, true>")


@planted
def test_planted_second_barrier_missing() -> None:
    turn_around(samples_launcher(), "turn_around<true, false>")


@planted
def test_planted_overrun() -> None:
    samples_launcher().launch("samples", "overrun", 1, 64, [longs(50), 50, 1])


@planted
def test_planted_misalignment() -> None:
    samples_launcher().launch(
        "samples", "misalign", 1, 1, [torch.zeros(8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)]
    )


RIGHT = "barriers or shuffles or votes or halves or atomic or look_back or schedules or guard"

FOUND = {
    Sanitizer.THREAD: {
        "race_of_claims": "data race",
        "first_barrier_missing": "data race",
        "second_barrier_missing": "data race",
    },
    Sanitizer.ADDRESS: {
        "overrun": "heap-buffer-overflow",
        "misalignment": "misaligned address",
    },
}


@pytest.mark.long
@pytest.mark.skipif(SANITIZER is not Sanitizer.NONE, reason="starts the sanitizers itself")
def test_sanitizers_find_what_was_planted_and_nothing_else(sanitized: tuple[Sanitizer, Rerun]) -> None:
    sanitizer, rerun = sanitized
    right = rerun.run([__file__, "-k", RIGHT])
    assert right.passed, right.output
    for plant, report in FOUND[sanitizer].items():
        outcome = rerun.run([f"{__file__}::test_planted_{plant}"])
        assert outcome.reported, outcome.output
        assert report in outcome.output
        assert "samples.cu:" in outcome.output, "the report does not name the line"
