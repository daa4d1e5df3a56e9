"""Sparsification on a device: the bits of the CPU, and nothing comes to the host but what is selected."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.host.launcher import HostLauncher, RecordingLauncher
from tests.worker.encode.test_reshard import view_of
from tests.worker.host_accelerator import HostAccelerator, HostStream
from tests.worker.sparsify.test_agreed import Job
from tests.worker.sparsify.test_sparsification import config, gradient, options
from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.errors import TensorError, UsageError
from zenps.kernels.gpu.launcher import Argument
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.sparsifiers import Above, Sparsifier, Step, Sums
from zenps.sparsifiers.base import Momentum
from zenps.worker.core.request import Parts, Request
from zenps.worker.core.residuals import Residuals, _zeros
from zenps.worker.core.statistics import Statistics
from zenps.worker.encode.accelerator import Accelerator, Event
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.sharder import Sharder
from zenps.worker.sparsify.agreed import Agreed
from zenps.worker.sparsify.device import DeviceGradient
from zenps.worker.sparsify.selection import Gradient
from zenps.worker.sparsify.sparsification import Sparsification, Sparsified, make_sparsification

torch.set_num_threads(1)

SIZE = 30_000
OWN = ("topk", "dgc", "threshold")
BUCKET, VECTORS = ((SIZE - 300, SIZE),), ((100, 300), (20_000, 20_001), (SIZE - 50, SIZE - 1))
"""Elements that are pushed in any case: at the end of a bucket, and anywhere in one of DDP's."""


def make(gpu: Accelerator | None, *sets: str, kind: type[Sparsifier] | None = None) -> Sparsification:
    """With a GPU, all tensors of the CPU are on it."""
    settings: Config = config(
        "cluster.workers=3", "sparsifier.threshold=1.5", "sparsifier.least_bytes=1", *sets
    )
    made = make_sparsification(settings, 1, Statistics(WorkerMetrics(CollectorRegistry())))
    assert made is not None
    made.kind = kind or made.kind
    if gpu is not None:
        made._accelerators.of = lambda _: gpu  # type: ignore[assignment]
    return made


class Rank:
    """One rank that pushes its own selection, on the CPU or on a device."""

    def __init__(self, gpu: Accelerator | None, *sets: str, **changes: Any) -> None:
        self.sparsification = make(gpu, *sets)
        self.residuals = Residuals()
        settings, scheme = config(*sets), scheme_of("zenps")
        self._planner = Planner(settings, scheme, Sharder(settings, scheme.wire, view_of([0, 1])))
        self._changes = changes

    def push(self, tensor: Tensor, step: int) -> tuple[Sparsified, Tensor]:
        """What is pushed, once its values are rounded."""
        request = Request(tensor, "layer", options(self.residuals, **self._changes))
        made = self.sparsification.transform(request, step)
        assert isinstance(made, Sparsified)
        sent = made.apply(tensor)
        selected = sent.indices().clone(), sent.values().clone()
        made.begin(request._replace(tensor=sent), lambda request: self._planner.begin(request, 0))
        return made, torch.sparse_coo_tensor(*selected, sent.shape, is_coalesced=True, check_invariants=True)

    def state(self) -> dict[str, Any]:
        return dict(self.sparsification.state_dict()["tensors"]["layer"])


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, Tensor):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    else:
        assert left == right


def mostly_zero(seed: int) -> Tensor:
    return gradient(seed, SIZE) * (gradient(seed + 50, SIZE) > 3)


def with_nan(seed: int) -> Tensor:
    tensor = gradient(seed, SIZE)
    tensor[[5 * seed, 19_999]] = torch.tensor([math.nan, math.inf])
    return tensor


KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda seed: gradient(seed, SIZE),
    "float16": lambda seed: gradient(seed, SIZE, torch.float16),
    "sums beyond float16": lambda _: (6e4 * gradient(0, SIZE).sign()).half(),
    "bfloat16": lambda seed: gradient(seed, SIZE, torch.bfloat16),
    "heavy tails": lambda seed: gradient(seed, SIZE) ** 7,
    "mostly zero": mostly_zero,
    "not finite": with_nan,
    "transposed": lambda seed: gradient(seed, SIZE).view(300, -1).t(),
    "strided": lambda seed: gradient(seed, 2 * SIZE)[::2],
    "negative view": lambda seed: torch._neg_view(gradient(seed, SIZE)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [(), BUCKET, VECTORS], ids=["", "bucket", "vectors"])
def test_what_is_pushed_and_left_has_the_bits_of_the_cpu(
    name: str, kind: str, exact: tuple[tuple[int, int], ...]
) -> None:
    sets = (f"sync.sparsifier={name}", "sync.density=0.01")
    cpu, device = (Rank(gpu, *sets, exact=exact) for gpu in (None, HostAccelerator()))
    for step in range(3):
        (before, expected), (made, got) = (rank.push(KINDS[kind](step), step) for rank in (cpu, device))
        assert (before.gradient.on_device, made.gradient.on_device) == (False, True)
        assert_same(got.indices(), expected.indices())
        assert_same(got.values(), expected.values())
        assert_same(device.state(), cpu.state())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "not finite"])
def test_momentum_stays_on_the_device(kind: str, nesterov: bool) -> None:
    changes = {"momentum": Momentum(0.9, nesterov), "exact": BUCKET}
    cpu, device = (Rank(gpu, "sync.sparsifier=dgc", **changes) for gpu in (None, HostAccelerator()))
    for step in range(3):
        (_, expected), (_, got) = (rank.push(KINDS[kind](step), step) for rank in (cpu, device))
        assert_same(got.indices(), expected.indices())
        assert_same(got.values(), expected.values())
        assert_same(device.state(), cpu.state())


@pytest.mark.parametrize("values", ["bfloat16", "int8"])
@pytest.mark.parametrize("exact", [(), BUCKET, VECTORS], ids=["", "bucket", "vectors"])
@pytest.mark.parametrize("has_parts", [False, True])
def test_what_quantization_takes_stays_on_the_device(
    values: str, exact: tuple[tuple[int, int], ...], has_parts: bool
) -> None:
    changes = {"exact": exact, "parts": Parts([(0, 10)], slice(SIZE - 1, SIZE)) if has_parts else None}
    ranks = [Rank(each, f"sync.values={values}", **changes) for each in (None, HostAccelerator())]
    for step in range(3):
        for rank in ranks:
            rank.push(gradient(step, SIZE), step)
        left = [rank.residuals.of("layer", SIZE, 1) for rank in ranks]
        assert_same(left[1], left[0])
        assert int((left[0] != 0).sum()) > SIZE * 0.97


def test_quantization_makes_no_table_of_the_whole_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, made = Rank(HostAccelerator(), "sync.values=int8"), list[int]()

    def counted(rows: int, *more: Any) -> Tensor:
        made.append(rows)
        return _zeros(rows, *more)

    monkeypatch.setattr("zenps.worker.core.residuals._zeros", counted)
    for step in range(3):
        rank.push(gradient(step, SIZE), step)
    assert made == [SIZE], "the residual alone"


@pytest.mark.parametrize("values", ["same", "int8"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("gpu", [None, HostAccelerator()], ids=["cpu", "device"])
def test_a_gradient_that_is_thrown_away_changes_no_state(
    gpu: Accelerator | None, name: str, values: str
) -> None:
    sets = (f"sync.sparsifier={name}", f"sync.values={values}")
    rank = Rank(gpu, *sets, exact=BUCKET, momentum=Momentum(0.9, nesterov=False))
    for step in range(2):
        rank.push(gradient(step, SIZE), step)
    before = copy.deepcopy(rank.state())
    rank._changes["is_dropped"] = True
    made, sent = rank.push(torch.full((SIZE,), 1e6), 2)
    assert not sent._nnz()
    assert torch.equal(made.undo(sent), torch.zeros(SIZE))
    assert_same(rank.state(), before | {"step": 3})


def test_more_is_selected_than_there_is_room_for() -> None:
    sets = ("sync.sparsifier=threshold", "sparsifier.threshold=0.01")
    cpu, device = Rank(None, *sets), Rank(HostAccelerator(), *sets)
    for step in range(2):
        (_, expected), (_, got) = (rank.push(gradient(step, SIZE), step) for rank in (cpu, device))
        assert expected._nnz() > SIZE // 2
        assert_same(got.indices(), expected.indices())
        assert_same(got.values(), expected.values())
        assert_same(device.state(), cpu.state())


@pytest.mark.parametrize(("name", "values"), [("exdyna", "int8"), ("micro", "same")])
def test_an_agreed_exchange_has_the_bits_of_the_cpu(name: str, values: str) -> None:
    sets = (f"sync.sparsifier={name}", f"sync.values={values}")
    cpu, device = Job(0, *sets), Job(0, *sets, gpu=HostAccelerator())
    for step in range(3):
        expected, got = cpu.step(step, change=False), device.step(step, change=False)
        for left, right in zip(got, expected, strict=True):
            assert_same(left, right)
    for one, other in zip(device.ranks, cpu.ranks, strict=True):
        assert_same(one.sparsification.state_dict(), other.sparsification.state_dict())


def test_a_training_goes_on_from_a_state_of_either() -> None:
    ranks = {"cpu": Rank(None), "device": Rank(HostAccelerator())}
    for step in range(3):
        for rank in ranks.values():
            rank.push(gradient(step, SIZE), step)
    pushed = []
    for saved in ranks.values():
        for resumed in (Rank(None), Rank(HostAccelerator())):
            resumed.sparsification.load_state_dict(saved.sparsification.state_dict())
            pushed.append(resumed.push(gradient(3, SIZE), 0)[1])
    for each in pushed[1:]:
        assert_same(each.to_dense(), pushed[0].to_dense())


def test_only_what_is_selected_comes_to_the_host_and_one_kernel_reads_the_gradient() -> None:
    copied = list[int]()

    class Pool(BufferPool):
        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            made = super().empty(shape, dtype)
            copied.append(made.nbytes)
            return made

    gpu, launcher = HostAccelerator(), RecordingLauncher()
    gpu.launcher, gpu.pinned = launcher, Pool(keep_bytes=1 << 20)
    rank = Rank(gpu)
    made, sent = rank.push(gradient(0, SIZE), 0)
    assert launcher.launched == ["mark_elements<float>", "list_marked"]
    # The number of candidates, the selected indices and values, and whether all are finite.
    selected = SIZE // 100
    assert sent._nnz() == selected
    assert copied == [8, 8 * selected, 4 * selected, 1]
    result = made.undo(sent)
    assert copied[4:] == [4], "the residual's norm, which is due"
    assert torch.equal(result, sent.to_dense())


class OnTheCPU(Sparsifier):
    """A plug-in that knows nothing of devices."""

    def select(self, values: Tensor, step: Step) -> Tensor:
        return values.abs().topk(3).indices.sort().values


def test_a_plug_in_without_a_selection_on_devices_gets_its_gradient_on_the_cpu() -> None:
    sparsification, tensor = make(HostAccelerator(), kind=OnTheCPU), gradient(0, SIZE)
    made = sparsification.transform(Request(tensor, "layer", options(Residuals())), 0)
    assert isinstance(made, Sparsified)
    assert not made.gradient.on_device
    assert made.apply(tensor)._nnz() == 3


def test_float64_is_sparsified_on_the_cpu() -> None:
    tensor = gradient(0, SIZE, torch.float64)
    made = make(HostAccelerator()).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert isinstance(made, Sparsified)
    assert not made.gradient.on_device


def test_a_tensor_of_another_device_is_copied_to_the_host_first() -> None:
    request = Request(torch.empty(SIZE, device="meta"), "layer", options(Residuals()))
    names = [type(each).__name__ for each in make(None, kind=OnTheCPU).transforms(request, 0)]
    assert names == ["ToHost", "Sparsified"]
    request = Request(gradient(0, SIZE), "layer", options(Residuals()))
    for gpu in (None, HostAccelerator()):
        assert len(make(gpu).transforms(request, 0)) == 1


class Wrong(Sparsifier):
    """Says that it selects on devices, and does not."""

    on_device = True

    def select(self, values: Tensor, step: Step) -> Above:
        return Above(1.0)


class Full(Wrong):
    def accumulate(self, residual: Tensor, gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Indices(Wrong):
    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return sums.residual.topk(3).indices  # type: ignore[return-value]


class Negative(Wrong):
    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return Above(1.0, start=-1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wrong, "Wrong.on_device: expected a method select_on_device"),
        (Indices, "expected Above of select_on_device, got torch.int64"),
        (Negative, "expected start and most of 0 or more"),
    ],
)
def test_a_wrong_plug_in_is_named(kind: type[Sparsifier], message: str) -> None:
    tensor = gradient(0, SIZE)
    made = make(HostAccelerator(), kind=kind).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert made is not None
    with pytest.raises(UsageError, match=message):
        made.apply(tensor)


def test_a_sparsifier_is_not_blamed_for_a_lack_of_memory() -> None:
    tensor = gradient(0, SIZE)
    made = make(HostAccelerator(), kind=Full).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert made is not None
    with pytest.raises(TensorError, match=r"tensor 'layer': no memory for Full in .*CUDA out of memory"):
        made.apply(tensor)


class CompileError(Exception):
    """As of CuPy: no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError, OSError, CompileError])
def test_a_device_that_fails_is_an_error_that_names_the_tensor(error: type[Exception]) -> None:
    class Full(HostLauncher):
        def launch(
            self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]
        ) -> None:
            raise error("out of memory")

    gpu, tensor = HostAccelerator(), gradient(0, SIZE)
    gpu.launcher = Full()
    made = make(gpu).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert made is not None
    with pytest.raises(TensorError, match="tensor 'layer' on cpu: out of memory"):
        made.apply(tensor)


@pytest.mark.parametrize("marks", [1, 2, 3])
def test_a_device_that_fails_while_it_is_waited_for_names_the_tensor(marks: int) -> None:
    class Faulty(HostStream):
        def mark(self) -> Event:
            nonlocal marks
            marks -= 1
            return Fault() if not marks else super().mark()

    class Fault(Event):
        def query(self) -> bool:
            raise RuntimeError("illegal memory access")

    gpu, tensor = HostAccelerator(), gradient(0, SIZE)
    gpu.pushing = gpu.pulling = Faulty()
    made = make(gpu).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert made is not None
    with pytest.raises(TensorError, match="tensor 'layer' on cpu: illegal memory access"):
        made.apply(tensor)


class Scarce(HostAccelerator):
    """Fails once, after so many launches and buffers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.left = math.inf
        scarce = self

        class Launcher(HostLauncher):
            def launch(
                self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]
            ) -> None:
                scarce.take_one()
                super().launch(source, expression, grid, block, args)

        class Pool(BufferPool):
            def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                scarce.take_one()
                return super().empty(shape, dtype)

        self.launcher, self.pinned = Launcher(), Pool(keep_bytes=1 << 20)

    def take_one(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.left = math.inf
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("exact", [(), VECTORS], ids=["", "vectors"])
@pytest.mark.parametrize("sparsifier", [*OWN, "dgc with momentum", "exdyna"])
def test_a_gradient_is_counted_once_however_often_its_push_fails(
    sparsifier: str, exact: tuple[tuple[int, int], ...]
) -> None:
    name, _, momentum = sparsifier.partition(" ")
    changes = {"exact": exact, "momentum": Momentum(0.9, nesterov=False) if momentum else None}

    def push(gpu: Scarce, failures: Sequence[int]) -> list[Any]:
        sparsification, residuals, results = make(gpu, f"sync.sparsifier={name}"), Residuals(), list[Any]()
        residuals.of("layer", SIZE, 1).fill_(0.25)  # as if quantization had taken it
        for step in range(3):
            tensor = with_nan(step) if step == 1 else gradient(step, SIZE, torch.bfloat16)
            request = Request(tensor, "layer", options(residuals, **changes))
            for left in failures if step else ():
                gpu.left = left
                made = sparsification.transform(request, step)
                assert made is not None
                with pytest.raises(TensorError, match="CUDA out of memory"):
                    made.apply(tensor)
            made = sparsification.transform(request, step)
            assert made is not None
            sent = made.apply(tensor)
            results += [sent.indices().clone(), sent.values().clone(), residuals.of("layer", SIZE, 1).clone()]
            if isinstance(made, Agreed):
                values = made.continue_with(sent)
                results += [*values.values(), residuals.of("layer", SIZE, 1).clone()]
        return results

    expected = push(Scarce(), ())
    for left in range(4):
        for got, wanted in zip(push(Scarce(), (left, 3 - left)), expected, strict=True):
            assert_same(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsifier", ["topk", "exdyna"])
def test_what_is_taken_back_is_on_the_device_again(sparsifier: str, dtype: torch.dtype) -> None:
    residuals, tensor = Residuals(), gradient(0, SIZE, dtype)
    request = Request(tensor, "layer", options(residuals))
    made = make(HostAccelerator(), f"sync.sparsifier={sparsifier}").transform(request, 0)
    assert made is not None
    sent = made.apply(tensor)
    if isinstance(made, Agreed):
        made.continue_with(sent)
    left = residuals.of("layer", SIZE, 1)[:, 0]
    assert not torch.equal(left, tensor.float())
    made.take_back()
    assert torch.equal(left, tensor.float())


def test_what_a_failed_push_has_left_is_forgotten_with_its_step() -> None:
    """Its name may have the same number in the next step: nothing was sent."""
    gpu, residuals = Scarce(), Residuals()
    sparsification = make(gpu)
    for seed in (0, 1):
        request = Request(gradient(seed, SIZE), "layer", options(residuals))
        made = sparsification.transform(request, 0)
        assert made is not None
        gpu.left = 3
        with pytest.raises(TensorError):
            made.apply(request.tensor)
        residuals.end_step()
    assert torch.equal(residuals.of("layer", SIZE, 1)[:, 0], gradient(0, SIZE) + gradient(1, SIZE))


@pytest.mark.parametrize("left", [0, 1])
def test_values_that_cannot_come_to_the_host_stay_in_the_residual(left: int) -> None:
    gpu, residuals = Scarce(), Residuals()
    request = Request(gradient(0, SIZE), "layer", options(residuals))
    made = make(gpu, "sync.sparsifier=exdyna").transform(request, 0)
    assert isinstance(made, Agreed)
    union = made.apply(request.tensor)
    gpu.left = left
    with pytest.raises(TensorError, match="CUDA out of memory"):
        made.continue_with(union)
    assert torch.equal(residuals.of("layer", SIZE, 1)[:, 0], request.tensor)


class Copying(Scarce):
    """Knows the copies to the host that may be under way. Once memory was short, waits for them fail at will.

    Attributes:
        dropped: those whose memory nobody kept until they were waited for.
    """

    fault: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.under_way, self.dropped = list[weakref.ref[Tensor]](), list[weakref.ref[Tensor]]()

    def to_host(self, tensor: Tensor, pool: BufferPool | None = None) -> Tensor:
        copy = super().to_host(tensor, pool)
        self.under_way.append(weakref.ref(copy))
        return copy

    def wait_for(self, event: Event) -> None:
        super().wait_for(event)
        self.dropped += [copy for copy in self.under_way if copy() is None]
        self.under_way.clear()
        if self.fault is not None and self.left == math.inf:
            raise self.fault


every_way = pytest.mark.parametrize(
    "take", [DeviceGradient.select_and_take, Gradient.select_and_take], ids=["at once", "apart"]
)
Take = Callable[[Gradient, Tensor], tuple[Tensor, Tensor]]


@every_way
@pytest.mark.parametrize("left", range(6))
@pytest.mark.parametrize("fault", [None, RuntimeError("illegal memory access")], ids=["", "fault"])
def test_no_copy_to_the_host_is_under_way_when_a_push_has_failed(
    take: Take, left: int, fault: Exception | None
) -> None:
    """Its memory may be used again at once."""
    gpu, tensor = Copying(), gradient(0, SIZE)
    made = make(gpu).transform(Request(tensor, "layer", options(Residuals())), 0)
    assert made is not None
    gpu.left, gpu.fault = left, fault
    with pytest.raises(TensorError, match="CUDA out of memory"):
        take(made.gradient, tensor)
    assert not gpu.under_way
    assert not gpu.dropped


class Short(TorchDispatchMode):
    """No memory is left for one operation, counted from 0, of those that may allocate some on a device."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        makes_tensor = not (func.is_view or func._schema.is_mutable or name == "_local_scalar_dense")
        if makes_tensor or name in ("index_put_", "index_add_"):  # both sort indices if they must
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError(f"CUDA out of memory in {name}")
        return func(*args, **(kwargs or {}))


@every_way
@pytest.mark.parametrize("exact", [(), BUCKET, VECTORS], ids=["", "bucket", "vectors"])
def test_elements_leave_the_residual_all_at_once_whatever_lacks_memory(
    take: Take, exact: tuple[tuple[int, int], ...]
) -> None:
    tensor = with_nan(1).bfloat16()

    def push(short: Short) -> list[Tensor]:
        residuals = Residuals()
        residual = residuals.of("layer", SIZE, 1).fill_(0.25)  # so that bfloat16 rounds
        request = Request(tensor, "layer", options(residuals, exact=exact))
        made = make(HostAccelerator()).transform(request, 0)
        assert made is not None
        with contextlib.suppress(TensorError, torch.OutOfMemoryError), short:
            return [*take(made.gradient, tensor), residual]
        return [*take(made.gradient, tensor), residual]

    expected = push(Short(math.inf))
    for number in count():
        short = Short(number)
        for got, wanted in zip(push(short), expected, strict=True):
            assert_same(got, wanted)
        if short.left >= 0:
            break
    assert number > 5
