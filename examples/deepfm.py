"""DeepFM, a model that predicts clicks, on click logs in Criteo's format.

Alone, or with two workers and two servers on this machine; on a sample that it makes up, or on your own:

    python examples/deepfm.py
    zenps launch --workers 2 --servers 2 -- python examples/deepfm.py --data day_0
    python examples/deepfm.py --write-sample sample.tsv --rows 1000000

A factorization machine and a deep network look at the same embedding of 26 categories
(https://arxiv.org/abs/1703.04247). All categories are hashed into one shared table. A step touches few of its
rows: its gradient is sparse, and SparseAdam updates only these rows. Adam does the rest. Each optimizer is
wrapped by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from click_log import CATEGORIES, NUMBERS, ClickLog, Clicks, bucket, write_sample
from torch import Tensor, nn
from torch.nn import functional
from training import TrainingRun, argument_parser, existing_file

import zenps as zps

HELD_OUT_ROWS = 8192
AUC_BINS = 10_000


class DeepFM(nn.Module):
    """Gives the logit of a click.

    Args:
        buckets: rows that the categories of all columns are hashed to.
        width: columns of an embedding.
        hidden: units of the first hidden layer; the second has half.
    """

    def __init__(self, buckets: int, width: int, hidden: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.weights = nn.Embedding(buckets, 1, sparse=True)
        self.factors = nn.Embedding(buckets, width, sparse=True)
        self.deep = nn.Sequential(
            nn.Linear(CATEGORIES * width + NUMBERS, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.factors.weight, std=0.01)

    def forward(self, clicks: Clicks) -> Tensor:
        """Logits, (n,), float32."""
        rows = bucket(clicks.categories, self.buckets)
        factors = self.factors(rows)
        # All pairs in linear time: Σᵢ<ⱼ⟨vᵢ, vⱼ⟩ = ½ (|Σ v|² - Σ |v|²); Rendle, ICDM 2010, lemma 3.1.
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        deep = self.deep(torch.cat([factors.flatten(1), clicks.numbers], dim=1))
        return self.weights(rows).sum((1, 2)) + pairs + deep[:, 0]


@torch.no_grad()
def evaluate(model: DeepFM, clicks: Clicks) -> tuple[float, float]:
    """Log loss, and area under the ROC curve, over the held-out clicks of all ranks."""
    logits = model(clicks)
    loss_sum = functional.binary_cross_entropy_with_logits(logits, clicks.labels, reduction="sum")
    # Ranks cannot sort their scores together, but histograms add up: (2, bins), not clicked and clicked.
    bins = (torch.sigmoid(logits) * AUC_BINS).long().clamp_(max=AUC_BINS - 1)
    counts = torch.bincount(clicks.labels.long() * AUC_BINS + bins, minlength=2 * AUC_BINS)
    without, with_click = zps.push_pull(counts.view(2, -1), "histograms", average=False).double()
    below = without.cumsum(0) - without / 2
    auc = (with_click * below).sum() / (with_click.sum() * without.sum())
    loss = zps.push_pull(loss_sum, "loss", average=False) / (with_click.sum() + without.sum())
    return loss.item(), auc.item()


def train(log: ClickLog, model: DeepFM, run: TrainingRun, batch: int, lr: float) -> None:
    """Trains until the limits of ``run``."""
    tables = [*model.weights.parameters(), *model.factors.parameters()]
    optimizers = [
        zps.DistributedOptimizer(
            torch.optim.SparseAdam(tables, lr=lr), named_parameters=model.named_parameters()
        ),
        zps.DistributedOptimizer(
            torch.optim.Adam(model.deep.parameters(), lr=lr), named_parameters=model.named_parameters()
        ),
    ]
    for clicks in run.over(log.training_batches(batch)):
        loss = functional.binary_cross_entropy_with_logits(model(clicks), clicks.labels)
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
    parser = argument_parser(__doc__, steps=400, seconds=90, batch=512)
    parser.add_argument(
        "--data", type=existing_file, metavar="FILE", help="a log in Criteo's format; none: made up"
    )
    parser.add_argument("--write-sample", type=Path, metavar="FILE", help="only write a made-up log")
    parser.add_argument("--rows", type=int, default=500_000, help="lines to make up")
    parser.add_argument("--buckets", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--width", type=int, default=16, help="columns of the table")
    parser.add_argument("--hidden", type=int, default=256, help="units of the deep part's first layer")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of both optimizers")
    args = parser.parse_args()
    if args.write_sample is not None:
        return write_sample(args.write_sample, args.rows, args.seed)

    zps.init()
    torch.manual_seed(args.seed)
    run = TrainingRun(args.steps, args.seconds, "clicks", args.batch, args.report)
    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            data = Path(folder) / "sample.tsv"
            write_sample(data, args.rows, args.seed)
        log = ClickLog(data, zps.rank(), zps.size())
        held_out = log.held_out(limit=HELD_OUT_ROWS // zps.size())
        model = DeepFM(args.buckets, args.width, args.hidden)
        zps.broadcast_parameters(model.state_dict(), root_rank=0)
        loss_before, auc_before = evaluate(model, held_out)
        train(log, model, run, args.batch, args.lr)
        loss_after, auc_after = evaluate(model, held_out)

    malformed = int(zps.push_pull(torch.tensor(log.malformed), "malformed", average=False))
    run.console.print(
        f"held-out log loss {loss_before:.4f} → {loss_after:.4f}, AUC {auc_before:.4f} → {auc_after:.4f}"
    )
    if malformed:
        run.console.print(f"{malformed:,} malformed lines were skipped")
    run.finish(
        held_out_loss=[loss_before, loss_after],
        held_out_auc=[auc_before, auc_after],
        malformed_lines=malformed,
    )
    zps.shutdown()


if __name__ == "__main__":
    main()
