"""A real browser without a window, through the WebDriver protocol: Debian's chromium and chromium-driver."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import free_port
from tests.support.tiers import Starts, starts

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
