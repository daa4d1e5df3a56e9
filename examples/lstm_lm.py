"""A word-level LSTM language model, learnt from Python's standard library or from a text of yours.

Alone, or with two workers and two servers on this machine; on source and docstrings, or on your own text:

    python examples/lstm_lm.py
    zenps launch --workers 2 --servers 2 -- python examples/lstm_lm.py --data corpus.txt

With ``--device cuda`` workers on one machine take turns at its GPUs, or share one.

Nearly all parameters are in two tables with a row per word: the words that go in, and the words that
may come out. A step touches few rows, so both gradients are sparse: the input's are the words of the
batch; the output's are the next words, and a sample of other words that the model learns to tell them
from (sampled softmax: Jean et al., https://arxiv.org/abs/1412.2007, section 3).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator

import torch
from sampled_softmax import SampledSoftmax
from text import TextFile, Vocabulary, held_out, most_frequent, read_standard_library, to_learn
from torch import Tensor, nn
from training import TrainingRun, argument_parser, existing_file

import zenps as zps

WINDOW = 32
VALIDATION_WORDS = 4096

State = tuple[Tensor, Tensor]


def windows(words: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and their successors, each (batch, WINDOW), without end.

    Row i of a window continues row i of the one before, so that the LSTM's state can be carried on.
    """
    streams = words[: len(words) // batch * batch].view(batch, -1)
    while True:
        for begin in range(0, streams.shape[1] - WINDOW, WINDOW):
            window = streams[:, begin : begin + WINDOW + 1]
            yield window[:, :-1], window[:, 1:]


class LanguageModel(nn.Module):
    """Embedding, LSTM, and an output layer that is itself a sparse table.

    Args:
        words: size of the vocabulary, the most frequent word at index 0.
        width: columns of both tables, and hidden units of the LSTM.
        samples: how many other words each step tells the next words from.
    """

    def __init__(self, words: int, width: int, samples: int) -> None:
        super().__init__()
        self.input = nn.Embedding(words, width, sparse=True)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = SampledSoftmax(words, width, samples)
        nn.init.normal_(self.input.weight, std=0.1)

    def forward(self, words: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The sampled loss of predicting ``targets`` after ``words``, and the LSTM's state, detached."""
        hidden, (h, c) = self.lstm(self.input(words), state)
        return self.output.loss(hidden.flatten(0, 1), targets.flatten()), (h.detach(), c.detach())

    @torch.no_grad()
    def validate(self, words: Tensor) -> Tensor:
        """Over a row of words, as SampledSoftmax.evaluate."""
        hidden, _ = self.lstm(self.input(words[None, :-1]))
        return self.output.evaluate(hidden[0], words[1:])


def options() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__, steps=3000, seconds=90, batch=32)
    parser.add_argument("--data", type=existing_file, metavar="FILE", help="plain text; none: Python's own")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="words that are told apart")
    parser.add_argument("--width", type=int, default=128, help="columns of the tables, units of the LSTM")
    parser.add_argument("--samples", type=int, default=1024, help="sampled words per step")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate of Adagrad")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model lies")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    zps.init()
    if args.device == "cuda":
        torch.set_default_device(f"cuda:{zps.local_rank() % torch.cuda.device_count()}")
    # Ranks draw different samples. They start from the same parameters, because rank 0's are broadcast.
    torch.manual_seed(args.seed + zps.rank())
    run = TrainingRun(args.steps, args.seconds, "words", args.batch * WINDOW, args.report)

    documents = read_standard_library() if args.data is None else TextFile(args.data)
    vocabulary = Vocabulary(zps.broadcast_object(most_frequent(documents, args.vocabulary)))
    unseen = vocabulary.encode(held_out(documents)).tensor_split(zps.size())[zps.rank()]
    words = vocabulary.encode(itertools.islice(to_learn(documents), zps.rank(), None, zps.size()))
    if len(words) < (least := args.batch * (WINDOW + 1)) or len(unseen) < 2:
        parser.error(
            f"{len(words):,} words to learn from and {len(unseen):,} held out; "
            f"expected at least {least:,} and 2 for each worker"
        )
    run.console.print(f"{len(vocabulary):,} words; rank 0 of {zps.size()} has {len(words):,} to learn from")

    # Adagrad builds sparse tensors, and torch warns unless a program says whether to check them.
    torch.sparse.check_sparse_tensor_invariants.disable()
    model = LanguageModel(len(vocabulary), args.width, args.samples)
    optimizer = zps.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)

    def validation_loss() -> float:
        own = model.validate(unseen[: VALIDATION_WORDS + 1])
        loss, _, words = zps.push_pull(own, "validation", average=False).tolist()
        return loss / words

    before = validation_loss()
    state = None
    for inputs, targets in run.over(windows(words, args.batch)):
        loss, state = model(inputs, targets, state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(loss)
    optimizer.drain()  # with sync.consistency = ssp, averages of the last steps are in flight
    after = validation_loss()

    run.console.print(
        f"held-out loss {before:.3f} → {after:.3f}, "
        f"perplexity {math.exp(before):,.0f} → {math.exp(after):,.0f}"
    )
    run.finish(held_out_loss=[before, after], vocabulary=len(vocabulary))
    zps.shutdown()


if __name__ == "__main__":
    main()
