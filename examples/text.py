"""Text as numbered words: a file's, or the source and docstrings of Python's standard library."""

from __future__ import annotations

import itertools
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Document = TypeVar("Document")

UNKNOWN = "<unk>"
HELD_OUT_EVERY = 40

NOT_TEXT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
# A word or a mark. Subwords keep the "@@" with which subword-nmt marks that the word goes on.
_WORD = re.compile(r"(?:\w+|[^\w\s])(?:@@)?")


class TextFile:
    """A file of any size, each line a document; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[list[str]]:
        with self._path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, map(split_words, lines))


def read_standard_library() -> list[list[str]]:
    """The modules of the standard library, each a document; the same order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    texts = sorted(path for path in paths if not NOT_TEXT & set(path.parts))
    return [split_words((root / path).read_text("utf-8", "replace")) for path in texts]


def split_words(text: str) -> list[str]:
    """Words and marks."""
    return _WORD.findall(text)


def to_learn(documents: Iterable[Document]) -> Iterator[Document]:
    """All documents but those that are held out."""
    return (document for number, document in enumerate(documents) if number % HELD_OUT_EVERY)


def held_out(documents: Iterable[Document]) -> Iterator[Document]:
    """Every 40th document, the first among them."""
    return itertools.islice(documents, 0, None, HELD_OUT_EVERY)


def most_frequent(documents: Iterable[list[str]], size: int, *reserved: str) -> list[str]:
    """A vocabulary: reserved words, ``<unk>``, and at most ``size`` others, the most frequent first."""
    counts = Counter(itertools.chain.from_iterable(documents))
    return [*reserved, UNKNOWN, *(word for word, _ in counts.most_common(size))]


class Vocabulary:
    """Numbers the words that it is given; all others share the number of ``<unk>``."""

    def __init__(self, words: list[str]) -> None:
        self._numbers = {word: number for number, word in enumerate(words)}
        self._unknown = self._numbers[UNKNOWN]

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, words: Iterable[str]) -> Iterator[int]:
        """One number for each word."""
        return (self._numbers.get(word, self._unknown) for word in words)

    def encode(self, documents: Iterable[list[str]]) -> Tensor:
        """The words of all documents in a row, int64."""
        return torch.tensor(array("q", self.numbers(itertools.chain.from_iterable(documents))))
