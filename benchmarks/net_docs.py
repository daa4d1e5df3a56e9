"""Results page of ``bench_net.py --docs``: its text, and the tables of the JSON file."""

from __future__ import annotations

import os
from pathlib import Path

from net_report import Report, sheets
from workloads import WORKLOADS

PACKET_BYTES, PAYLOAD_BYTES = 1514, 1448  # of a full one, by Ethernet, IPv4 and TCP with timestamps

METHOD = f"""\
<!-- Written by benchmarks/bench_net.py from its own JSON file. Do not edit. -->
# Benchmarks between hosts

Every scheme on the same gradients and the same links, with the network as the bottleneck. Results on
loopback, where the network is not the bottleneck, are in [performance](performance.md#loopback).

## How it is measured

**Hosts** are network namespaces of one machine, joined by a bridge. Each has a worker, a server, and a link
of its own, which a token bucket shapes in both directions. One cluster measures one scheme; a block has all
clusters of one number of hosts and one speed.

**A step** synchronises one tensor, and is timed from a barrier to the end of the slowest rank. Each step has
a new gradient, made beforehand, with duplicates as autograd makes them, so that compaction is timed. Two
untimed steps come first; if the second takes more than 4 s, it is the only measurement, marked by ¹. The
first step's sum must be that of all gradients, and the same on all ranks. `gloo dense` is
`torch.distributed.all_reduce` of a dense gradient; making it dense is not timed. `zenps-bfloat16` is `zenps`
with `sync.values = "bfloat16"` and error feedback; [schemes](schemes.md#quantized-values) shows its effect
on training.

² marks measurements during which a hypervisor gave more than a tenth of the wanted processor time to others.
`make bench-net RESUME=1` repeats them.

**Bytes** are those that the token buckets count during the timed steps, with the headers of all packets and
acknowledgements. The busiest link is the greatest of all hosts and both directions. The formulas are those of
[planning](planning.md#formulas). They count only payload, {PAYLOAD_BYTES} of the {PACKET_BYTES} bytes of a
full packet: the wire carries {(PACKET_BYTES / PAYLOAD_BYTES - 1) * 100:.1f} % more.

**Predicted** times are those of `zenps plan` and of `auto`: bytes by the formula, over the bandwidth.

**Over the limit**: the median time, divided by the time that the busiest link's bytes take at its speed, less
the 128 KiB that the bucket passes at once.

## To do it yourself

```sh
make bench-net                       # all of it; needs root and iproute2
make bench-net QUICK=1               # under 3 minutes
python benchmarks/testbed.py --hosts 4 --mbit 200 -- python train.py    # your own model on such hosts
```

## What is synchronised

Gradients like those of Zen's models (OSDI '25, §2.2 and §4.1), with fewer rows and columns. The hottest rows
come first, as in a vocabulary sorted by frequency. In all published models more than 60 % of the non-zeros
are in the first of 8 ranges, which is a skew above 4.8. The overlap of workers' rows is published for DeepFM;
for LSTM and NMT it is chosen so that the papers' formulas give the published speed-ups.

| workload | model | published |
| --- | --- | --- |
"""

LIMITS = """\
## What limits what

- All hosts share the cores of one machine. In short steps the cores are the bottleneck, not the link: see the
  tables of p50 over busiest link ÷ bandwidth, and compare schemes by bytes there.
- With 2 hosts a direct exchange sends the fewest bytes if rows are wide: no row goes to an owner first.
  With single elements (`opt`) `zenps` sends fewer, because its codecs take less than the 4 bytes of an index.
  From 4 or 8 hosts on, depending on the overlap of workers, owners win. `zen` sends an index with every
  element, and sorts all elements; `zenps` sends an index with every row, and sorts rows.
- Links have no delay except that of their queues. This favours schemes with many rounds.
- A queue drops packets of at most four segments. Linux itself joins packets up to 64 KiB. Then one lost
  packet was all that a flow had in flight, and 16 hosts waited 0.3 s for its timeout in every other step.
- One tensor at a time: the overlap of tensors with one another and with backward in a training step is not
  measured.
"""


def _measured_later(report: Report) -> str:
    """The clusters that a resumed run measured with another commit than the first run's."""
    clusters: dict[str, list[str]] = {}
    for m in report.measurements:
        if m.commit != report.commit:
            clusters.setdefault(m.commit, []).append(f"{m.scheme}, {m.workers} hosts, {m.mbit:g} Mbit/s")
    return "".join(
        f" Measured later, with commit {commit}: {'; '.join(dict.fromkeys(names))}."
        for commit, names in clusters.items()
    )


def page(report: Report, json: Path, docs: Path) -> str:
    """The page; links in it are relative to ``docs``."""
    published = "".join(f"| `{w.name}` | {w.title} | {w.published} |\n" for w in WORKLOADS.values())
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    where = (
        f"Measured {report.started[:10]} on {machine.cores} cores ({machine.cpu}, {machine.system}); "
        f"{versions}; links by {report.links.shaper}, {report.links.congestion_control}; "
        f"commit {report.commit}.{_measured_later(report)}\n"
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
