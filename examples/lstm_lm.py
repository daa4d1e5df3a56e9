"""A word-level LSTM language model, learnt from the source and docstrings of Python's standard library.

Alone, or with two workers and two servers on this machine:

    python examples/lstm_lm.py
    zenps launch --workers 2 --servers 2 -- python examples/lstm_lm.py

With ``--device cuda`` workers on one machine take turns at its GPUs, or share one.

Nearly all parameters are in two tables with a row per word: the words that go in, and the words that
may come out. A step touches few rows, so both gradients are sparse: the input's are the words of the
batch; the output's are the next words, and a sample of other words that the model learns to tell them
from (sampled softmax: Jean et al., https://arxiv.org/abs/1412.2007, section 3).
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from training import TrainingRun, argument_parser

import zenps as zps

NOT_TEXT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
WINDOW = 32
HELD_OUT_EVERY = 40
VALIDATION_WORDS = 4096

State = tuple[Tensor, Tensor]


def read_standard_library() -> list[list[str]]:
    """The modules of the standard library, each as its words and marks; the same order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    texts = sorted(path for path in paths if not NOT_TEXT & set(path.parts))
    word = re.compile(r"\w+|[^\w\s]")
    return [word.findall((root / path).read_text("utf-8", "replace")) for path in texts]


def most_frequent(documents: list[list[str]], size: int) -> list[str]:
    """At most ``size`` words, the most frequent first."""
    counts = Counter(word for document in documents for word in document)
    return [word for word, _ in counts.most_common(size)]


def encode(documents: list[list[str]], vocabulary: list[str]) -> Tensor:
    """All documents in a row, as int64 indices. Words outside the vocabulary share the index after it."""
    index = {word: i for i, word in enumerate(vocabulary)}
    return torch.tensor([index.get(word, len(index)) for document in documents for word in document])


def windows(words: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and their successors, each (batch, WINDOW), without end.

    Row i of a window continues row i of the one before, so that the LSTM's state can be carried on.
    """
    streams = words[: len(words) // batch * batch].view(batch, -1)
    if streams.shape[1] <= WINDOW:
        raise ValueError(f"{len(words)} words are too few for a batch of {batch} windows of {WINDOW}")
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
        self.words, self.samples = words, samples
        self.input = nn.Embedding(words, width, sparse=True)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Embedding(words, width, sparse=True)
        nn.init.normal_(self.input.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.1)

    def forward(self, words: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The sampled loss of predicting ``targets`` after ``words``, and the LSTM's state, detached."""
        hidden, (h, c) = self.lstm(self.input(words), state)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        others = self._sample_words()
        target_scores = (hidden * self.output(targets)).sum(1) - self._log_probability(targets)
        other_scores = hidden @ self.output(others).T - self._log_probability(others)
        # A sampled word that happens to be the target is not a wrong answer.
        other_scores = other_scores.masked_fill(targets[:, None] == others, -math.inf)
        scores = torch.cat([target_scores[:, None], other_scores], dim=1)
        return functional.cross_entropy(scores, torch.zeros_like(targets)), (h.detach(), c.detach())

    @torch.no_grad()
    def validate(self, words: Tensor) -> Tensor:
        """The mean loss over a row of words, with the softmax over the whole vocabulary."""
        state, losses = None, []
        for inputs, targets in zip(words[:-1].split(256), words[1:].split(256), strict=True):
            hidden, state = self.lstm(self.input(inputs[None]), state)
            scores = hidden[0] @ self.output.weight.T
            losses.append(functional.cross_entropy(scores, targets, reduction="none"))
        return torch.cat(losses).mean()

    def _sample_words(self) -> Tensor:
        """Log-uniform over the ranks, which is close to how often words occur (Zipf's law)."""
        uniform = torch.rand(self.samples, dtype=torch.float64)
        return (torch.exp(uniform * math.log(self.words + 1)) - 1).long().clamp_(max=self.words - 1)

    def _log_probability(self, words: Tensor) -> Tensor:
        """Of being sampled; subtracted from the scores, it makes up for who was sampled how often."""
        return torch.log(torch.log1p(1 / (words + 1)) / math.log(self.words + 1))


def main() -> None:
    parser = argument_parser(__doc__, steps=3000, seconds=90, batch=32)
    parser.add_argument("--vocabulary", type=int, default=40_000, help="words that are told apart")
    parser.add_argument("--width", type=int, default=128, help="columns of the tables, units of the LSTM")
    parser.add_argument("--samples", type=int, default=1024, help="sampled words per step")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate of Adagrad")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model lies")
    args = parser.parse_args()

    zps.init()
    if args.device == "cuda":
        torch.set_default_device(f"cuda:{zps.local_rank() % torch.cuda.device_count()}")
    # Ranks draw different samples. They start from the same parameters, because rank 0's are broadcast.
    torch.manual_seed(args.seed + zps.rank())
    run = TrainingRun(args.steps, args.seconds, unit="words", units_per_step=args.batch * WINDOW)

    documents = read_standard_library()
    vocabulary = zps.broadcast_object(most_frequent(documents, args.vocabulary))
    held_out = encode(documents[::HELD_OUT_EVERY], vocabulary)
    del documents[::HELD_OUT_EVERY]
    words = encode(documents[zps.rank() :: zps.size()], vocabulary)
    run.console.print(f"{len(vocabulary):,} words; rank 0 of {zps.size()} has {len(words):,} to learn from")

    # Adagrad builds sparse tensors, and torch warns where nobody has said whether to check them.
    torch.sparse.check_sparse_tensor_invariants.disable()
    model = LanguageModel(len(vocabulary) + 1, args.width, args.samples)
    optimizer = zps.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)

    def validation_loss() -> float:
        share = held_out.tensor_split(zps.size())[zps.rank()][: VALIDATION_WORDS + 1]
        return zps.push_pull(model.validate(share), "validation").item()

    before = validation_loss()
    state = None
    for inputs, targets in run.over(windows(words, args.batch)):
        loss, state = model(inputs, targets, state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(loss)
    after = validation_loss()

    run.console.print(
        f"held-out loss {before:.3f} → {after:.3f}, "
        f"perplexity {math.exp(before):,.0f} → {math.exp(after):,.0f}"
    )
    run.finish(args.report, held_out_loss=[before, after], vocabulary=len(vocabulary))
    zps.shutdown()


if __name__ == "__main__":
    main()
