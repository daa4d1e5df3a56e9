"""Results page of ``bench_net.py --docs``: its text, and the tables of the JSON file."""

from __future__ import annotations

import os
from pathlib import Path

from net_report import Report, sheets
from workloads import WORKLOADS

METHOD = """\
<!-- Written by benchmarks/bench_net.py from its own JSON file. Do not edit. -->
# Benchmarks between hosts

Every scheme on the same gradients and the same links, where the network is the bottleneck. How ZenPS does on
loopback, where it is not, is in the [README](../README.md#measured).

## How it is measured

**Hosts** are network namespaces of one machine, joined by a bridge. Each has a link of its own, shaped in
both directions by a token bucket, a worker, and a server. One cluster measures one scheme; a block has all
clusters of one number of hosts and one speed.

**A step** is one tensor that is synchronised: from a barrier to the end of the slowest rank. Its gradient is
a new one, made beforehand, with duplicates as autograd makes them, so that compaction is timed. Two steps
come before those that are timed; where the second takes more than 4 s, it is the only one that counts: ¹
marks it. The first step's sum must be that of all gradients, and the same on all ranks. `gloo dense` is
`torch.distributed.all_reduce` of a gradient that lies ready, dense. `zenps-bfloat16` is `zenps` with
`sync.values = "bfloat16"`, error feedback included; what training makes of it is in
[schemes](schemes.md#values).

² marks what was measured while a hypervisor gave more than a tenth of the processor time that was wanted here
to others. `make bench-net RESUME=1` measures it again.

**Bytes** are those that the token buckets have counted in the very steps that are timed, with the headers of
all packets and acknowledgements. The busiest is the greatest of all hosts and both directions. The formulas
are those of `zenps/schemes/costs.py`, of payload alone: of 1514 bytes of a full packet, 1448 are payload,
4.6 % less.

**What is predicted** is what `zenps plan` says and `auto` goes by: bytes by the formula, over the bandwidth.

**How near to the limit**: the median time over what the busiest link's bytes take at its speed, less the
128 KiB that the bucket lets through at once.

## To do it yourself

```sh
make bench-net                       # all of it; needs root and iproute2
make bench-net QUICK=1               # under 3 minutes
python benchmarks/testbed.py --hosts 4 --mbit 200 -- python train.py    # your own model on such hosts
```

## What is synchronised

Gradients of the shape that Zen's models have (OSDI '25, §2.2 and §4.1), with fewer rows and columns. The
hottest rows lie at the beginning, as in a vocabulary by frequency. Published for all models: more than 60 %
of what is not zero lies in the first of 8 ranges, which is a skew above 4.8. How much workers' rows overlap
is published for DeepFM; for LSTM and NMT it is such that the papers' formulas give their speed-ups.

| workload | model | published |
| --- | --- | --- |
"""

LIMITS = """\
## What limits what

- All hosts share the cores of one machine. Where a step is short, it is these and not the link that is
  measured: look at the tables of p50 over busiest link ÷ bandwidth, and compare schemes by bytes there.
- With 2 hosts a direct exchange sends least: no row goes to an owner first. From 4 or 8 on, by how much
  workers overlap, owners win. `zen` sends an index with every element, and sorts them all; `zenps` does so by
  row.
- Links have no delay but that of their queues. What takes many rounds is flattered.
- One tensor at a time: what overlaps in a training step, tensors with one another and with backward, is left
  out.
"""


def page(report: Report, json: Path, docs: Path) -> str:
    """The page; links in it are relative to ``docs``."""
    published = "".join(f"| `{w.name}` | {w.title} | {w.published} |\n" for w in WORKLOADS.values())
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    where = (
        f"Measured {report.started[:10]} on {machine.cores} cores ({machine.cpu}, {machine.system}); "
        f"{versions}; links by {report.links.shaper}, {report.links.congestion_control}.\n"
    )
    first, summary, *rest = sheets(report)
    data = Path(os.path.relpath(json.resolve(), docs.resolve().parent))
    pictures = "\n\n".join(
        f"![{alt}]({data.with_name(f'{json.stem}-{name}.png')})"
        for name, alt in (("time", "Time by hosts"), ("bytes", "Bytes measured against formulas"))
    )
    tables = "\n".join(sheet.markdown() for sheet in rest)
    return (
        f"{METHOD}{published}\n{first.markdown()}\n{LIMITS}\n## Results\n\n{where}\n"
        f"The data: [{data.name}]({data}).\n\n{summary.markdown()}\n{pictures}\n\n{tables}"
    )
