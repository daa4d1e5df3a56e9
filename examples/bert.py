"""A small BERT: a Transformer that learns to fill in words that were masked, from a text of yours.

Alone, or with two workers and two servers on this machine; on Python's standard library, or on your own text:

    python examples/bert.py
    zenps launch --workers 2 --servers 2 -- python examples/bert.py --data corpus.txt

The masked language model of Devlin et al. (https://arxiv.org/abs/1810.04805), without next-sentence
prediction. As there, one table both embeds the words and scores those to fill in. With a softmax over the
whole vocabulary its gradient would be dense. Here the output touches only the masked words and a sample of
others, so both parts of the gradient are sparse, and so is their sum. SparseAdam updates the table,
Adam does the rest. Each optimizer is wrapped by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from sampled_softmax import SampledSoftmax
from text import TextFile, Vocabulary, held_out, most_frequent, read_standard_library, to_learn
from torch import Tensor, nn
from training import TrainingRun, argument_parser, existing_file

import zenps as zps

MASK = "[MASK]"
MASK_NUMBER = 0
MASKED_SHARE = 0.15
WINDOW = 64
VALIDATION_WINDOWS = 128


class Masked(NamedTuple):
    """n windows of text in which some words are to be filled in."""

    words: Tensor
    """(n, WINDOW), int64."""
    positions: Tensor
    """(n, masked), int64: which words of each window are to be filled in."""
    targets: Tensor
    """(n, masked), int64: the words themselves."""


def mask(words: Tensor, vocabulary: int) -> Masked:
    """Of the words chosen, 80 % become MASK, 10 % a random word, 10 % stay (Devlin et al., section 3.1)."""
    positions = torch.rand(words.shape).topk(round(MASKED_SHARE * WINDOW), dim=1).indices
    targets = words.gather(1, positions)
    dice = torch.rand(targets.shape)
    shown = torch.where(dice < 0.9, torch.randint(vocabulary, targets.shape), targets)
    shown = shown.masked_fill_(dice < 0.8, MASK_NUMBER)
    return Masked(words.scatter(1, positions, shown), positions, targets)


def windows(words: Tensor) -> Tensor:
    """The text cut into windows, (n, WINDOW)."""
    return words[: len(words) // WINDOW * WINDOW].view(-1, WINDOW)


def batches(text: Tensor, batch: int, vocabulary: int) -> Iterator[Masked]:
    """Windows in random order, pass after pass, without end; masked anew each time."""
    while True:
        for chosen in torch.randperm(len(text)).split(batch):
            yield mask(text[chosen], vocabulary)


class MaskedLanguageModel(nn.Module):
    """Gives a vector for each word to fill in, to be compared with the rows of ``words``.

    Args:
        words: size of the vocabulary, the most frequent words first.
        width: columns of the table, and of the Transformer.
        layers: the number of the Transformer's layers.
        samples: how many other words each step tells the masked ones from.
    """

    def __init__(self, words: int, width: int, layers: int, samples: int) -> None:
        super().__init__()
        self.words = SampledSoftmax(words, width, samples)
        self.positions = nn.Parameter(torch.randn(WINDOW, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width,
            math.gcd(width, max(1, width // 32)),  # heads
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, text: Masked) -> Tensor:
        """(n · masked, width), in the order of ``text.targets.flatten()``."""
        hidden = self.encoder(self.words(text.words) + self.positions)
        return self.head(hidden.take_along_dim(text.positions[:, :, None], dim=1)).flatten(0, 1)


@torch.no_grad()
def evaluate(model: MaskedLanguageModel, text: Masked) -> tuple[float, float]:
    """Loss and accuracy per masked word, over the held-out windows of all ranks."""
    own = model.words.evaluate(model(text), text.targets.flatten())
    loss, correct, words = zps.push_pull(own, "held-out", average=False).tolist()
    return loss / words, correct / words


def train(model: MaskedLanguageModel, run: TrainingRun, data: Iterator[Masked], lr: float) -> None:
    """Trains until the limits of ``run``."""
    others = [model.positions, *model.encoder.parameters(), *model.head.parameters()]
    optimizers = [
        zps.DistributedOptimizer(
            torch.optim.SparseAdam(model.words.parameters(), lr=lr), named_parameters=model.named_parameters()
        ),
        zps.DistributedOptimizer(torch.optim.Adam(others, lr=lr), named_parameters=model.named_parameters()),
    ]
    for text in run.over(data):
        loss = model.words.loss(model(text), text.targets.flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.record(loss)
    # With sync.consistency = ssp, averages of the last steps are in flight.
    for optimizer in optimizers:
        optimizer.drain()


def main() -> None:
    parser = argument_parser(__doc__, steps=2000, seconds=120, batch=32)
    parser.add_argument("--data", type=existing_file, metavar="FILE", help="plain text; none: Python's own")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="words that are told apart")
    parser.add_argument("--width", type=int, default=128, help="columns of the table and the Transformer")
    parser.add_argument("--layers", type=int, default=2, help="of the Transformer")
    parser.add_argument("--samples", type=int, default=1024, help="sampled words per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of both optimizers")
    args = parser.parse_args()

    zps.init()
    # Ranks mask and sample differently. They start from the same parameters, because rank 0's are broadcast.
    torch.manual_seed(args.seed + zps.rank())
    run = TrainingRun(args.steps, args.seconds, "words", args.batch * WINDOW, args.report)

    documents = read_standard_library() if args.data is None else TextFile(args.data)
    words = most_frequent(to_learn(documents), args.vocabulary, MASK)
    vocabulary = Vocabulary(zps.broadcast_object(words))
    text = windows(vocabulary.encode(itertools.islice(to_learn(documents), zps.rank(), None, zps.size())))
    unseen = windows(vocabulary.encode(held_out(documents)).tensor_split(zps.size())[zps.rank()])
    if not (len(text) and len(unseen)):
        parser.error(
            f"{len(text)} windows of {WINDOW} words to learn from and {len(unseen)} held out; "
            "expected at least 1 and 1 for each worker"
        )
    run.console.print(f"{len(vocabulary):,} words; rank 0 of {zps.size()} has {text.numel():,} to learn from")

    model = MaskedLanguageModel(len(vocabulary), args.width, args.layers, args.samples)
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    validation = mask(unseen[: VALIDATION_WINDOWS // zps.size()], len(vocabulary))
    loss_before, accuracy_before = evaluate(model, validation)
    train(model, run, batches(text, args.batch, len(vocabulary)), args.lr)
    loss_after, accuracy_after = evaluate(model, validation)

    run.console.print(
        f"held-out loss {loss_before:.3f} → {loss_after:.3f}, "
        f"accuracy on masked words {accuracy_before:.1%} → {accuracy_after:.1%}"
    )
    run.finish(
        held_out_loss=[loss_before, loss_after],
        held_out_accuracy=[accuracy_before, accuracy_after],
        vocabulary=len(vocabulary),
    )
    zps.shutdown()


if __name__ == "__main__":
    main()
