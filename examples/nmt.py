"""A translation model with attention, on IWSLT14 German-English or any two files of sentences.

Alone, or with two workers and two servers on this machine; on a made-up language, or on your own files:

    python examples/nmt.py
    zenps launch --workers 2 --servers 2 -- python examples/nmt.py --source train.de --target train.en

Two GRUs, and attention from the one to the other (Luong et al., https://arxiv.org/abs/1508.04025). Nearly
all parameters are in three tables with a row per word: the source's, the target's, and the words that may
come next. With a softmax over the whole vocabulary, the last table would have a dense gradient; with a
sampled softmax its gradient is also sparse. SparseAdam updates the tables, Adam does the rest. Each optimizer
is wrapped by itself.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from parallel_text import (
    END,
    Batch,
    Numbers,
    ParallelText,
    batches,
    collate,
    cut_by_length,
    encode,
    write_sample,
)
from sampled_softmax import SampledSoftmax
from text import HELD_OUT_EVERY, Vocabulary, held_out, most_frequent, to_learn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from training import TrainingRun, argument_parser, existing_file

import zenps as zps

HELD_OUT_PAIRS = 1024


class Translator(nn.Module):
    """Predicts each word of a translation from the source and the words before it.

    Args:
        source_words: size of the source's vocabulary.
        target_words: size of the target's, the most frequent words first.
        width: columns of the tables, and hidden units.
        samples: how many other words each step tells the next words from.
    """

    def __init__(self, source_words: int, target_words: int, width: int, samples: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width, sparse=True)
        self.target = nn.Embedding(target_words, width, sparse=True)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.begin = nn.Linear(2 * width, width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, 2 * width, bias=False)
        self.combine = nn.Linear(3 * width, width)
        self.output = SampledSoftmax(target_words, width, samples)
        nn.init.normal_(self.source.weight, std=0.1)
        nn.init.normal_(self.target.weight, std=0.1)

    def forward(self, batch: Batch) -> Tensor:
        """A vector for each word to predict, in the order of ``batch.targets[batch.is_word]``."""
        packed = pack_padded_sequence(
            self.source(batch.source), batch.source_lengths, batch_first=True, enforce_sorted=False
        )
        states, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(states, batch_first=True)
        begin = torch.tanh(self.begin(torch.cat([*last], dim=1)))
        hidden, _ = self.decoder(self.target(batch.inputs), begin[None])
        is_source = torch.arange(memory.shape[1]) < batch.source_lengths[:, None]
        context = functional.scaled_dot_product_attention(
            self.query(hidden), memory, memory, attn_mask=is_source[:, None]
        )
        return torch.tanh(self.combine(torch.cat([hidden, context], dim=2)[batch.is_word]))


@torch.no_grad()
def evaluate(model: Translator, pairs: list[Batch]) -> tuple[float, float]:
    """Loss and accuracy per word of the translations, over the held-out pairs of all ranks."""
    sums = (model.output.evaluate(model(batch), batch.targets[batch.is_word]) for batch in pairs)
    own = sum(sums, torch.zeros(3))
    loss, correct, words = zps.push_pull(own, "held-out", average=False).tolist()
    return loss / words, correct / words


def train(model: Translator, run: TrainingRun, data: Iterator[Batch], lr: float) -> None:
    """Trains until the limits of ``run``."""
    tables = nn.ModuleList([model.source, model.target, model.output])
    layers = nn.ModuleList([model.encoder, model.begin, model.decoder, model.query, model.combine])
    optimizers = [
        zps.DistributedOptimizer(
            torch.optim.SparseAdam(tables.parameters(), lr=lr), named_parameters=model.named_parameters()
        ),
        zps.DistributedOptimizer(
            torch.optim.Adam(layers.parameters(), lr=lr), named_parameters=model.named_parameters()
        ),
    ]
    for batch in run.over(data):
        loss = model.output.loss(model(batch), batch.targets[batch.is_word])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.record(loss)
    # With sync.consistency = ssp, averages of the last steps are in flight.
    for optimizer in optimizers:
        optimizer.drain()


class Corpus(NamedTuple):
    """The data of one rank: both vocabularies, the pairs to learn from, and those held out."""

    source: Vocabulary
    target: Vocabulary
    pairs: list[Numbers]
    unseen: list[Numbers]


def read(source: Path, target: Path, vocabulary: int) -> Corpus:
    """This rank's share of two files.

    Raises:
        ValueError: their lines are not translations of each other, or too few.
    """
    text = ParallelText(source, target)
    if text.pairs < HELD_OUT_EVERY * zps.size():
        raise ValueError(
            f"{source}, {target}: {text.pairs} pairs of sentences; "
            f"expected at least {HELD_OUT_EVERY} for each worker"
        )
    words = [most_frequent((pair[side] for pair in to_learn(text)), vocabulary, END) for side in (0, 1)]
    known, wanted = (Vocabulary(each) for each in zps.broadcast_object(words))
    pairs, unseen = (
        encode(itertools.islice(each, zps.rank(), None, zps.size()), known, wanted)
        for each in (to_learn(text), held_out(text))
    )
    return Corpus(known, wanted, pairs, unseen)


def options() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__, steps=1500, seconds=120, batch=64)
    parser.add_argument("--source", type=existing_file, metavar="FILE", help="sentences; none: made up")
    parser.add_argument(
        "--target", type=existing_file, metavar="FILE", help="their translations, line by line"
    )
    parser.add_argument("--sentences", type=int, default=50_000, help="pairs to make up")
    parser.add_argument("--words", type=int, default=5000, help="words of the made-up languages")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="words told apart in each language")
    parser.add_argument("--width", type=int, default=128, help="columns of the tables, hidden units")
    parser.add_argument("--samples", type=int, default=1024, help="sampled words per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of both optimizers")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target: expected both or none")

    zps.init()
    # Ranks draw different samples. They start from the same parameters, because rank 0's are broadcast.
    torch.manual_seed(args.seed + zps.rank())
    run = TrainingRun(args.steps, args.seconds, "sentences", args.batch, args.report)
    with tempfile.TemporaryDirectory() as folder:
        if args.source is None:
            args.source, args.target = Path(folder) / "source.txt", Path(folder) / "target.txt"
            write_sample(args.source, args.target, args.sentences, args.words, args.seed)
        try:
            source, target, pairs, unseen = read(args.source, args.target, args.vocabulary)
        except ValueError as error:
            parser.error(str(error))
    validation = [*map(collate, cut_by_length(unseen[: HELD_OUT_PAIRS // zps.size()], args.batch))]
    run.console.print(
        f"{len(source):,} and {len(target):,} words; "
        f"rank 0 of {zps.size()} has {len(pairs):,} pairs to learn from"
    )

    model = Translator(len(source), len(target), args.width, args.samples)
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    loss_before, accuracy_before = evaluate(model, validation)
    train(model, run, batches(pairs, args.batch, args.seed + zps.rank()), args.lr)
    loss_after, accuracy_after = evaluate(model, validation)

    run.console.print(
        f"held-out loss {loss_before:.3f} → {loss_after:.3f}, "
        f"token accuracy {accuracy_before:.1%} → {accuracy_after:.1%}"
    )
    run.finish(
        held_out_loss=[loss_before, loss_after],
        held_out_accuracy=[accuracy_before, accuracy_after],
        vocabulary=[len(source), len(target)],
    )
    zps.shutdown()


if __name__ == "__main__":
    main()
