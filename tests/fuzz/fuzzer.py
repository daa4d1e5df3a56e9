"""Fuzzer: runs every target on mutated inputs. ``python -m tests.fuzz.fuzzer --inputs 1000000``

Seeds are made from the messages of today, so that they stay valid; what once crashed something is kept in
``tests/fuzz/corpus/`` and is a seed, too. All is drawn from one number, so a run can be repeated. Inputs that
crash a target are left in ``build/fuzz/``, also the one that ends this process or is never done with.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import msgspec

from tests.fuzz.targets import FRESH_AFTER, SEEDS, TARGETS, Frames, reseal
from zenps.errors import ProtocolError

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("build/fuzz")
HANG_SECONDS = 1.0
STUCK_SECONDS = 600.0
"""How long 1000 inputs may take: some two seconds of processor time, of which a busy machine gives little."""
MAX_GROWTH_BYTES = 16 << 20
"""Allocators round up; a leak of 100 bytes for each of a million inputs would be 100 MB."""
# Lengths, types and numbers at the limits of what decoders accept.
TOKENS = (
    *(bytes([byte]) for byte in (0, 1, 0x7F, 0x80, 0x90, 0x91, 0xC0, 0xC1, 0xC3, 0xC7, 0xCB, 0xD4, 0xFF)),
    *(bytes([kind]) + b"\xff\xff\xff\xff" for kind in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)),
    *(b"\xcf" + number.to_bytes(8, "big") for number in (2**31, 2**32, 2**48, 2**62 - 1, 2**63, 2**64 - 1)),
    *(number.to_bytes(4, "little") for number in (0, 2**31 - 1, 2**31, 2**32 - 1)),
    b"\xd3" + b"\x80" + bytes(7),
)


@dataclass
class Report:
    inputs: int = 0
    seed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Counts by target and reason; the reason is ``taken`` if nothing was raised."""
    crashes: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0
    hangs: int = 0
    resident_before_bytes: int = 0
    resident_after_bytes: int = 0
    seconds: float = 0.0

    @property
    def growth_bytes(self) -> int:
        return self.resident_after_bytes - self.resident_before_bytes

    @property
    def good(self) -> bool:
        return not (self.crashes or self.hangs or self.growth_bytes > MAX_GROWTH_BYTES)


def kept(target: str) -> list[Frames]:
    """The inputs of the corpus for a target."""
    return [msgpack.unpackb(path.read_bytes()) for path in sorted((CORPUS / target).glob("*.msgpack"))]


def mutate(dice: random.Random, seeds: Sequence[Frames]) -> Frames:
    """One of the seeds with one to four things changed."""
    frames = list(dice.choice(seeds))
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(frames))
        data = bytearray(frames[place])
        at = dice.randint(0, len(data))
        match dice.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1 if data:
                data[at % len(data)] = dice.randrange(256)
            case 2:
                token = dice.choice(TOKENS)
                data[at : at + len(token)] = token
            case 3:
                data[at:at] = dice.choice(TOKENS)
            case 4:
                del data[at : at + dice.choice((1, 1, 2, 4, 8, 64))]
            case 5:
                end = at + dice.randint(1, 16)
                data[at:at] = data[at:end] * dice.choice((1, 2, 100))
            case 6:
                other = dice.choice(dice.choice(seeds))
                data[at:] = other[dice.randint(0, len(other)) :]
            case 7:
                frames.insert(place, bytes(data))
            case 8 if len(frames) > 1:
                del frames[place]
                continue
        frames[place] = bytes(data[:8192])
    return reseal(frames) if dice.randrange(4) else frames


def fuzz(
    inputs: int, seed: int, targets: Sequence[str] = tuple(TARGETS), stuck_seconds: float | None = None
) -> Report:
    """Runs ``inputs`` mutated inputs, or a few more, spread evenly over the targets.

    The process ends if ``FRESH_AFTER`` of them take longer than ``stuck_seconds``; None: they may.
    """
    report = Report(seed=seed)
    began = time.monotonic()
    for warm in (True, False):
        # The first inputs fill pools and caches; that does not count as growth.
        count = inputs // 10 if warm else inputs - inputs // 10
        if not warm:
            report.resident_before_bytes = _resident_bytes()
        for name in targets:
            dice = random.Random(f"{seed} {name} {warm}")
            _fuzz_one(name, -(-count // len(targets)), dice, report, stuck_seconds)
    report.resident_after_bytes = _resident_bytes()
    report.seconds = time.monotonic() - began
    return report


def _fuzz_one(
    name: str, count: int, dice: random.Random, report: Report, stuck_seconds: float | None
) -> None:
    seeds = SEEDS[name] + kept(name)
    with _last_input(name) as note:
        for number in range(count):
            if number % FRESH_AFTER == 0:
                target = TARGETS[name]()
                if stuck_seconds is not None:
                    faulthandler.dump_traceback_later(stuck_seconds, exit=True)
            frames = mutate(dice, seeds)
            note(frames)
            begin = time.thread_time()  # processor time: decoders never wait, and others do not count
            try:
                target(frames)
                report.refused[f"{name}: taken"] += 1
            except ProtocolError as error:
                report.refused[f"{name}: {error.reason}"] += 1
            except Exception:  # noqa: BLE001 - what it looks for
                report.crashes.append(f"{name}: {_keep(name, frames)}\n{traceback.format_exc()}")
                target = TARGETS[name]()
            seconds = time.thread_time() - begin
            report.slowest_seconds = max(report.slowest_seconds, seconds)
            if seconds > HANG_SECONDS:
                report.hangs += 1
                _keep(name, frames)
            report.inputs += 1


@contextlib.contextmanager
def _last_input(name: str) -> Iterator[Callable[[Frames], None]]:
    """Gives what writes an input to a file, which is left behind if the process ends in the midst of it."""
    path = FOUND / name / f"last-of-{os.getpid()}.msgpack"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:

        def note(frames: Frames) -> None:
            packed = msgpack.packb(frames)
            os.pwrite(file.fileno(), packed, 0)
            file.truncate(len(packed))

        try:
            yield note
        finally:
            path.unlink()


def _keep(name: str, frames: Frames) -> str:
    """Writes an input that crashed a target to a file; once the bug is fixed, the file goes to the corpus."""
    packed = msgpack.packb(frames)
    path = FOUND / name / f"{hashlib.sha256(packed).hexdigest()[:12]}.msgpack"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return str(path)


def _resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _lines(report: Report) -> Iterator[str]:
    yield f"{report.inputs} inputs in {report.seconds:.0f} s, seed {report.seed}"
    yield f"crashes: {len(report.crashes)}"
    yield f"hangs: {report.hangs}, the slowest input took {1000 * report.slowest_seconds:.1f} ms"
    growth_mib = report.growth_bytes / (1 << 20)
    yield f"resident memory: {growth_mib:+.1f} MiB on {report.resident_before_bytes >> 20} MiB"
    yield from (f"  {outcome}: {count}" for outcome, count in sorted(report.refused.items()))
    yield from report.crashes[:10]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, metavar="NAME", default=[*TARGETS])
    parser.add_argument("--stuck-seconds", type=float, default=STUCK_SECONDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = fuzz(options.inputs, options.seed, options.targets, options.stuck_seconds)
    faulthandler.cancel_dump_traceback_later()
    print("\n".join(_lines(report)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if report.good else 1


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
