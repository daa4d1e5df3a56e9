"""Status page in a real browser: a cluster that trains and loses a server, and a hostile one."""

from __future__ import annotations

import base64
import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

import zenps as zps
from tests import waiting
from tests.integration.cluster import Cluster
from zenps.config.settings import StatusConfig
from zenps.partition.ring import rebalance
from zenps.scheduler.page import endpoint as page
from zenps.wire.scheduler_messages import Change, NodeStatus, Status

DEADLINE_SECONDS = 60.0
LEASE_SECONDS = 4.0
SLOW_RANK = 2

PATHS = ("", "page.css", "page.js", "status.json")
"""All that the page may ask for."""

eventually = functools.partial(waiting.eventually, seconds=DEADLINE_SECONDS, pause_seconds=0.1)


def train(stop: Path) -> int:
    """A sparse round every 20 ms until the file exists; one rank is slower. Returns how many."""
    generator = torch.Generator().manual_seed(zps.rank())
    rounds, until = 0, time.monotonic() + 4 * DEADLINE_SECONDS
    while zps.push_pull(torch.tensor([float(stop.exists())]), "stop").item() == 0:
        assert time.monotonic() < until, "the file was never made"
        indices = torch.randint(100_000, (1, 2000), generator=generator)
        gradient = torch.sparse_coo_tensor(
            indices, torch.ones(2000, 32), (100_000, 32), check_invariants=True
        )
        zps.push_pull(gradient, "table")
        time.sleep(0.1 if zps.rank() == SLOW_RANK else 0.02)
        rounds += 1
    return rounds


def text(browser: Chrome, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def texts(browser: Chrome, selector: str) -> list[str]:
    """Returns the texts of all elements at one moment: the page replaces some while it is read."""
    script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.innerText)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def ring(browser: Chrome) -> str:
    """Returns the picture of the ring."""
    url: str = browser.execute_script("return document.getElementById('ring').toDataURL()")
    return url


def shot(browser: Chrome, width: int, path: Path) -> None:
    """Takes a picture of the whole page at a width."""
    look(browser, width)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    look(browser, width, height)
    data = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    path.write_bytes(base64.b64decode(data))


def look(browser: Chrome, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def requested(browser: Chrome) -> set[str]:
    """Returns all URLs that were requested so far, but for those within Chromium."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = {params["request"]["url"] for params in sent}
    return {url for url in urls if not url.startswith(("chrome:", "data:"))}


def complaints(browser: Chrome) -> list[str]:
    """Returns what Chromium has logged so far, but for the answer of a scheduler that has no processor for
    two seconds: the page asks again."""
    messages: list[str] = [entry["message"] for entry in browser.get_log("browser")]
    return [each for each in messages if not ("/status.json" in each and "503" in each)]


def test_a_cluster_trains_and_loses_a_server(browser: Chrome, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Cluster(workers=3, servers=3, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train, stop, rank=rank) for rank in range(3)]
        cluster.await_state("running")
        url = f"http://{cluster.status().page}/"
        browser.get(url)

        eventually(lambda: text(browser, "#state-text") == "running")
        assert browser.title == "default: running · ZenPS"
        assert len(texts(browser, "#servers tbody tr")) == len(texts(browser, "#workers tbody tr")) == 3
        assert texts(browser, "#shares .muted") == ["1366 · 33.3 %", "1365 · 33.3 %", "1365 · 33.3 %"]
        host = cluster.nodes("server")[0].host
        assert all(host in row for row in texts(browser, "#servers tbody tr"))

        # The numbers move by themselves.
        eventually(lambda: float(text(browser, "#pushed_bytes span")) > 0)
        steps = "#workers [data-label=step] .also"
        before = [int(step) for step in texts(browser, steps)]
        eventually(
            lambda: all(int(now) > then for now, then in zip(texts(browser, steps), before, strict=True))
        )
        eventually(lambda: f"for worker {SLOW_RANK}" in "".join(texts(browser, "#late li.warn")))

        drawn, lost = ring(browser), cluster.nodes("server")[1]
        next(server for server in cluster.servers if server.pid == lost.pid).kill()
        eventually(
            lambda: (
                texts(browser, "#servers [data-label=state] > :first-child") == ["present", "lost", "present"]
            )
        )
        eventually(lambda: texts(browser, "#shares .muted") == ["2048 · 50.0 %", "2048 · 50.0 %"])
        assert ring(browser) != drawn
        assert any(str(lost.pid) in row and "lost" in row for row in texts(browser, "#changes li"))
        eventually(lambda: text(browser, "#state-text") == "running")
        eventually(lambda: float(text(browser, "#steps span")) > 0)

        kept = os.environ.get("TEST_SCREENSHOT")
        if kept:
            time.sleep(20)  # for the curves
        shot(browser, 1280, Path(kept or tmp_path / "status.png"))
        shot(browser, 390, tmp_path / "phone.png")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        assert complaints(browser) == []
        assert requested(browser) == {f"{url}{path}" for path in PATHS}

        stop.touch()
        assert len({worker.result() for worker in workers}) == 1
        assert cluster.scheduler.wait() == 0
    eventually(lambda: browser.find_element(By.ID, "alert").is_displayed())
    assert text(browser, "#state-text") == "no answer"
    assert texts(browser, "#servers [data-label=state] > :first-child") == ["present", "lost", "present"]


HARM = '<img src=x onerror="document.title=1">&amp;</script><script>document.title=2</script>'


def hostile(nodes: int) -> Status:
    """A status of nodes that report HTML, scripts, NaN and infinity."""
    load = {"rounds": float("nan"), "received_bytes": float("inf"), "held_bytes": 5.0, HARM[:64]: 1.0}
    table = [NodeStatus("scheduler", 0, HARM, 1, HARM, HARM, 1, HARM, 0, 0.0, {})]
    for role in ("server", "worker"):
        for rank in range(nodes):
            table.append(NodeStatus(role, rank, HARM, 1, HARM, HARM, 1, HARM, 0, 0.0, load, 2.0, load))
    owners = rebalance(None, range(nodes)).astype("<u2").tobytes()
    changes = tuple(Change(1.0, HARM, HARM, 1) for _ in range(32))
    settings: dict[str, str | int | float] = {HARM: HARM}
    return Status(HARM, HARM, 1, 10.0, settings, tuple(table), 1.0, "", owners, changes)


@contextmanager
def served(status: Status) -> Iterator[str]:
    """Serves a page that always shows the same status; yields its URL."""
    shown, end = page.Page(StatusConfig()), threading.Event()

    def answer() -> None:
        while not end.wait(0.02):
            if shown.has_question:
                shown.answer(status)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://{shown.address}/"
    finally:
        end.set()
        thread.join(DEADLINE_SECONDS)
        shown.close()


@pytest.mark.parametrize("nodes", [2, 128])
def test_hostile_text_stays_text_and_fits_a_phone(browser: Chrome, nodes: int) -> None:
    with served(hostile(nodes)) as url:
        look(browser, 390)
        browser.get(url)
        eventually(lambda: text(browser, "#job") == HARM)
        assert len(texts(browser, "#servers tbody tr")) == len(texts(browser, "#shares li")) == nodes
        assert browser.title == f"{HARM}: {HARM} · ZenPS"
        assert browser.execute_script("return document.querySelectorAll('img, main script').length") == 0
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        assert browser.execute_script("return document.documentElement.scrollHeight") < 12_000
        assert complaints(browser) == []
        assert requested(browser) == {f"{url}{path}" for path in PATHS}
