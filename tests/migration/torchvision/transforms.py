from __future__ import annotations


def _nothing(*_: object) -> None:
    return None


Compose = ToTensor = Normalize = _nothing
