"""Sentences and their translations: read from two files by several ranks, or made up.

The files have one sentence per line, and line n of one is the translation of line n of the other, as in
IWSLT14 German-English (https://wit3.fbk.eu/2014-01). Of IWSLT's tagged files, text marked as ``<seg>`` is
read, and lines with other tags (``<url>``, ``<title>``, …) are skipped.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from text import Vocabulary, split_words
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

END = "</s>"
END_NUMBER = 0  # END is the first word of both vocabularies.
LONGEST = 50
"""Pairs with more words in one of the languages are skipped, as Bahdanau et al. did (arXiv:1409.0473)."""

ZIPF_EXPONENT = 1.0
SYLLABLES = {"source": "bdgklmnprstwz", "target": "fhjvxyc"}

_TAG = re.compile(
    r"\s*<[/?]?(?:description|doc|keywords|mteval|refset|reviewer|speaker|srcset|talkid|title|translator|tstset"
    r"|url|xml)\b"
)
_SEGMENT = re.compile(r"\s*<seg\b[^>]*>(.*?)(?:</seg>)?\s*")

Numbers = tuple[list[int], list[int]]


class Batch(NamedTuple):
    """n pairs; s words in the longest source sentence, t in the longest target with its end."""

    source: Tensor
    """(n, s), int64, padded with END."""
    source_lengths: Tensor
    """(n,), int64, on the CPU."""
    inputs: Tensor
    """(n, t), int64: the target one word late, after an END."""
    targets: Tensor
    """(n, t), int64, padded with END."""
    is_word: Tensor
    """(n, t), bool: not padding."""


class ParallelText:
    """The pairs of two files that can be learnt from, in the order of the files."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        sources, targets = (sum(1 for _ in _sentences(path)) for path in (source, target))
        if sources != targets:
            raise ValueError(
                f"{source} has {sources:,} sentences, {target} {targets:,}; expected a translation of each"
            )
        self.pairs = sum(1 for _ in self)
        """How many there are, without those that are empty or too long."""

    def __iter__(self) -> Iterator[tuple[list[str], list[str]]]:
        for lines in zip(_sentences(self._source), _sentences(self._target), strict=True):
            source, target = map(split_words, lines)
            if 0 < len(source) <= LONGEST and 0 < len(target) <= LONGEST:
                yield source, target


def _sentences(path: Path) -> Iterator[str]:
    """All lines but those of markup; including empty ones, because they may have a translation."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if segment := _SEGMENT.fullmatch(line):
                yield segment[1]
            elif not _TAG.match(line):
                yield line


def encode(
    pairs: Iterable[tuple[list[str], list[str]]], source: Vocabulary, target: Vocabulary
) -> list[Numbers]:
    """The numbers of each pair's words; that of END comes after each target."""
    return [([*source.numbers(s)], [*target.numbers([*t, END])]) for s, t in pairs]


def batches(pairs: list[Numbers], size: int, seed: int) -> Iterator[Batch]:
    """Batches of sentences of about the same length, in random order, pass after pass, without end."""
    order = random.Random(seed)
    while True:
        cut = list(cut_by_length(order.sample(pairs, len(pairs)), size))
        order.shuffle(cut)
        yield from map(collate, cut)


def cut_by_length(pairs: list[Numbers], size: int) -> Iterator[list[Numbers]]:
    """Pairs in groups of ``size`` and a rest, the shortest sources first."""
    by_length = sorted(pairs, key=lambda pair: len(pair[0]))
    return (by_length[begin : begin + size] for begin in range(0, len(pairs), size))


def collate(pairs: list[Numbers]) -> Batch:
    """Pads some pairs to a batch."""
    sources, targets = ([torch.tensor(numbers) for numbers in side] for side in zip(*pairs, strict=True))
    source_lengths, target_lengths = (torch.tensor([*map(len, side)]) for side in (sources, targets))
    target = pad_sequence(targets, batch_first=True, padding_value=END_NUMBER)
    return Batch(
        source=pad_sequence(sources, batch_first=True, padding_value=END_NUMBER),
        source_lengths=source_lengths,
        inputs=target.roll(1, dims=1).index_fill_(1, torch.tensor(0), END_NUMBER),
        targets=target,
        is_word=torch.arange(target.shape[1]) < target_lengths[:, None],
    )


def write_sample(source: Path, target: Path, sentences: int, words: int, seed: int) -> None:
    """Writes sentences of a made-up language, and their translation word for word, in another order.

    The last word of a source sentence, which in German may be a verb, comes second in the target. Words
    follow Zipf's
    law and do not depend on adjacent words: to predict the target one must look at the right word of the
    source.
    """
    order = random.Random(seed)
    cumulative = list(itertools.accumulate((rank + 1) ** -ZIPF_EXPONENT for rank in range(words)))
    with source.open("w", encoding="utf-8") as source_file, target.open("w", encoding="utf-8") as target_file:
        for _ in range(sentences):
            ranks = order.choices(range(words), cum_weights=cumulative, k=order.randint(3, 12))
            source_file.write(" ".join(_word(rank, "source") for rank in ranks) + "\n")
            ranks.insert(1, ranks.pop())
            target_file.write(" ".join(_word(rank, "target") for rank in ranks) + "\n")


def _word(rank: int, language: str) -> str:
    """The word of a rank: frequent words are short."""
    consonants = SYLLABLES[language]
    syllables = []
    while rank >= 0:
        rank, last = divmod(rank, 5 * len(consonants))
        syllables.append(consonants[last // 5] + "aeiou"[last % 5])
        rank -= 1
    return "".join(syllables)
