"""Agreed exchange of a sparsified gradient: first the union of all ranks' indices, then the values there.

The first round pushes rows of no columns, so its result is the union of the indices. The second round pushes
a dense tensor: this rank's values at the union. So every rank pushes these elements and removes them from its
residual, whichever rank selected them. A third round, beside the second, sums what the sparsifiers count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from zenps.errors import UsageError
from zenps.sparsifiers.base import target

from ..core.request import Options, Request
from ..core.residuals import Rounding
from ..core.statistics import Progress, Report
from ..core.transfer import Answer, EncodedTensor, OneRound, Transfer, Transform, dense_bytes
from ..encode.sparse import as_sparse
from .selection import Gradient, blaming, kind_of

VALUES: Final = "#values"
COUNTS: Final = "#counts"
"""Suffixes of rounds' names."""

ROUNDS: Final = 3
"""Rounds of one gradient at most; each has a name of its own."""

Further = Mapping[str, Tensor]
"""The dense tensors of further rounds, by suffix."""


class Agreed(Transform):
    """Converts one dense gradient to its selected indices; then its values at the union to the sum.

    Args:
        gradient: the gradient that is sparsified.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self._selected = 0
        self._is_thrown_away = gradient.is_withheld
        """True if all ranks throw their gradients away, as far as is known: then nothing is learned."""
        self._union = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values: Tensor | None = None

    @property
    def expected(self) -> int:
        """How many elements the union should have. Equal on all ranks."""
        return target(len(self.gradient.residual), self.gradient.step.density)

    @property
    def union_size(self) -> int:
        """Elements of the union; 0 before it is known."""
        return len(self._union)

    @property
    def dense_bytes(self) -> int:
        """The bytes that pushing and pulling the whole gradient would move."""
        return dense_bytes(len(self.gradient.residual), self.gradient.dtype.itemsize)

    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the selected indices: sparse COO of one sparse dimension and no columns, coalesced.

        Raises:
            UsageError: the sparsifier has returned indices that it must not return.
        """
        indices = self.gradient.select(tensor)
        self._selected = len(indices)
        shape = torch.Size([len(self.gradient.residual), 0])
        nothing = torch.empty((len(indices), 0), dtype=tensor.dtype, device="cpu")
        return as_sparse(indices, nothing, shape, 1)

    def continue_with(self, union: Tensor) -> Further:
        """Takes the values at the union from the residual; returns them, and what the sparsifier counts.

        Args:
            union: the result of the first round.

        Raises:
            UsageError: the sparsifier has raised an error, or has counted otherwise than as int64 ``[n]``.
        """
        gradient, sparsifier = self.gradient, self.gradient.sparsifier
        indices = union._indices()[0]
        exact: Tensor = indices[:0]
        if gradient.exact:
            exact = torch.from_numpy(gradient.exact_indices())
            indices = torch.from_numpy(np.setdiff1d(indices.numpy(), exact.numpy(), assume_unique=True))
        # Exact elements come first, so that each of their runs is quantized by a scale of its own.
        self._union = torch.cat([exact, indices])
        values = self._values = gradient.take(self._union)
        if not self._is_thrown_away:
            with blaming(sparsifier, "learn or count"):
                sparsifier.learn(indices, gradient.step)
        counts = gradient.count()
        if counts is None:  # this rank still begins the round, in which ranks find out if others count
            counts = torch.empty(0, dtype=torch.int64, device="cpu")
        if not isinstance(counts, Tensor) or counts.dtype != torch.int64 or counts.dim() != 1:
            name, got = type(sparsifier).__name__, kind_of(counts)
            raise UsageError(f"{name}.count: expected int64 [n], got {got}; correct the sparsifier")
        return {VALUES: values, COUNTS: counts}

    def take_back(self) -> None:
        if self._values is not None:
            self.gradient.put_back(self._union, self._values)

    def note_selected(self, total: int) -> None:
        """Notes how many elements all ranks have selected."""
        # A rank that throws its gradient away selects none. If others have, it learns as they do, or the next
        # counts, which are summed, would not be of the same thresholds.
        self._is_thrown_away &= not total
        world = self.gradient.sparsifier.task.world
        self.gradient.statistics.note_selection(self._selected, total / world)

    def keep_rounding(self, errors: Tensor) -> None:
        """Adds the rounding errors of quantization at the union, ``[n]`` or longer, to the residual."""
        self.gradient.keep_rounding(self._union, errors[: len(self._union)])

    def note_counts(self, total: Tensor) -> None:
        """Notes the counts of all ranks for the next step."""
        if not self._is_thrown_away:
            self.gradient.feedback.counts = total if len(total) else None

    def undo(self, result: Tensor) -> Tensor:
        """Returns the sum as a strided tensor: 0 where no rank has selected."""
        return self.gradient.spread(self._union, result, self._selected)


class AgreedTransfer(Transfer):
    """The rounds of one gradient over servers.

    Args:
        name: of the tensor.
        options: of the tensor.
        agreed: converts the gradient, and was applied.
        first: the transfer of its indices.
        begin: makes the transfer of a dense tensor.
    """

    # Other ranks wait for the second round while all callers here may wait for another tensor.
    absorbs_on = "poller"

    def __init__(
        self,
        name: str,
        options: Options,
        agreed: Agreed,
        first: OneRound,
        begin: Callable[[Request], OneRound],
    ) -> None:
        self.rows_given = first.rows_given
        self._name, self._options = name, options
        self._agreed = agreed
        self._begin = begin
        self._parts: dict[str, OneRound] = {"": first}
        self._missing: dict[str, int] = {}
        """Answers that are yet to come, by suffix."""
        self._selected = 0
        """By all ranks, in the answers to the first round so far."""
        self._has_continued = False
        """True once the further rounds can be pushed."""

    @property
    def unbegun(self) -> Sequence[str]:
        return () if self._has_continued else (VALUES, COUNTS)

    def begin(self) -> Sequence[EncodedTensor]:
        return (self._expect(""),)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        suffix = answer.result.tensor[len(self._name) :]
        self._parts[suffix].on_answer(answer)
        self._missing[suffix] -= 1
        if suffix:
            return ()
        self._selected += answer.result.pushed
        if self._missing[suffix]:
            return ()
        self._agreed.note_selected(self._selected)
        try:
            further = self._agreed.continue_with(self._parts[""].finish())
            following = [self._add(suffix, tensor) for suffix, tensor in further.items()]
        except BaseException:
            self._agreed.take_back()
            raise
        self._has_continued = True
        return following

    def restart(self, encoded: EncodedTensor) -> None:
        self._parts[encoded.suffix].restart(encoded)
        self._selected = 0
        self._missing[encoded.suffix] = encoded.answers

    def finish(self) -> Tensor:
        """Returns the sums at the union: strided, ``[n]``."""
        self._agreed.note_counts(self._parts[COUNTS].finish())
        return self._parts[VALUES].finish()

    def report(self, progress: Progress) -> Report:
        pushed_bytes = sum([part.pushed_bytes for part in self._parts.values()])
        report = self._parts[""].report(progress)
        assert report.rows is not None
        # The answers to the second and third round contain no rows.
        rows = structs.replace(report.rows, pulled=self._agreed.union_size)
        dense_bytes = self._agreed.dense_bytes
        return structs.replace(report, pushed_bytes=pushed_bytes, dense_bytes=dense_bytes, rows=rows)

    def _add(self, suffix: str, tensor: Tensor) -> EncodedTensor:
        rounding, name = Rounding(), self._name + suffix
        # The parts are those of the whole gradient.
        options = structs.replace(self._options, rounding=rounding, parts=None)
        part = self._parts[suffix] = self._begin(Request(tensor, name, options))
        if rounding.errors is not None:
            self._agreed.keep_rounding(rounding.errors.view(-1))
        part.encoded = structs.replace(part.encoded, suffix=suffix, is_summed=suffix == COUNTS)
        return self._expect(suffix)

    def _expect(self, suffix: str) -> EncodedTensor:
        encoded = self._parts[suffix].encoded
        self._missing[suffix] = encoded.answers
        return encoded
