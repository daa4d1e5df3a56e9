"""Small models that take ids and return a column, one for each way in which people use parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 50

Forward = Callable[[Any, Tensor], Tensor]


class Composed(nn.Module):
    """A forward function and the modules and parameters that it uses."""

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids: Tensor) -> Tensor:
        return self._function(self, ids)

    def features(self, ids: Tensor) -> Tensor:
        """Three numbers in [-1, 1] instead of three ids."""
        return (ids / (ROWS / 2) - 1).to(next(self.parameters()).dtype)


def _words(dim: int = 4, **options: Any) -> nn.Embedding:
    return nn.Embedding(ROWS, dim, sparse=True, **options)


# ── dense ───────────────────────────────────────────────────────────────────────────────────────


def linear() -> nn.Module:
    return Composed(lambda own, ids: own.out(own.features(ids)), out=nn.Linear(3, 1))


def mlp() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    return Composed(lambda own, ids: own.layers(own.features(ids)), layers=layers)


def convolution() -> nn.Module:
    layers = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    return Composed(lambda own, ids: own.layers(own.features(ids).unsqueeze(1)), layers=layers)


def convolution_2d() -> nn.Module:
    """Of the products of features."""
    layers = nn.Sequential(nn.Conv2d(1, 4, 2, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))

    def forward(own: Any, ids: Tensor) -> Tensor:
        features = own.features(ids)
        result: Tensor = own.layers((features.unsqueeze(2) * features.unsqueeze(1)).unsqueeze(1))
        return result

    return Composed(forward, layers=layers)


def channels_last() -> nn.Module:
    """Weights that are not contiguous, and so their gradients."""
    layers = nn.Sequential(
        nn.Conv2d(1, 3, 1), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not layers[1].weight.is_contiguous()

    def forward(own: Any, ids: Tensor) -> Tensor:
        features = own.features(ids)
        result: Tensor = own.layers((features.unsqueeze(2) * features.unsqueeze(1)).unsqueeze(1))
        return result

    return Composed(forward, layers=layers)


def lazy() -> nn.Module:
    """Shapes are known after a first forward."""
    layers = nn.Sequential(nn.LazyLinear(8), nn.PReLU(), nn.LazyLinear(1))
    layers(torch.zeros(1, 3))
    return Composed(lambda own, ids: own.layers(own.features(ids)), layers=layers)


def layer_norm() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    return Composed(lambda own, ids: own.layers(own.features(ids)), layers=layers)


def group_norm() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return Composed(lambda own, ids: own.layers(own.features(ids)), layers=layers)


def batch_norm() -> nn.Module:
    """Each rank normalizes its own half."""
    layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return Composed(lambda own, ids: own.layers(own.features(ids)), layers=layers)


def weight_norm() -> nn.Module:
    hidden = nn.utils.parametrizations.weight_norm(nn.Linear(3, 8))
    return Composed(
        lambda own, ids: own.out(own.hidden(own.features(ids)).tanh()), hidden=hidden, out=nn.Linear(8, 1)
    )


def shared_layer() -> nn.Module:
    def forward(own: Any, ids: Tensor) -> Tensor:
        hidden = own.first(own.features(ids)).tanh()
        result: Tensor = own.out(own.shared(own.shared(hidden).tanh()))
        return result

    return Composed(forward, first=nn.Linear(3, 8), shared=nn.Linear(8, 8), out=nn.Linear(8, 1))


def scalar() -> nn.Module:
    """A parameter without dimensions."""
    return Composed(
        lambda own, ids: own.out(own.features(ids)) * own.scale,
        out=nn.Linear(3, 1),
        scale=nn.Parameter(torch.tensor(0.5)),
    )


def empty() -> nn.Module:
    """A parameter without elements."""
    return Composed(
        lambda own, ids: own.out(own.features(ids)) + own.none.sum(),
        out=nn.Linear(3, 1),
        none=nn.Parameter(torch.empty(0, 4)),
    )


def complex_filter() -> nn.Module:
    """Of frequencies: complex numbers, kept as pairs of real ones."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        frequencies = torch.fft.fft(own.features(ids)) * torch.view_as_complex(own.filter)
        result: Tensor = own.out(torch.view_as_real(frequencies).flatten(1))
        return result

    return Composed(forward, out=nn.Linear(6, 1), filter=nn.Parameter(torch.ones(3, 2)))


def two_precisions() -> nn.Module:
    """A layer in single precision before one in double."""
    return Composed(
        lambda own, ids: own.out(own.single(own.features(ids).float()).double()),
        out=nn.Linear(4, 1, dtype=torch.float64),
        single=nn.Linear(3, 4, dtype=torch.float32),
    )


def unused() -> nn.Module:
    return Composed(lambda own, ids: own.out(own.features(ids)), out=nn.Linear(3, 1), unused=nn.Linear(5, 5))


def _used_by_some(remainder: int) -> nn.Module:
    """A layer and a table for batches that begin with an even id, or an odd one."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        result: Tensor = own.out(own.features(ids))
        return result + own.extra(own.words(ids).sum(1)) if ids[0, 0] % 2 == remainder else result

    return Composed(forward, out=nn.Linear(3, 1), extra=nn.Linear(4, 1), words=_words())


def used_at_first() -> nn.Module:
    """By both ranks, by none, then by one and the other."""
    return _used_by_some(0)


def used_later() -> nn.Module:
    """By no rank, by both, then by one and the other."""
    return _used_by_some(1)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def tables() -> nn.Module:
    """Two sparse ones and two layers."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        both = torch.cat([own.words(ids).sum(1), own.bag(ids)], dim=1)
        result: Tensor = own.out(torch.tanh(own.hidden(both)))
        return result

    bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
    return Composed(forward, words=_words(), bag=bag, hidden=nn.Linear(8, 16), out=nn.Linear(16, 1))


def bag_of_means() -> nn.Module:
    bag = nn.EmbeddingBag(ROWS, 4, mode="mean", sparse=True)
    return Composed(lambda own, ids: own.out(own.bag(ids)), bag=bag, out=nn.Linear(4, 1))


def bag_with_weights() -> nn.Module:
    bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
    return Composed(
        lambda own, ids: own.out(own.bag(ids, per_sample_weights=own.features(ids))),
        bag=bag,
        out=nn.Linear(4, 1),
    )


def bag_with_offsets() -> nn.Module:
    bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True, include_last_offset=True)
    return Composed(
        lambda own, ids: own.out(own.bag(ids.flatten(), torch.arange(0, ids.numel() + 1, 3))),
        bag=bag,
        out=nn.Linear(4, 1),
    )


def dense_table() -> nn.Module:
    return Composed(
        lambda own, ids: own.out(own.words(ids).sum(1)), words=nn.Embedding(ROWS, 4), out=nn.Linear(4, 1)
    )


def padded_table() -> nn.Module:
    return Composed(
        lambda own, ids: own.out(own.words(ids).sum(1)), words=_words(padding_idx=0), out=nn.Linear(4, 1)
    )


def one_column() -> nn.Module:
    """A wide part's weights: rows of one element."""
    return Composed(
        lambda own, ids: own.words(ids).sum(1) + own.bias, words=_words(1), bias=nn.Parameter(torch.zeros(1))
    )


def only_a_table() -> nn.Module:
    return Composed(lambda own, ids: own.words(ids).mean(1), words=_words(1))


def table_used_twice() -> nn.Module:
    """Two look-ups in one forward."""
    return Composed(
        lambda own, ids: own.out(own.words(ids[:, :2]).sum(1) * own.words(ids[:, 2])),
        words=_words(),
        out=nn.Linear(4, 1),
    )


def tied() -> nn.Module:
    """Input and output layer have one matrix, so its gradient is dense."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        scores = nn.functional.linear(own.words(ids[:, :2]).sum(1), own.words.weight)
        return scores.gather(1, ids[:, 2:])

    return Composed(forward, words=nn.Embedding(ROWS, 4))


def factorized() -> nn.Module:
    """A factorization machine: pairwise products of a table's rows, beside a wide one."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        rows = own.words(ids)
        pairs = rows.sum(1).square().sum(1) - rows.square().sum((1, 2))
        result: Tensor = own.wide(ids).sum(1) + pairs.unsqueeze(1) / 2
        return result

    return Composed(forward, words=_words(), wide=_words(1))


def frozen() -> nn.Module:
    model = tables()
    model.get_submodule("words").requires_grad_(False)
    model.get_submodule("hidden").requires_grad_(False)
    return model


def dropout() -> nn.Module:
    return Composed(
        lambda own, ids: own.out(own.drop(own.words(ids).sum(1))),
        words=_words(8),
        drop=nn.Dropout(0.3),
        out=nn.Linear(8, 1),
    )


# ── sequences ───────────────────────────────────────────────────────────────────────────────────


def _recurrent(layer: nn.Module) -> nn.Module:
    return Composed(
        lambda own, ids: own.out(own.layer(own.words(ids))[0][:, -1]),
        words=_words(),
        layer=layer,
        out=nn.Linear(8, 1),
    )


def rnn() -> nn.Module:
    return _recurrent(nn.RNN(4, 8, batch_first=True))


def lstm() -> nn.Module:
    return _recurrent(nn.LSTM(4, 8, num_layers=2, batch_first=True))


def gru() -> nn.Module:
    return _recurrent(nn.GRU(4, 4, batch_first=True, bidirectional=True))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return Composed(
        lambda own, ids: own.out(own.layer(own.words(ids)).mean(1)),
        words=_words(),
        layer=layer,
        out=nn.Linear(4, 1),
    )


MODELS = (
    linear,
    mlp,
    convolution,
    convolution_2d,
    channels_last,
    lazy,
    layer_norm,
    group_norm,
    batch_norm,
    weight_norm,
    shared_layer,
    scalar,
    empty,
    complex_filter,
    two_precisions,
    unused,
    used_at_first,
    used_later,
    tables,
    bag_of_means,
    bag_with_weights,
    bag_with_offsets,
    dense_table,
    padded_table,
    one_column,
    only_a_table,
    table_used_twice,
    tied,
    factorized,
    frozen,
    dropout,
    rnn,
    lstm,
    gru,
    transformer,
)
