"""Quantized gradients: the same sums by every way and ring, and nothing is lost for good."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from tests.integration.reference import assert_same_bits
from tests.worker.encode.test_transfer import (
    ACCELERATOR,
    KERNELS,
    NAN,
    POOL,
    absorb_all,
    aggregate,
    encoded_by,
    make_layout,
    make_ranges,
    on_the_device,
    prepared,
    rows_of,
    sparse,
)
from zenps.codecs.base import ValueCodec, ValueForm
from zenps.codecs.values import RUN, VALUE_CODECS, value_codec
from zenps.config.settings import Config, CudaConfig, SyncConfig
from zenps.errors import ProtocolError, TensorError, UsageError
from zenps.partition.ring import rebalance
from zenps.schemes.registry import scheme_of
from zenps.wire.scheduler_messages import Member, View
from zenps.wire.tensors import copied_bytes
from zenps.worker.core.request import Options, Purpose, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.statistics import Progress
from zenps.worker.core.transfer import Answer, EncodedTensor, Sharding, Transfer
from zenps.worker.encode.dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from zenps.worker.encode.gpu import StagedSparse
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.quantizer import Quantizer, Unchanged
from zenps.worker.encode.reshard import reshard
from zenps.worker.encode.sharder import Sharder
from zenps.worker.encode.sparse import SparseTransfer
from zenps.worker.encode.staged import StagedDense
from zenps.worker.encode.streams import LONGEST_NAME
from zenps.worker.training.gradients.buckets import Bucket

ROWS, STEPS, RANKS = 600, 6, 3
STEP_OF_PUSHES = 3  # what `aggregate` calls it

Begin = Callable[[Tensor, Quantizer], Transfer]

every_form = pytest.mark.parametrize("form", VALUE_CODECS)


def table_way(servers: Sequence[int], chunks: int, partition: str = "balanced", granule: int = 1) -> Begin:
    layout = make_layout(partition, ROWS, granule, servers, 1 << 20)
    sharding = Sharding(layout, chunks, servers[0])
    return lambda tensor, quantizer: SparseTransfer(tensor, sharding, "auto", KERNELS, quantizer)


def table_on_a_device(servers: Sequence[int], chunks: int) -> Begin:
    sharding = Sharding(make_layout("balanced", ROWS, 1, servers, 0), chunks, servers[0])
    settings = CudaConfig()
    return lambda tensor, quantizer: prepared(
        StagedSparse(tensor, sharding, "coo", settings, on_the_device, ACCELERATOR, quantizer)
    )


def vector_sharding(servers: Sequence[int], chunks: int) -> Sharding:
    return Sharding(make_ranges(ROWS, servers), chunks, servers[0])


def vector_way(sharding: Sharding) -> Begin:
    return lambda tensor, quantizer: DenseTransfer(tensor, sharding, POOL, True, quantizer)


def whole(tensor: Tensor, quantizer: Quantizer) -> Transfer:
    return WholeTransfer(tensor, Sharding(None, 1, 0), True, quantizer)


def on_a_device(sharding: Sharding) -> Begin:
    pool = ACCELERATOR.pinned
    return lambda tensor, quantizer: prepared(
        StagedDense(tensor, sharding, True, quantizer, ACCELERATOR, pool)
    )


WAYS: dict[str, tuple[int, dict[str, Begin]]] = {
    "table": (
        5,
        {
            "one server": table_way([0], 1),
            "three servers": table_way([2, 5, 9], 4),
            "by ranges": table_way([0, 1], 2, "parallel"),
            "device": table_on_a_device([0, 1], 3),
        },
    ),
    "elements": (
        1,
        {
            "one server": table_way([0], 1, granule=32),
            "three servers": table_way([0, 1, 2], 2, granule=32),
            "device": table_on_a_device([0, 1], 3),
        },
    ),
    "vector": (
        0,
        {
            "one server": vector_way(vector_sharding([0], 1)),
            "two servers": vector_way(vector_sharding([0, 1], 2)),
            "five servers": vector_way(vector_sharding([0, 1, 2, 5, 9], 1)),
            "device": on_a_device(vector_sharding([0, 4], 1)),
            "device, three servers": on_a_device(vector_sharding([0, 4, 5], 2)),
        },
    ),
    "whole": (0, {"cpu": whole, "device": on_a_device(Sharding(None, 1, 0))}),
}
"""Of each kind of tensor its columns, 0 for a strided one, and the ways that it may take."""


def gradient(columns: int, rank: int, step: int) -> Tensor:
    """Rows of very different size, a third of them duplicates; or as many elements."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if not columns:
        return torch.randn(ROWS, generator=generator) * torch.linspace(0.01, 9, ROWS)
    rows = torch.randint(0, ROWS, (150,), generator=generator)
    rows[:50] = rows[100:]
    values = torch.randn((150, columns), generator=generator) * (1 + rows[:, None] % 50)
    return sparse(rows, values, (ROWS, columns))


def make_quantizer(form: ValueForm, columns: int, way: str) -> Quantizer:
    rows = math.ceil(ROWS / DENSE_GRANULE) * DENSE_GRANULE if way == "vector" else ROWS
    codec = value_codec(form, columns or 1, is_dense=not columns)
    assert codec is not None
    return Quantizer(codec, Residuals().of("weight", rows, columns or 1), POOL.empty)


def train(form: ValueForm, columns: int, way: str, begin: Begin) -> list[Tensor]:
    """What each of some steps pulls; all ranks must pull the same."""
    quantizers = [make_quantizer(form, columns, way) for _ in range(RANKS)]
    pulled = []
    for step in range(STEPS):
        transfers = [
            begin(gradient(columns, rank, step), quantizer) for rank, quantizer in enumerate(quantizers)
        ]
        answers = aggregate(transfers, average=True)
        for transfer in transfers:
            absorb_all(transfer, answers)
        results = [transfer.finish() for transfer in transfers]
        for result in results:
            assert_same_bits(result, results[0])
        pulled.append(results[0])
    return pulled


def trained_by_hand(form: ValueForm, columns: int) -> list[Tensor]:
    """The same, row by row; a strided tensor's rows are its runs of 64."""
    codec = value_codec(form, columns or 1, is_dense=not columns)
    assert codec is not None
    kept: list[dict[int, Tensor]] = [{} for _ in range(RANKS)]
    pulled = []
    for step in range(STEPS):
        sums: dict[int, Tensor] = {}
        for rank in range(RANKS):
            for row, value in rows_by_hand(gradient(columns, rank, step)).items():
                wanted = value + kept[rank].get(row, 0)
                arrives = travelled(codec, wanted)
                kept[rank][row] = wanted - arrives
                sums[row] = sums[row] + arrives if row in sums else arrives
        averages = {row: travelled(codec, total / RANKS, STEP_OF_PUSHES) for row, total in sums.items()}
        rows = sorted(averages)
        values = torch.stack([averages[row] for row in rows])
        if columns:
            pulled.append(sparse(rows, values.view(-1, columns), (ROWS, columns)).coalesce())
        else:
            pulled.append(torch.cat([averages[row].flatten() for row in rows])[:ROWS])
    return pulled


def rows_by_hand(tensor: Tensor) -> dict[int, Tensor]:
    if not tensor.is_sparse:
        padded = torch.cat([tensor, torch.zeros(-len(tensor) % 64)])
        return {row: run[:, None] for row, run in enumerate(padded.view(-1, 64))}
    sums: dict[int, Tensor] = {}
    for row, values in zip(tensor._indices()[0].tolist(), tensor._values(), strict=True):
        sums[row] = sums[row] + values if row in sums else values.clone()
    return {row: values[None] for row, values in sums.items()}


def travelled(codec: ValueCodec, values: Tensor, step: int | None = None) -> Tensor:
    data, out = torch.empty(codec.size_bytes(*values.shape), dtype=torch.uint8), torch.empty(values.shape)
    codec.encode(values.contiguous(), data, step)
    codec.decode(data.numpy().data, out)
    return out


LAYOUT = make_layout("balanced", ROWS, 1, [0, 1], 1 << 20)


def encode_rows(quantizer: Quantizer, values: Tensor, rows: Tensor) -> Tensor:
    """What is pushed of ``rows``, which are found again by their positions in a layout."""
    return quantizer.encode_rows(values, LAYOUT, LAYOUT.positions(rows))


def decoded(quantizer: Quantizer, data: Tensor, shape: tuple[int, int]) -> Tensor:
    return quantizer.decode(data.numpy().data, shape)


@every_form
@pytest.mark.parametrize("kind", WAYS)
def test_every_way_and_ring_pulls_the_same_bits(form: ValueForm, kind: str) -> None:
    columns, ways = WAYS[kind]
    expected = trained_by_hand(form, columns)
    for begin in ways.values():
        for got, wanted in zip(train(form, columns, kind, begin), expected, strict=True):
            assert_same_bits(got, wanted)


@every_form
@pytest.mark.parametrize("columns", [5, 1])
def test_nothing_is_lost_for_good(form: ValueForm, columns: int) -> None:
    """What was pushed, and what is kept back, is all that there was."""
    quantizer = make_quantizer(form, columns, "table")
    residual = quantizer._residual
    assert residual is not None
    pushed, there_was = torch.zeros(ROWS, columns), torch.zeros(ROWS, columns)
    for step in range(40):
        rows, values = KERNELS.compact(
            gradient(columns, 0, step)._indices()[0], gradient(columns, 0, step)._values()
        )
        there_was[rows] += values
        data = encode_rows(quantizer, values, rows)
        pushed[rows] += decoded(quantizer, data, (len(rows), columns))
    torch.testing.assert_close(pushed + residual, there_was, rtol=1e-4, atol=1e-3)
    # Half a step at most: the largest of a row is 40 σ of its values, and int8's step a 64th of that.
    assert 0 < residual.abs().max() < 250 / 64
    if form == "int8" and columns > 1:
        assert (pushed - there_was).abs().max() > 1e-2


def test_a_component_below_half_a_step_moves_by_what_was_kept_back() -> None:
    """Without, it never would: it is rounded to 0 in each step."""
    rows, gradient_of_a_step = torch.tensor([3]), torch.tensor([[1.0, 1e-3, -2e-3, 0.0, 1.0]])
    quantizer, int8 = make_quantizer("int8", 5, "table"), VALUE_CODECS["int8"]
    moved = torch.zeros(1, 5)
    for _ in range(1000):
        data = encode_rows(quantizer, gradient_of_a_step.clone(), rows)
        moved += decoded(quantizer, data, (1, 5))
    assert (moved - 1000 * gradient_of_a_step).abs().max() < 1 / 64
    assert travelled(int8, gradient_of_a_step).tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), 1e30])
@every_form
def test_what_is_no_number_is_seen_and_not_kept(form: ValueForm, bad: float) -> None:
    quantizer = make_quantizer(form, 5, "table")
    values, rows = torch.full((2, 5), 0.1), torch.tensor([3, 7])
    values[0, 2] = bad
    got = decoded(quantizer, encode_rows(quantizer, values, rows), (2, 5))
    if bad == 1e30 and form != "float16":
        assert got[0, 2] == pytest.approx(1e30, rel=0.01)
    else:
        assert not got[0, 2].isfinite()
    assert got[1].isfinite().all()
    assert quantizer._residual is not None
    assert quantizer._residual.isfinite().all()
    values = torch.full((2, 5), 0.1)
    assert decoded(quantizer, encode_rows(quantizer, values, rows), (2, 5)).isfinite().all()


@every_form
@pytest.mark.parametrize("kind", ["table", "elements", "vector", "whole"])
def test_another_ring_moves_the_same_bytes(form: ValueForm, kind: str) -> None:
    """What is pushed again has been rounded once, and was taken from what is kept back once."""
    columns, _ = WAYS[kind]
    rings: list[tuple[list[int], int]] = [([0, 1], 2), ([1, 4, 6], 3)]
    if kind == "whole":
        shardings = [Sharding(None, 1, 4), Sharding(None, 1, 2)]
    elif kind == "vector":
        shardings = [vector_sharding(*ring) for ring in rings]
    else:
        granule = {"table": 1, "elements": 32}[kind]
        shardings = [
            Sharding(make_layout("balanced", ROWS, granule, servers, 1 << 20), chunks, servers[0])
            for servers, chunks in rings
        ]

    def begin(sharding: Sharding) -> Transfer:
        quantizer = make_quantizer(form, columns, kind)
        tensor = gradient(columns, 0, 0)
        if columns:
            return SparseTransfer(tensor, sharding, "auto", KERNELS, quantizer)
        if sharding.layout is None:
            return WholeTransfer(tensor, sharding, True, quantizer)
        return DenseTransfer(tensor, sharding, POOL, True, quantizer)

    encoded = encoded_by(begin(shardings[0]))
    assert encoded.values == (form if columns != 1 or form != "int8" else "bfloat16")
    assert reshard(encoded, shardings[1], "auto") == encoded_by(begin(shardings[1]))


@every_form
@pytest.mark.parametrize("kind", ["table", "vector", "whole"])
def test_answers_of_another_size_are_refused(form: ValueForm, kind: str) -> None:
    columns, ways = WAYS[kind]
    for begin in ways.values():
        transfer = begin(gradient(columns, 0, 0), make_quantizer(form, columns, kind))
        answer = aggregate([transfer], average=False)[0]
        *positions, whole = answer.frames
        for values in (whole[:-1], memoryview(bytes(whole) + b"\0")):
            with pytest.raises(ProtocolError, match=r"payload: (\d+ bytes of \w+ values|frames of)"):
                transfer.on_answer(Answer(answer.server, answer.result, (*positions, values)))


def planner_of(form: ValueForm, scheme: str = "zenps") -> Planner:
    config = Config(sync=SyncConfig(scheme=scheme, values=form))
    servers = tuple(Member("server", rank, "box", 50 + rank, f"tcp://box:{1 + rank}", "") for rank in (0, 1))
    owners = rebalance(None, [0, 1]).astype("<u2").tobytes()
    sharder = Sharder(config, scheme_of(scheme).wire, View(1, 0, (), servers, owners, 1))
    return Planner(config, scheme_of(scheme), sharder)


def begin(planner: Planner, tensor: Tensor, purpose: Purpose, name: str = "weight") -> Transfer:
    return planner.begin(Request(tensor, name, Options(purpose=purpose, residuals=Residuals())), 0)


def encode(planner: Planner, tensor: Tensor, purpose: Purpose, name: str = "weight") -> EncodedTensor:
    return encoded_by(begin(planner, tensor, purpose, name))


EXACT: tuple[Purpose, ...] = ("value", "broadcast", "control")


@every_form
def test_only_gradients_of_float32_are_quantized(form: ValueForm) -> None:
    planner = planner_of(form)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        for tensor in (rows_of(50).to(dtype), torch.ones(70_000, dtype=dtype), torch.ones(3, dtype=dtype)):
            assert encode(planner, tensor, "gradient").values == "same"
    for tensor in (rows_of(50), torch.ones(70_000), torch.ones(3)):
        for purpose in EXACT:
            assert encode(planner, tensor, purpose).values == "same"
        transfer = begin(planner, tensor, "gradient")
        assert encoded_by(transfer).values == form
        report = transfer.report(Progress(0))
        assert report.pushed_bytes < 0.6 * report.dense_bytes
    for tensor in (
        torch.empty(0),
        sparse([], torch.empty(0, 3), (0, 3)),
        sparse([0], torch.empty(1, 0), (5, 0)),
    ):
        assert encode(planner, tensor, "gradient", "nothing").values == "same"


def test_a_tensor_that_is_in_no_streams_takes_one_name() -> None:
    planner, request = planner_of("same"), Request(torch.ones(1_000_000), "weight")
    assert planner.count_names(request) == 1
    assert planner.first_rounds(request, 5) == [("weight", 5)]


def test_positions_of_a_scheme_that_has_a_codec_travel_in_no_other() -> None:
    rows = sparse(torch.arange(100_000), torch.ones(100_000, 1), (100_000, 1))
    assert {chunk.codec for chunk in encode(planner_of("same"), rows, "value").chunks} == {"dense"}
    chunks = encode(planner_of("same", "sparse-ps"), rows, "value").chunks
    assert {chunk.codec for chunk in chunks} == {"coo"}


def test_rows_without_values_are_never_dense() -> None:
    """Servers take memory for positions only if bytes came for them."""
    planner, size = planner_of("same"), 100_000
    for rows, is_coo in ((torch.arange(size), True), (torch.arange(0, size, 2), False)):
        encoded = encode(planner, sparse(rows, torch.ones(len(rows), 0), (size, 0)), "value")
        assert all((chunk.codec == "coo") == is_coo for chunk in encoded.chunks)


def test_same_is_the_default() -> None:
    assert Config().sync.values == "same"
    assert encode(planner_of("same"), rows_of(50), "gradient").values == "same"
    options = Options(purpose="gradient", residuals=Residuals())
    assert not planner_of("same").quantizes(Request(rows_of(50), "weight", options))
    assert planner_of("int8").quantizes(Request(rows_of(50), "weight", options))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize(
    ("purpose", "in_streams"), [("gradient", True), ("value", True), ("broadcast", False), ("control", False)]
)
def test_only_tensors_of_the_training_go_in_streams(
    purpose: Purpose, in_streams: bool, dtype: torch.dtype
) -> None:
    """Whatever their dtype: it is the purpose that says so."""
    planner = planner_of("same", "omnireduce")
    request = Request(torch.ones(1_000_000, dtype=dtype), "weight", Options(purpose=purpose))
    begun = planner.begin(request, 0).begin()
    assert {encoded.kind for encoded in begun} == {"blocks" if in_streams else "dense"}
    assert len(begun) == planner.count_names(request)
    assert (len(begun) > 1) == in_streams
    assert [each.round_of("weight", 5) for each in begun] == planner.first_rounds(request, 5)


def test_names_of_streams_have_to_be_names_too() -> None:
    planner = planner_of("same", "omnireduce")
    too_long = Request(torch.ones(3), "x" * (LONGEST_NAME + 1))
    with pytest.raises(UsageError, match=f"expected at most {LONGEST_NAME} characters"):
        planner.count_names(too_long)
    assert planner.count_names(too_long._replace(name="x" * LONGEST_NAME)) == 1
    assert planner.count_names(too_long._replace(options=Options(purpose="broadcast"))) == 1


# ── values as they are ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8]
)
def test_unchanged_values_are_their_bytes(dtype: torch.dtype) -> None:
    coder, values = Unchanged(dtype), (torch.randn(7, 3) * 100).abs().to(dtype)
    assert (coder.form, coder.keeps_residual) == ("same", False)
    assert coder.size_bytes(7, 3) == values.nbytes
    expected = bytes(copied_bytes(values))
    data = coder.encode(values)
    assert (data.dtype, data.numpy().tobytes()) == (torch.uint8, expected)
    assert data.data_ptr() == values.data_ptr(), "nothing is copied"
    rows = torch.arange(7)
    assert coder.encode_rows(values, LAYOUT, LAYOUT.positions(rows)).numpy().tobytes() == expected
    received = memoryview(expected)
    assert_same_bits(coder.decode(received, (7, 3)), values)
    assert_same_bits(coder.decode(received, (21,)), values.view(21))
    out = torch.zeros(21, dtype=dtype)
    coder.decode_into(received, out)
    assert_same_bits(out, values.view(21))
    for data_of_another_size in (received[1:], memoryview(expected + b"\0")):
        with pytest.raises(ProtocolError):
            coder.decode(data_of_another_size, (7, 3))
        with pytest.raises(ProtocolError):
            coder.decode_into(data_of_another_size, out)
    assert_same_bits(out, values.view(21))


def test_unchanged_values_of_a_small_tensor_are_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    data = Unchanged(torch.float32).encode_copy(tensor)
    expected = tensor.contiguous().numpy().tobytes()
    tensor.zero_()
    assert bytes(data) == expected


def test_there_may_be_no_values() -> None:
    coder = Unchanged(torch.float32)
    assert coder.size_bytes(0, 3) == coder.encode(torch.empty(0, 3)).nbytes == 0
    assert coder.decode(memoryview(b""), (0, 3)).shape == (0, 3)
    assert bytes(coder.encode_copy(torch.empty(0))) == b""


# ── residuals ───────────────────────────────────────────────────────────────────────────────────


def test_a_tensor_of_another_shape_has_had_nothing_rounded_off() -> None:
    residuals = Residuals()
    table = residuals.of("weight", 4, 2).fill_(1)
    assert residuals.of("weight", 4, 2) is table
    assert not residuals.of("weight", 5, 2).any()
    assert not residuals.of("weight", 4, 2).any()
    assert not residuals.of("bias", 4, 2).any()
    with pytest.raises(TensorError, match=r"tensor 'huge': no memory .* sync.values to same"):
        residuals.of("huge", 10**12, 100)


@pytest.mark.parametrize("tensor", [rows_of(50), torch.ones(70_000), torch.ones(3)])
def test_nothing_but_the_owner_of_residuals_keeps_them(tensor: Tensor) -> None:
    planner, residuals = planner_of("bfloat16"), Residuals()
    options = Options(purpose="gradient", residuals=residuals)
    transfer = planner.begin(Request(tensor, "weight", options), 0)
    assert encoded_by(transfer).values == "bfloat16"
    (table,) = residuals._tables.values()
    gone = weakref.ref(table)
    del table, residuals, options, transfer
    gc.collect()
    assert gone() is None


@every_form
@pytest.mark.parametrize("are_flags_apart", [False, True], ids=["on the host", "on a device"])
def test_a_parameter_without_a_gradient_keeps_what_was_rounded_off(
    form: ValueForm, are_flags_apart: bool
) -> None:
    """Where no rank has one, nothing that was pushed of it is applied."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 70, 5)]
    bucket, codec = Bucket("bucket", parameters, RUN), VALUE_CODECS[form]
    size = len(bucket.fused())
    residual = Residuals().of("bucket", size, 1)
    quantizer = Quantizer(codec, residual, POOL.empty, bucket.parts)
    applied, there_was = torch.zeros(78), torch.zeros(78)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = gradient(0, 0, step)[: len(parameter)]
        if step == 1:
            parameters[1].grad = None
        flat, before = bucket.fused(), residual.clone()
        there_was += flat[:78]
        flags = flat[bucket.parts.flags].clone() if are_flags_apart else None
        data = quantizer.encode(flat[:, None], flags)
        assert torch.equal(residual[3:73], before[3:73]) == (step == 1)
        pushed = decoded(quantizer, data, (size, 1))[:, 0]
        # Another rank may have a gradient of it, and would apply what this one pushes of its residual.
        assert pushed[3:73].any() == (step != 1)
        bucket.spread(pushed)
        applied += torch.cat(
            [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        )
    assert residual[3:73].any()
    torch.testing.assert_close(applied + residual[:78, 0], there_was)


@every_form
@pytest.mark.parametrize(
    "tensor", [rows_of(50), torch.ones(70_000), torch.ones(3)], ids=["rows", "split", "whole"]
)
def test_what_is_thrown_away_leaves_no_rounding_errors(form: ValueForm, tensor: Tensor) -> None:
    planner, residuals = planner_of(form), Residuals()
    kept = Options(purpose="gradient", residuals=residuals)
    first = encoded_by(planner.begin(Request(0.7 * tensor, "weight", kept), 0))
    (table,) = residuals._tables.values()
    before = table.clone()
    assert before.any()
    dropped = structs.replace(kept, is_dropped=True)
    second = encoded_by(planner.begin(Request(1e6 * tensor, "weight", dropped), 0))
    assert second.values == first.values == form
    assert torch.equal(table, before)


@every_form
@pytest.mark.parametrize("ranks", [127, 129, 131, 257, 2049])
def test_how_many_ranks_of_a_host_have_a_gradient_is_not_rounded_for_later(
    form: ValueForm, ranks: int
) -> None:
    """It would say in the next step that they have one, or hide that ranks of another host have."""
    bucket = Bucket("bucket", [nn.Parameter(torch.zeros(70))], RUN)
    size = len(bucket.fused())
    quantizer = Quantizer(VALUE_CODECS[form], Residuals().of("bucket", size, 1), POOL.empty, bucket.parts)
    for count in (ranks, 0):
        flat = torch.zeros(size)
        flat[bucket.parts.flags] = count
        pushed = decoded(quantizer, quantizer.encode(flat[:, None]), (size, 1))[:, 0]
        assert pushed[bucket.parts.flags].tolist() == [pytest.approx(count, rel=0.01)]


@pytest.mark.parametrize("average_over", [1, 4096])
def test_a_bucket_says_who_has_a_gradient_whatever_lies_beside(average_over: int) -> None:
    """By elements that no gradient's scale, and no other such element's, can make 0."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 70, 5)]
    parameters[0].grad, parameters[2].grad = torch.full((3,), 1e9), torch.ones(5)
    bucket, int8 = Bucket("bucket", parameters, RUN), VALUE_CODECS["int8"]
    for step in range(20):
        flat = bucket.fused()
        flat[bucket.parts.flags.start + 2 * RUN] /= average_over
        bucket.spread(travelled(int8, flat[:, None], step)[:, 0])
        assert parameters[1].grad is None
        assert parameters[2].grad is not None
        parameters[0].grad, parameters[2].grad = torch.full((3,), 1e9), torch.ones(5)
