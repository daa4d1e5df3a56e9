"""The kernels' performance model: its interpreter computes what g++'s build does, and no kernel got worse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_model import DOCS, RESULTS, evaluate, with_table
from benchmarks.model_cases import CASES
from benchmarks.ptx import parse
from benchmarks.sass import CountingLauncher, code_of, disassembler, issued
from tests.cuda.host.launcher import HostLauncher
from zenps.kernels.gpu.rows import DeviceRows

ARCHIVED = json.loads(RESULTS.read_text(encoding="utf-8"))
RENEW = "if that is meant, run `python -m benchmarks.kernel_model`"
WORSE = 1.1

# Each interprets other sources; all of them take a minute.
SHORT = ("threshold_compact, dense, bfloat16", "merge, bfloat16")
every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm, of nvidia-cuda-nvdisasm")
@every_case
def test_no_kernel_got_worse(name: str) -> None:
    now, archived = evaluate(CASES[name]), ARCHIVED["entries"][name]
    for what in ("instructions", "bytes", "launches", "over_floor", "with_launches_over_floor"):
        value = getattr(now, what)
        assert value <= WORSE * archived[what], f"{what}: {value}, was {archived[what]}; {RENEW}"


def test_every_case_is_archived_and_in_the_table() -> None:
    assert list(ARCHIVED["entries"]) == list(CASES), RENEW
    page = DOCS.read_text(encoding="utf-8")
    assert with_table(page, ARCHIVED["entries"]) == page, RENEW


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm, of nvidia-cuda-nvdisasm")
@every_case
def test_the_interpreter_computes_what_the_kernels_do(name: str) -> None:
    results = []
    for launcher in (HostLauncher(), CountingLauncher()):
        torch.manual_seed(1)
        results.append(list(tensors_of(CASES[name].sampled().run(launcher))))
    assert len(results[0]) == len(results[1]) > 0
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected.isnan(), got.isnan())
        assert torch.allclose(expected.nan_to_num(), got.nan_to_num(), rtol=1e-2, atol=1e-2)


def tensors_of(result: Any) -> list[Tensor]:
    """A way's results; of rows on a device, those that are valid."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, slice):
        return []
    if isinstance(result, DeviceRows):
        count = int(result.count)
        return [result.positions[:count], result.values[:count], result.count]
    return [tensor for part in result for tensor in tensors_of(part)]


def test_instructions_are_counted_as_often_as_their_ptx_line() -> None:
    """A kernel without branches issues each machine instruction once for each warp."""
    code = code_of("bitmap_codec", "encode_coo<int32, int32>")
    once = issued(code, torch.ones(len(code.kernel.code), dtype=torch.int64).numpy())
    assert once == pytest.approx(len(code.lines), abs=3)


def test_ptx_is_parsed() -> None:
    text = """
.visible .entry add(
\t.param .u64 add_param_0
)
{
\t.reg .pred %p<2>;
\t.reg .b32 %r<3>;
\t.shared .align 8 .b8 sums[12];
\t.local .align 4 .b8 depot[8];
\tld.param.u32 %r1, [add_param_0];
$L_1:
\t@!%p1 bra $L_1; // again
\tret;
}
"""
    kernel = parse(text)["add"]
    assert (kernel.shared, kernel.shared_bytes, kernel.local_bytes) == ({"sums": 0}, 12, 8)
    assert kernel.registers == {"p0": "pred", "p1": "pred", "r0": "b32", "r1": "b32", "r2": "b32"}
    assert kernel.labels == {"$L_1": 1}
    load, branch, end = kernel.code
    assert (load.opcode, load.operands) == (("ld", "param", "u32"), ("%r1", "[add_param_0]"))
    assert (branch.guard, branch.negated, branch.line, end.opcode) == ("p1", True, 12, ("ret",))
