"""A small Transformer that knows Python's source is fine-tuned on English: a model without sparse gradients.

Alone, or with two workers and a server on this machine; on Python's own manual, or on your own text:

    python examples/finetune.py
    zenps launch --workers 2 --set sync.sparsifier=topk -- python examples/finetune.py --data corpus.txt

It reads bytes. Every worker first learns the source alone, in the same way. Then the embeddings are frozen,
and all workers fine-tune the rest together. These gradients are dense: on a slow network, a sparsifier
(``sync.sparsifier``, see docs/sparsifiers.md) sends a small part of them.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from training import TrainingRun, argument_parser, create, existing_file

import zenps as zps

BYTES = 256
WINDOW = 64
HELD_OUT = 32
"""Windows."""


class ByteModel(nn.Module):
    """Predicts each next byte.

    Args:
        width: of the Transformer.
        layers: the number of the Transformer's layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Parameter(torch.randn(WINDOW, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width,
            math.gcd(width, max(1, width // 32)),
            4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def freeze_embeddings(self) -> None:
        """Leaves the embeddings as they are from now on."""
        self.bytes.requires_grad_(requires_grad=False)
        self.positions.requires_grad_(False)

    def loss(self, windows: Tensor) -> Tensor:
        """The mean loss per byte, in nats.

        Args:
            windows: ``[n, WINDOW + 1]`` int64.
        """
        hidden = self.bytes(windows[:, :-1]) + self.positions
        scores = self.head(self.encoder(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def as_bytes(text: str) -> Tensor:
    """uint8 ``[n]``."""
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def batches(text: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows at random, ``[batch, WINDOW + 1]``, without end."""
    while True:
        begins = torch.randint(len(text) - WINDOW, (batch, 1), generator=generator)
        yield text[begins + torch.arange(WINDOW + 1)].long()


def pretrain(model: ByteModel, steps: int, lr: float, seed: int) -> None:
    """The same on every rank, without synchronisation."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = as_bytes("\n".join(module.read_text("utf-8", "replace") for module in modules))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for _, windows in zip(
        range(steps), batches(source, 16, torch.Generator().manual_seed(seed)), strict=False
    ):
        optimizer.zero_grad()
        model.loss(windows).backward()
        optimizer.step()


def finetune(
    model: ByteModel, run: TrainingRun, data: Iterator[Tensor], lr: float
) -> list[tuple[float, float]]:
    """Trains until the limits of ``run``; returns this rank's seconds and loss of each step."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    sgd = torch.optim.SGD([each for _, each in trained], lr, momentum=0.9)
    optimizer = zps.DistributedOptimizer(sgd, trained)
    curve, begin = [], time.perf_counter()
    for windows in run.over(data):
        optimizer.zero_grad()
        loss = model.loss(windows)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_([each for _, each in trained], 1.0)
        optimizer.step()
        run.record(loss)
        curve.append((time.perf_counter() - begin, loss.item()))
    optimizer.drain()  # with sync.consistency = ssp, averages of the last steps are in flight
    zps.average_parameters()  # with ds-sync, models differ
    return curve


@torch.no_grad()
def evaluate(model: ByteModel, windows: Tensor) -> float:
    """The loss on held-out windows."""
    return float(model.loss(windows))


def main() -> None:
    parser = argument_parser(__doc__, steps=300, seconds=60, batch=8)
    parser.add_argument("--data", type=existing_file, metavar="FILE", help="text; none: Python's own manual")
    parser.add_argument("--pretrain-steps", type=int, default=60, help="on Python's source, by each worker")
    parser.add_argument("--width", type=int, default=128, help="of the Transformer")
    parser.add_argument("--layers", type=int, default=4, help="of the Transformer")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of fine-tuning")
    parser.add_argument(
        "--curve", type=Path, metavar="FILE", help="write rank 0's seconds and losses as JSON"
    )
    args = parser.parse_args()

    manual = "\n".join(pydoc_data.topics.topics.values())
    english = as_bytes(manual if args.data is None else args.data.read_text("utf-8", "replace"))
    if len(english) < 10 * HELD_OUT * WINDOW:
        parser.error(f"{len(english)} bytes of text, expected {10 * HELD_OUT * WINDOW} or more")
    torch.manual_seed(args.seed)
    model = ByteModel(args.width, args.layers)
    pretrain(model, args.pretrain_steps, 1e-3, args.seed)

    zps.init()  # only now: it warns of optimizers that step without it
    run = TrainingRun(args.steps, args.seconds, "bytes", args.batch * WINDOW, args.report)
    create(args.curve)
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    model.freeze_embeddings()

    size = HELD_OUT * (WINDOW + 1)
    unseen, to_learn = english[-size:].long().view(HELD_OUT, -1), english[:-size]
    before = evaluate(model, unseen)
    data = batches(to_learn, args.batch, torch.Generator().manual_seed(args.seed + zps.rank()))
    curve = finetune(model, run, data, args.lr)
    after = evaluate(model, unseen)

    count = sum(each.numel() for each in model.parameters() if each.requires_grad)
    run.console.print(
        f"{count:,} parameters fine-tuned; held-out loss {before:.3f} → {after:.3f} "
        f"({before / math.log(2):.2f} → {after / math.log(2):.2f} bits per byte)"
    )
    if args.curve is not None and zps.rank() == 0:
        args.curve.write_text(json.dumps(curve) + "\n")
    run.finish(held_out_loss=[before, after], parameters=count)
    zps.shutdown()


if __name__ == "__main__":
    main()
