"""Set-up installs from where pip is set to find packages, whoever does the installing."""

import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements" / "install.py"
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


def test_the_variables_of_pip_come_before_its_sections() -> None:
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


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_package_comes_from_where_pip_would_find_it(tmp_path: Path, version: str) -> None:
    for each in ("1.0", "2.0"):
        write_wheel(tmp_path / each, each)
    places = f"{tmp_path / '1.0'} {tmp_path / '2.0'}"
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    own |= {"PIP_FIND_LINKS": places, "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, SCRIPT, "--no-deps", "--target", tmp_path / "installed"]
    subprocess.run([*command, f"forgeasync-sample=={version}"], env=own, check=True)
    assert (tmp_path / "installed" / "forgeasync_sample.py").read_text() == f"VERSION = {version!r}\n"
