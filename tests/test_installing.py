"""Set-up: which packages an environment gets, and where they are found."""

import os
import re
import runpy
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "requirements" / "install.py"
uv_environment = runpy.run_path(str(SCRIPT))["uv_environment"]


def test_settings_of_pip_become_those_of_uv() -> None:
    settings = [
        "global.index-url='https://mirror.test/simple'",
        "global.timeout='60'",
        "global.quiet='1'",
        r"global.extra-index-url='\nhttps://one.test/simple\nhttps://two.test/simple'",
        "global.find-links='/wheels /more'",
        "download.cert='/not/for/installing.crt'",
        "global.no-index='false'",
        "",
    ]
    assert uv_environment(settings) == {
        "UV_DEFAULT_INDEX": "https://mirror.test/simple",
        "UV_HTTP_TIMEOUT": "60",
        "UV_INDEX": "https://one.test/simple https://two.test/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "false",
    }
    # Its variables come before its sections.
    settings = [":env:.cert='env.crt'", "install.cert='install.crt'", "global.cert='global.crt'"]
    assert uv_environment(settings) == {"SSL_CERT_FILE": "env.crt"}
    assert uv_environment(settings[1:]) == {"SSL_CERT_FILE": "install.crt"}


def write_wheel(folder: Path, version: str) -> None:
    folder.mkdir()
    info = f"forgeasync_sample-{version}.dist-info"
    with zipfile.ZipFile(folder / f"forgeasync_sample-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("forgeasync_sample.py", f"VERSION = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: forgeasync-sample\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("pin", "version"), [("==1.0", "1.0"), ("==2.0", "2.0+cpu"), ("==2.0+cpu", "2.0+cpu"), ("===2.0", "2.0")]
)
def test_a_package_comes_from_where_pip_would_find_it(tmp_path: Path, pin: str, version: str) -> None:
    for each in ("1.0", "2.0", "2.0+cpu"):
        write_wheel(tmp_path / each, each)
    places = " ".join(str(tmp_path / each) for each in ("1.0", "2.0", "2.0+cpu"))
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    own |= {"PIP_FIND_LINKS": places, "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, SCRIPT, "--no-deps", "--target", tmp_path / "installed"]
    subprocess.run([*command, f"forgeasync-sample{pin}"], env=own, check=True)
    assert (tmp_path / "installed" / "forgeasync_sample.py").read_text() == f"VERSION = {version!r}\n"


SETUPS = {"cpu": "setup", "gpu": "setup-gpu"}
"""Targets by lock."""
TARGETS = ("demo", "test", "model", "lint")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder with the Makefile and what it depends on; its commands are printed, and none is run."""

    folder: Path

    def write(self, name: str, *, hour: int) -> None:
        """Write a file, or write it again, at an hour of one day."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        seconds = 1_000_000_000 + hour * 3600
        os.utime(path, (seconds, seconds))

    def make(self, *targets: str, is_refused: bool = False) -> str:
        own = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        done = subprocess.run(
            ["make", "--dry-run", *targets],
            cwd=self.folder,
            env=own,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode != 0) is is_refused, done.stdout + done.stderr
        return done.stderr if is_refused else done.stdout

    def installed(self, *targets: str) -> list[str]:
        """The locks whose packages would be installed."""
        return re.findall(r"install\.py --no-deps -r requirements/(\w+)\.lock", self.make(*targets))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    fresh = Checkout(tmp_path)
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock", "requirements/gpu.lock"):
        fresh.write(name, hour=1)
    (tmp_path / "Makefile").write_bytes((REPOSITORY / "Makefile").read_bytes())
    return fresh


def test_set_up_installs_its_own_lock_and_everything_else_the_one_for_cpus(checkout: Checkout) -> None:
    assert checkout.installed("setup") == ["cpu"] and checkout.installed("setup-gpu") == ["gpu"]
    for target in TARGETS:
        assert checkout.installed(target) == ["cpu"], target
        assert checkout.installed("setup-gpu", target) == ["gpu"], target


@pytest.mark.parametrize("lock", SETUPS)
@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/cpu.lock", "requirements/gpu.lock"])
def test_an_environment_follows_its_own_lock_alone(checkout: Checkout, lock: str, changed: str) -> None:
    checkout.write(f".venv/installed-{lock}", hour=2)
    targets = (SETUPS[lock], *TARGETS)
    assert [checkout.installed(target) for target in targets] == [[]] * len(targets)
    checkout.write(changed, hour=3)
    expected = [] if changed.endswith(".lock") and lock not in changed else [lock]
    assert [checkout.installed(target) for target in targets] == [expected] * len(targets)


@pytest.mark.parametrize(("there", "other"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_one_lock_is_not_installed_over_the_other(checkout: Checkout, there: str, other: str) -> None:
    checkout.write(f".venv/installed-{there}", hour=2)
    message = checkout.make(SETUPS[other], is_refused=True)
    assert f".venv has the packages of requirements/{there}.lock" in message
    assert f"`make {SETUPS[there]}` keeps these up to date; to change over, remove .venv first" in message


@pytest.mark.parametrize("lock", SETUPS)
def test_an_interrupted_set_up_is_known_by_its_lock_and_done_again(checkout: Checkout, lock: str) -> None:
    """The stamp is written before the first package, and older than every lock."""
    commands = checkout.make(SETUPS[lock]).splitlines()
    first, last = [number for number, line in enumerate(commands) if line.startswith("touch ")]
    assert first < next(number for number, line in enumerate(commands) if " install" in line) < last
    (checkout.folder / ".venv").mkdir()
    subprocess.run(commands[first], shell=True, cwd=checkout.folder, check=True, timeout=60)
    assert checkout.installed("test") == [lock]
