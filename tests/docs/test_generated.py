"""What docs/generate.py writes of docs/ is what the code says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from zenps.config.settings import FIELDS

FILES = ("architecture.md", "configuration.md", "membership.md", "metrics.md", "protocol.md")


@pytest.mark.parametrize("file", FILES)
def test_file_is_what_the_code_says(root: Path, generate: ModuleType, file: str) -> None:
    written = (root / "docs" / file).read_text("utf-8")
    assert written == generate.FILES[file](), "run: .venv/bin/python docs/generate.py"


def test_every_setting_is_there(generate: ModuleType) -> None:
    text = generate.configuration()
    assert [name for name in FIELDS if f"| `{name}` |" not in text] == []


def test_metrics_are_named_as_prometheus_sees_them(generate: ModuleType) -> None:
    text = generate.metrics()
    assert "| `zenps_push_bytes_total` | counter |  | Bytes pushed to servers or workers. |" in text
    assert "| `zenps_rounds_total` | counter | `outcome`: completed, failed |" in text
    assert "| `zenps_build_info` | gauge | `role`, `version` |" in text
    assert text.count("zenps_epoch") == 1
    assert "| `zenps_stalled_seconds` | gauge | `rank`; `waits_for` |" in text


def test_a_diagram_without_its_place_is_noticed(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generate.DIAGRAMS["protocol.md"], "nowhere.py", {"begin": {}})
    with pytest.raises(ValueError, match=r"nowhere\.py"):
        generate.diagrams("protocol.md")
