"""The page in a real browser, where the machine has one: chromium and chromium-driver of Debian."""

import asyncio
import json
import queue
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forgeasync.plugins.viewer import RunReader, serve
from tests.support.ledgers import ledger_text
from tests.support.processes import free_port
from tests.support.tiers import Starts, starts
from tests.support.viewer_runs import (
    eventful_ledger,
    ledger_of_steps,
    rollout_of,
    tokens_of,
    worst_of,
    write_run,
    write_traces,
)

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

START_S = 240.0

# Nothing that would ask the Internet.
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One window; see ``open_browser``."""

    def __init__(self, url: str, profile: Path, *, width: int, height: int) -> None:
        """``url``: of the driver."""
        self._url = url
        self._height = height
        options = [*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        wanted = {
            "goog:chromeOptions": {"binary": BROWSER, "args": options},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{found['sessionId']}"
        self.resize(width)

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def open(self, address: str) -> None:
        self._command("url", url=address)

    def resize(self, width: int) -> None:
        """Make the page as wide; a window cannot be as narrow as a telephone, the page in it can."""
        self._command(
            "goog/cdp/execute",
            cmd="Emulation.setDeviceMetricsOverride",
            params={"width": width, "height": self._height, "deviceScaleFactor": 1, "mobile": False},
        )

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function of JavaScript, and return what it returns."""
        return self._command("execute/sync", script=script, args=list(arguments))

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end_s = time.monotonic() + START_S
        while not (found := self.run(f"return {expression}")):
            assert time.monotonic() < end_s, f"{expression} is not true; the page says: {self.text()}"
            time.sleep(0.02)
        return found

    def press(self, key: str) -> None:
        """Press and release a key in what has the focus."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._command("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def complaints(self) -> list[str]:
        """What the browser's console has said since the last call, of warnings and errors."""
        lines = self._command("se/log", type="browser")
        return [line["message"] for line in lines if line["level"] in ("WARNING", "SEVERE")]

    def _command(self, name: str, **parameters: object) -> Any:
        return self._ask("POST", f"{self._session}/{name}", parameters)

    def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        answer = httpx.request(method, self._url + path, json=body, timeout=300.0, trust_env=False)
        assert answer.is_success, f"{path}: {answer.text[:1000]}"
        return answer.json()["value"]


@starts(Starts.PROCESSES)
@contextmanager
def open_browser(profile: Path, *, width: int, height: int) -> Iterator[Browser]:
    """Start a browser and its driver; ``profile`` is a folder of its own."""
    assert DRIVER is not None and BROWSER is not None
    port = free_port()
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for_port(port)
        browser = Browser(f"http://127.0.0.1:{port}", profile, width=width, height=height)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(10.0)


def _wait_for_port(port: int) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end_s, "chromedriver does not answer"
            time.sleep(0.05)
        else:
            return


pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="needs chromium and chromedriver, which the set-up does not install",
)

HOSTILE = "<img src=x onerror=\"document.title='taken over'\"><script>document.title='taken over'</script>"

PAGES = (
    *("overview", "groups", "groups?run=1&fate=undone", "faults?run=1", "config", "glossary?q=age"),
    *("processes", "processes?run=1", "processes?run=1&first=2&last=5", "group?run=1&group=2"),
    *("rollouts?step=3", "rollout?run=1&number=0", "rollouts?run=1&step=2"),
)

ENTER, ESCAPE = "\ue007", "\ue00c"

IS_SHOWN = "document.getElementById('main')?.getAttribute('aria-busy') === 'false'"


class Served:
    """A viewer in a thread of its own."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._told: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        self.address = self._told.get()

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        await serve([RunReader(one) for one in self._folders], 0, self._told.put, is_over=self._is_over)

    def runs(self) -> list[dict]:
        with urllib.request.urlopen(f"{self.address}api/runs", timeout=300.0) as answer:
            return json.load(answer)["runs"]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    parent = tmp_path_factory.mktemp("runs")
    first, second = (write_run(parent / name, num_steps=60, is_ended=False) for name in ("first", "second"))
    (second / "config.yaml").write_text("max_steps: 60\nlr: 3\n")
    (second / "ledger.jsonl").write_bytes(ledger_text(eventful_ledger()))
    record = rollout_of(2, 2, 0, HOSTILE) | {"task_id": HOSTILE, "finish_reason": HOSTILE}
    (second / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    euro = [{"bytes": "e282", "text": ""}, {"bytes": "ac", "text": "€"}]
    pieces = [HOSTILE, "2 ", *euro, {"special": HOSTILE}]
    tokens = (tokens_of(2, 2, 0, pieces), worst_of(2, [(2, 0, 3), (7, 0, 0), (2, 0, 1)], HOSTILE))
    (second / "tokens.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tokens))
    fault = {"time_s": 5.0, "event": "detected", "number": 0, "role": "trainer", "what": "died"}
    (second / "faults.jsonl").write_text(json.dumps(fault | {"who": HOSTILE}) + "\n")
    (second / "run.log").write_text(HOSTILE + "\n")
    write_traces(second, num_steps=60)
    return [first, second]


@pytest.fixture(scope="module")
def served(folders: list[Path]) -> Iterator[Served]:
    viewer = Served(folders)
    while any(file["unread"] for run in viewer.runs() for file in run["progress"]):
        time.sleep(0.02)
    yield viewer
    viewer.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile"), width=1280, height=900) as one:
        yield one


def visit(browser: Browser, address: str, page: str) -> None:
    browser.open("about:blank")
    browser.open(f"{address}#/{page}")
    browser.wait_for(IS_SHOWN)


TOKEN = ".tokens .token"


def each(browser: Browser, selector: str, value: str) -> list[Any]:
    """An expression's value for each element ``one``."""
    return browser.run(f"return [...document.querySelectorAll('{selector}')].map((one) => {value})")


@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_fits_and_has_no_complaint(browser: Browser, served: Served, width: int) -> None:
    browser.resize(width)
    for page in PAGES:
        visit(browser, served.address, page)
        assert browser.run("return document.documentElement.scrollWidth") <= width, page
        assert browser.complaints() == [], page
        assert browser.run("return document.getElementById('problem').hidden"), page
        assert "undefined" not in browser.text() and "[object" not in browser.text(), page
    browser.resize(1280)


def test_texts_of_models_are_text(browser: Browser, served: Served) -> None:
    pages = ("rollout?run=1&number=0", "rollouts?run=1&step=2", "group?run=1&group=2")
    for page in (*pages, "faults?run=1", "overview"):
        visit(browser, served.address, page)
        assert HOSTILE in browser.text(), page
        assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
        assert "taken over" not in browser.run("return document.title")


@pytest.mark.parametrize("width", [1280, 400])
def test_tokens_are_read_with_keys_and_without_colours(browser: Browser, served: Served, width: int) -> None:
    browser.resize(width)
    visit(browser, served.address, "rollout?run=1&number=0")
    pieces = [HOSTILE, "2 ", "⟨e2 82⟩", "⟨ac⟩€", HOSTILE]
    assert each(browser, TOKEN, "one.textContent") == pieces
    # The worst ones have a number that no colour is needed for.
    assert each(browser, TOKEN, "one.dataset.rank ?? null") == [None, "3", None, "1", None]
    mark = "return getComputedStyle(document.querySelector('[data-rank=\\'1\\']'), '::before').content"
    assert "1" in browser.run(mark.replace("\\'", '"'))
    assert each(browser, TOKEN, "one.dataset.level") == ["none", "-2", "none", "2", "4"]
    browser.run("document.querySelector('.tokens .token').focus()")
    readout = "document.querySelector('.readout').textContent"
    browser.press("\ue014")
    browser.press("\ue012")
    browser.wait_for(f"{readout}.endsWith('; not trained on')")
    browser.press("\ue014")
    browser.wait_for(f"{readout}.startsWith('token 1: ')")
    told = browser.run(f"return {readout}")
    assert "number 3 of the step's worst; mismatch -0.25;" in told and "version 1;" in told
    assert "the whole vocabulary kept; other experts in 1 of 2 layers with a record: layer 1" in told
    browser.press("w")
    browser.wait_for(f"{readout}.startsWith('token 3: bytes ac')")
    for value, levels in (("version", "0000"), ("kept", "4044"), ("disagreement", "4444")):
        browser.run(f"document.querySelector('button[data-value={value}]').click()")
        assert each(browser, TOKEN, "one.dataset.level") == ["none", *levels], value
    assert "share of the MoE layers" in browser.text() and "from 0.5 to 0.5" in browser.text()
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    browser.resize(1280)


def test_everything_can_be_done_with_keys(browser: Browser, served: Served) -> None:
    visit(browser, served.address, "overview")
    browser.press("2")
    browser.wait_for("document.title.startsWith('groups')")
    browser.press("j")
    browser.press(ENTER)
    browser.wait_for("document.title.startsWith('group ')")
    assert "Group 121" in browser.text()
    browser.press("/")
    browser.press("4")
    browser.wait_for("document.title.startsWith('processes')")
    visit(browser, served.address, "processes?run=1")
    browser.press("j")
    browser.wait_for("document.activeElement.className === 'lane'")
    browser.press("\ue012")
    browser.wait_for("document.querySelector('.readout').textContent.startsWith('controller after ')")
    browser.press("?")
    browser.wait_for("document.getElementById('help').open")
    browser.press(ESCAPE)
    browser.wait_for("!document.getElementById('help').open")
    browser.press("7")
    browser.wait_for("document.title.startsWith('glossary')")
    browser.press("/")
    browser.wait_for("document.activeElement.id === 'search'")
    for key in "2 1":
        browser.press(key)
    assert browser.run("return document.title").startswith("glossary")


def test_the_page_follows_the_run_and_says_when_the_viewer_is_gone(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", num_steps=2, is_ended=False)
    viewer = Served([folder])
    try:
        visit(browser, viewer.address, "overview")
        browser.wait_for("document.body.innerText.includes('2 of 4')")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/mean": 1}\n')
        browser.wait_for("document.body.innerText.includes('3 of 4')")
        browser.press("2")
        browser.wait_for("document.body.innerText.includes('6 groups, the newest first')")
        browser.press("j")
        browser.run("window.before = document.activeElement")
        events = [event for step in ledger_of_steps(3, 2, is_ended=False) for event in step]
        (folder / "ledger.jsonl").write_bytes(ledger_text(events))
        browser.wait_for("document.body.innerText.includes('8 groups, the newest first')")
        browser.wait_for("document.activeElement !== window.before && document.activeElement.tagName === 'A'")
        assert browser.run("return document.activeElement.textContent") == "5"
    finally:
        viewer.stop()
    browser.wait_for("document.getElementById('problem').textContent.includes('the viewer does not answer')")
    browser.complaints()
