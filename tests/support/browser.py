"""A real browser without a window, through the WebDriver protocol: Debian's chromium and chromium-driver."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
    """One window; a context manager."""

    def __init__(self, profile: Path, *, width: int, height: int) -> None:
        """``profile`` is a folder of its own."""
        assert DRIVER is not None and BROWSER is not None
        self._port = free_port()
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._session = ""
        self._height = height
        try:
            self._wait_for_driver()
            options = [*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
            wanted = {
                "goog:chromeOptions": {"binary": BROWSER, "args": options},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{found['sessionId']}"
            self.resize(width)
        except BaseException:
            self._driver.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", self._session, None)
        finally:
            self._driver.terminate()
            self._driver.wait(10.0)

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

    def wait_for(self, expression: str, *, within_s: float = 240.0) -> Any:
        """Return the value of an expression as soon as it is true."""
        end_s = time.monotonic() + within_s
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

    def screenshot(self, file: Path) -> None:
        found = self._ask("GET", f"{self._session}/screenshot", None)
        file.write_bytes(base64.b64decode(found))

    def _command(self, name: str, **parameters: object) -> Any:
        return self._ask("POST", f"{self._session}/{name}", parameters)

    def _ask(self, method: str, path: str, body: dict[str, object] | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=300.0) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[:1000]}") from None

    def _wait_for_driver(self) -> None:
        end_s = time.monotonic() + START_S
        while True:
            try:
                self._ask("GET", "/status", None)
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < end_s, "chromedriver does not answer"
                time.sleep(0.05)
            else:
                return


@starts(Starts.PROCS)
def open_browser(profile: Path, *, width: int, height: int) -> Browser:
    """Start a browser; see ``Browser``."""
    return Browser(profile, width=width, height=height)
