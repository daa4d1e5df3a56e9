"""Gradient sparsification: a dense gradient travels as the elements that a sparsifier selects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from msgspec import structs
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import UsageError, listing
from zenps.kernels.gpu.threshold_compact import DTYPES
from zenps.sparsifiers.base import Sparsifier, Step, Task
from zenps.sparsifiers.registry import sparsifier_class

from ..core.request import Request, turn_of, without_turn
from ..core.residuals import CPU, Feedback, Rounding, shared_part
from ..core.statistics import Statistics
from ..core.transfer import Transfer, Transform
from ..encode.accelerator import Accelerators
from ..encode.sparse import as_sparse
from ..encode.transforms import ToHost
from .agreed import ROUNDS, Agreed
from .device import DeviceGradient
from .selection import Gradient, Withheld, blaming


def make_sparsification(config: Config, rank: int, statistics: Statistics) -> Sparsification | None:
    """Returns what sparsifies the gradients of one worker; None if they are pushed whole.

    Args:
        config: all settings.
        rank: of this worker.
        statistics: count the elements.
    """
    kind = sparsifier_class(config.sync.sparsifier)
    # At a density of 1 nothing is left out, and a residual would turn -0.0 into 0.0.
    if kind is None or config.sync.density == 1:
        return None
    return Sparsification(kind, config, rank, statistics)


class Sparsification:
    """Makes the transforms of one worker's gradients, by ``sync.density``.

    Args:
        kind: of the sparsifiers.
        config: all settings. The world size is that of the whole job, also while workers are lost.
        rank: of this worker.
        statistics: count the elements.

    Attributes:
        name: the value of ``sync.sparsifier``.
        kind: of the sparsifiers.
        clip_norm: limit of the norm of all gradients of this rank; 0: none.
    """

    def __init__(self, kind: type[Sparsifier], config: Config, rank: int, statistics: Statistics) -> None:
        world = config.cluster.workers
        self.name = config.sync.sparsifier
        self.kind = kind
        self.clip_norm = config.sparsifier.clip_norm / math.sqrt(world) if kind.takes_momentum else 0.0
        self._config = config
        self._rank, self._world = rank, world
        self._statistics = statistics
        # Not the planner's: a selection waits for all work of its stream, and would wait for others' copies.
        self._accelerators = Accelerators(config.cluster.deadline_or_infinity_seconds)
        self._feedback: WeakValueDictionary[str, Feedback] = WeakValueDictionary()
        """By name of the tensor."""
        self._loaded: dict[str, Mapping[str, Any]] = {}
        """States that no tensor has taken yet."""
        self._known: set[str] = set()
        """The tensors of the loaded state. A tensor that was not pushed in each turn lacks some states."""
        self._shared: dict[str, Mapping[str, Any]] = {}
        """States shared by all ranks that no tensor has taken yet."""

    def covers(self, request: Request) -> bool:
        """Returns whether the tensor is sparsified, and not pushed whole."""
        tensor, _, options = request
        return (
            options.is_sparsifiable
            and options.residuals is not None
            and tensor.layout == torch.strided
            and tensor.dtype.is_floating_point
            and tensor.nbytes >= max(self._config.sparsifier.least_bytes, 1)
        )

    def count_names(self, request: Request) -> int:
        """Returns how many names the tensor's rounds take."""
        return ROUNDS if self.kind.exchange == "agreed" and self.covers(request) else 1

    def transforms(self, request: Request, step: int) -> list[Transform]:
        """Returns the transforms of a gradient: a copy to the CPU if it needs one, and :meth:`transform`'s.

        Args:
            request: its tensor is on any device.
            step: as for :meth:`transform`.
        """
        made = self.transform(request, step)
        if made is None:
            return []
        to_host = not request.tensor.is_cpu and not made.gradient.on_device
        return [ToHost(request.tensor.device), made] if to_host else [made]

    def transform(self, request: Request, step: int) -> Sparsified | Agreed | None:
        """Returns the transform of a gradient; None for a tensor that is pushed whole.

        Args:
            request: its tensor is on the CPU, or on a device. A tensor on a device must be copied to the CPU
                before the transform is applied, unless the transform selects on the device.
            step: of the tensor in this job, from 0; equal on all ranks.

        Raises:
            TensorError: there is no memory for the residual.
            UsageError: another state was loaded.
        """
        if not self.covers(request):
            return None
        tensor, name, options = request
        gpu = None
        if self.kind.on_device and tensor.dtype in DTYPES:
            gpu = self._accelerators.of(tensor.device)
        with contextlib.nullcontext() if gpu is None else gpu.pushing.current():
            feedback = self._feedback_of(request, step, CPU if gpu is None else gpu.device)
        feedback.next_step = feedback.first_step + step + 1
        assert feedback.sparsifier is not None
        made: Callable[..., Gradient] = Gradient if gpu is None else partial(DeviceGradient, gpu=gpu)
        if options.is_dropped:
            made = Withheld
        gradient = made(
            name,
            tensor.shape,
            tensor.dtype,
            options.exact,
            options.parts is not None,
            feedback.sparsifier,
            feedback,
            Step(feedback.next_step - 1, self._config.sync.density, feedback.counts),
            self._statistics,
        )
        return Agreed(gradient) if self.kind.exchange == "agreed" else Sparsified(gradient)

    def residual_norm(self) -> float:
        """Returns the Euclidean norm of all residuals together, as measured last. It reads no residual."""
        # A copy, because another thread may add a tensor.
        living = [feedback for each in self._feedback.valuerefs() if (feedback := each()) is not None]
        return math.hypot(*(feedback.norm for feedback in living))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all tensors on this rank. It refers to the residuals."""
        own = {name: _saved(feedback) for name, feedback in self._feedback.items()}
        # What is loaded and not taken yet counts: a tensor continues from it, whatever it has at present.
        return {**self._origin(), "tensors": dict(sorted({**own, **self._loaded}.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of this rank; each tensor takes its own with its next push.

        Raises:
            UsageError: it is of another sparsifier, controller, rank, world size or staleness, or is not such
                a state.
        """
        given: object = state  # callers need not be type-checked
        tensors = given.get("tensors") if isinstance(given, Mapping) else None
        if not isinstance(tensors, Mapping):
            raise UsageError(
                f"sparsifier state: got {type(state).__name__}, expected that of sparsifier_state_dict()"
            )
        origin = self._origin()
        # States of older versions of ZenPS say it only by the names of their tensors.
        saved = {"staleness": max(map(turn_of, tensors), default=origin["staleness"]), **state}
        for what, own in origin.items():
            if (given := saved.get(what)) != own:
                raise UsageError(
                    f"sparsifier state: {what} is {given!r}, expected {own!r}, as here; load on each rank "
                    "what it has saved, in a job with the same settings"
                )
        self._loaded = dict(tensors)
        self._known = set(map(without_turn, tensors))

    def loaded_residual(self, name: str) -> object:
        """Returns the residual of a loaded state that the tensor takes with its next push; None if none.

        It has not been checked yet.
        """
        state = self._loaded.get(name)
        return state.get("residual") if isinstance(state, Mapping) else None

    @property
    def has_shared_state(self) -> bool:
        """True if :meth:`shared_state` is about any tensor."""
        return bool(self._shared or self._feedback or self._loaded)

    def shared_state(self) -> dict[str, Any]:
        """Returns what ranks have in common of all tensors, for workers that join. It refers to tensors."""
        # A worker that has joined and has not pushed a tensor since still has the state that it got.
        own = {name: each.shared_state() for name, each in sorted(self._feedback.items())}
        loaded = {}
        for name, state in self._loaded.items():
            if name in self._shared:
                continue
            with contextlib.suppress(KeyError, TypeError):  # the push that takes it says what is wrong
                loaded[name] = shared_part(state, self.kind.exchange)
        return self._shared | own | loaded

    def adopt(self, shared: Mapping[str, Any]) -> None:
        """Continues from another rank's :meth:`shared_state`; each tensor takes its own in its step 0."""
        self._shared = dict(shared)

    def _origin(self) -> dict[str, str | int]:
        sync = self._config.sync
        return {
            "sparsifier": self.name,
            "controller": self._config.sparsifier.controller,
            "rank": self._rank,
            "world": self._world,
            "staleness": sync.staleness if sync.consistency == "ssp" else 0,
        }

    def _feedback_of(self, request: Request, step: int, device: torch.device) -> Feedback:
        """Returns the tensor's residual and sparsifier, with what was loaded or shared for them."""
        tensor, name, options = request
        assert options.residuals is not None
        place = options.pusher or (self._rank, self._world)
        seed, settings = self._config.sync.seed, self._config.sparsifier
        task = Task(name, tensor.numel(), *place, seed, settings, options.momentum)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        feedback = options.residuals.feedback(name, tensor.numel(), dtype, device)
        if feedback.sparsifier is None:
            self._check_known(name)
        if feedback.sparsifier is None or (step == 0 and self._begins_anew(feedback.sparsifier, task)):
            feedback.sparsifier, feedback.counts = self._new_sparsifier(task, feedback.sparsifier), None
        if step == 0:
            feedback.first_step = 0
        if (state := self._loaded.pop(name, None)) is not None:
            feedback.load_state_dict(name, state, step)
        # Over what was loaded: a worker that joins a running job has saved its state in an earlier step.
        if step == 0 and (shared := self._shared.get(name)) is not None:
            if shared["elements"] == tensor.numel():
                with blaming(feedback.sparsifier, "load_state_dict"):
                    feedback.adopt(shared)
            del self._shared[name]
        self._feedback[name] = feedback
        return feedback

    def _begins_anew(self, sparsifier: Sparsifier, task: Task) -> bool:
        """Returns whether a new one replaces a tensor's sparsifier in step 0: in a new job, and when workers
        have joined.
        """
        if self.kind.exchange == "agreed":  # all ranks have the same state: the shared one, or none
            return True
        return type(sparsifier) is not self.kind or sparsifier.task != task

    def _new_sparsifier(self, task: Task, before: Sparsifier | None) -> Sparsifier:
        """Returns a sparsifier. It goes on from the one ``before`` if only the rank or the number of workers
        is another.
        """
        made = self.kind(task)
        if type(before) is not self.kind or self.kind.exchange == "agreed":
            return made
        if before.task._replace(rank=task.rank, world=task.world) == task:
            with blaming(made, "state_dict or load_state_dict"):
                made.load_state_dict(before.state_dict())
        return made

    def _check_known(self, name: str) -> None:
        """Raises a UsageError for a tensor that a loaded state does not have."""
        if self._loaded and without_turn(name) not in self._known:
            raise UsageError(
                f"sparsifier state: expected one of tensor {name!r}, got {listing(sorted(self._known))}; "
                "optimizers are numbered in the order in which they are wrapped after zenps.init(): wrap as "
                "many before as in the saved job, or resume after shutdown() and init()"
            )


def _saved(feedback: Feedback) -> dict[str, Any]:
    assert feedback.sparsifier is not None
    with blaming(feedback.sparsifier, "state_dict"):
        return feedback.state_dict()


class Sparsified(Transform):
    """Converts one dense gradient to the elements that this rank has selected.

    If values are also quantized, the rounding errors are in the same residual.

    Args:
        gradient: the gradient that is sparsified.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self._indices = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values: Tensor | None = None

    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the selected elements: sparse COO of one dimension, coalesced, of the gradient's dtype.

        Raises:
            UsageError: the sparsifier has returned indices that it must not return.
        """
        self._indices, self._values = self.gradient.select_and_take(tensor)
        return as_sparse(self._indices, self._values, torch.Size([len(self.gradient.residual)]), 1)

    def begin(self, request: Request, begin: Callable[[Request], Transfer]) -> Transfer:
        """Returns the transfer of what was selected.

        Args:
            request: its tensor is what :meth:`apply` has returned.
            begin: makes the transfer.
        """
        return self._begin_on_device(request, begin) if self.gradient.on_device else begin(request)

    def take_back(self) -> None:
        if self._values is not None:
            self.gradient.put_back(self._indices, self._values)

    def _begin_on_device(self, request: Request, begin: Callable[[Request], Transfer]) -> Transfer:
        # Values are rounded on the host. The rounding errors belong to the residual on the device.
        rounding = Rounding()
        transfer = begin(request._replace(options=structs.replace(request.options, rounding=rounding)))
        if rounding.errors is not None and rounding.rows is not None:
            self.gradient.keep_rounding(rounding.rows, rounding.errors.view(-1))
        return transfer

    def undo(self, result: Tensor) -> Tensor:
        """Returns the sum as a strided tensor: 0 where no rank has pushed."""
        return self.gradient.spread(result._indices()[0], result._values(), len(self._indices))
