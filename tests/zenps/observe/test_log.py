"""Logging: text and JSON lines, other loggers, and logging once per key."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from zenps.config.settings import LogConfig
from zenps.observe import log


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "_seen", set())
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    logger = logging.getLogger("zenps")
    before = (logger.handlers[:], logger.level, logger.propagate)
    root = logging.root.handlers[:]
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    logging.root.handlers[:] = root
    logging.captureWarnings(False)


def setup(role: str, rank: int, config: LogConfig | None = None) -> logging.Logger:
    """A role that has its rank."""
    logger = log.setup(config or LogConfig(), role)
    log.here.rank = rank
    return logger


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    setup("worker", 3)
    logging.getLogger("zenps.worker.session").warning("lost %s", "server 1")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning worker 3: lost server 1\n", err)


def test_without_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogConfig(), "scheduler").info("ready")
    assert capsys.readouterr().err.endswith(" info scheduler: ready\n")


def test_epoch_and_step_are_those_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("worker", 3)
    log.here.epoch, log.here.step = 1, 0
    logger.info("begun")
    log.here.epoch, log.here.step = 2, 41
    logger.info("going on")
    log.setup(LogConfig(), "worker").info("joining anew")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "info worker 3 e1 s0: begun",
        "info worker 3 e2 s41: going on",
        "info worker: joining anew",
    ]


def test_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogConfig(), "worker")
    log.setup(LogConfig(), "worker").info("ready")
    assert capsys.readouterr().err.count("ready") == 1


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup(LogConfig(level="warning"), "server")
    logger.info("not this")
    logger.warning("but this")
    err = capsys.readouterr().err
    assert "but this" in err
    assert "not this" not in err


def test_a_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("server", 0)
    logger.warning("peer %s", "x\r\n12:00:00 error server 0: forged\x1b[31m\u2028forged\u2029forged")
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert r"x\x0d\x0a12:00:00" in err
    assert "\x1b" not in err


def test_traceback_follows_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("server", 0)
    try:
        raise OSError("no route")
    except OSError:
        logger.exception("cannot listen")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("error server 0: cannot listen")
    assert lines[-1] == "OSError: no route"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("server", 2, LogConfig(format="json"))
    log.here.epoch = 7
    logger.warning("peer\n%s", "π")
    try:
        raise OSError("no route")
    except OSError:
        logger.exception("cannot listen")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "level": "warning",
        "role": "server",
        "rank": 2,
        "epoch": 7,
        "step": None,
        "logger": "zenps",
        "message": "peer\nπ",
    }
    assert second["traceback"].endswith("OSError: no route")


def test_json_is_valid_whatever_the_encoding_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", stderr)
    setup("server", 2, LogConfig(format="json")).warning("über π \udcff")
    stderr.flush()
    assert json.loads(stderr.buffer.getvalue().decode("utf-8"))["message"] == "über π \udcff"


def test_other_loggers_are_left_alone() -> None:
    before = (logging.root.handlers[:], logging.root.level)
    log.setup(LogConfig(level="debug"), "worker")
    assert (logging.root.handlers, logging.root.level) == before


def run_thread(name: str) -> None:
    """A thread that ends by an exception."""

    def fail() -> None:
        raise OSError("no route")

    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


def test_a_second_setup_also_replaces_what_is_done_with_exceptions_of_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: others.append(args.thread.name))
    log.setup(LogConfig(), "scheduler", owns_process=True)
    log.setup(LogConfig(), "worker")
    run_thread("theirs")
    assert (others, capsys.readouterr().err) == (["theirs"], "")


def test_exceptions_of_zenps_threads_are_logged_and_others_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: others.append(args.thread.name))
    for _ in range(2):  # the second time replaces the first
        setup("worker", 1, LogConfig(format="json"))
    run_thread("zenps-lease")
    run_thread("theirs")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["rank"]) == ("error", 1)
    assert "zenps-lease" in line["message"]
    assert line["traceback"].endswith("OSError: no route")
    assert others == ["theirs"]


def test_a_process_of_zenps_logs_everything_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogConfig(format="json"), "scheduler", owns_process=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # catch_warnings has put back what pytest does with them
        warnings.warn("this will go", DeprecationWarning, stacklevel=1)
    logging.getLogger("prometheus_client").error("not ours")
    run_thread("theirs")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["role"] for line in lines] == 3 * ["scheduler"]
    assert "DeprecationWarning: this will go" in lines[0]["message"]
    assert lines[1]["logger"] == "prometheus_client"
    assert "OSError" in lines[2]["traceback"]


def test_once_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("server", 0)
    log.once(logger, ("peer a", "version"), "refused %s", "a")
    log.once(logger, ("peer a", "version"), "refused %s", "a again")
    log.once(logger, ("peer b", "version"), "refused %s", "b")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "warning server 0: refused a",
        "warning server 0: refused b",
    ]


def test_once_is_bounded_and_logs_that(capsys: pytest.CaptureFixture[str]) -> None:
    logger = setup("server", 0)
    for key in range(log.ONCE_KEYS + 100):
        log.once(logger, key, "peer %d", key)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == log.ONCE_KEYS + 1
    assert lines[-1].endswith("1024 different peers or causes were logged; further ones are only counted")
    assert len(log._seen) == log.ONCE_KEYS + 1
