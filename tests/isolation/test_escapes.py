"""Nothing gets out of a box, nor from where answers are verified, as root or not.

The attempts do find what plain processes can reach.
"""

import asyncio
import functools
import json
import os
import platform

import pytest

from forgeasync.config import Bubblewrap
from forgeasync.isolation import Sandbox
from tests.support import escape_attempts, other_user
from tests.support.escape_attempts import ATTEMPTS, ESCAPED

USERS = ("this user", "nobody", "lesser root")
BOXES = ("bubblewrap", "verifiers")

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the attempts make system calls by their numbers on x86_64"
)


@functools.cache
def attempts(box: str, user: str) -> dict[str, str]:
    if user == "this user":
        if box == "verifiers":
            return escape_attempts.try_all_as_verifiers()
        return asyncio.run(escape_attempts.try_all(Bubblewrap(), harmless_only=False))
    if (problem := other_user.why_not()) is not None:
        pytest.skip(problem)
    run = other_user.run_as_nobody if user == "nobody" else other_user.run_as_lesser_root
    return json.loads(run(escape_attempts.__name__, box))


@functools.cache
def unsafe_attempts() -> dict[str, str]:
    return asyncio.run(escape_attempts.try_all(escape_attempts.sections()["unsafe"], harmless_only=True))


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", [one.name for one in ATTEMPTS])
def test_nothing_gets_out(name: str, user: str, box: str) -> None:
    said = attempts(box, user)[name]
    assert ESCAPED not in said and "BROKEN" not in said, said


@pytest.mark.parametrize("name", [one.name for one in ATTEMPTS if one.works_unsafe])
def test_the_attempt_gets_out_of_plain_processes(name: str) -> None:
    said = unsafe_attempts()[name]
    assert ESCAPED in said, said


async def test_links_in_a_box_lead_to_no_file_of_the_host(tmp_path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of the host")
    secret.chmod(0o666)
    async with Sandbox() as box:
        await box.exec(["ln", "-s", str(secret), "link"], timeout_s=300)
        await box.exec(["ln", "-s", str(tmp_path), "folder"], timeout_s=300)
        await box.exec(["ln", "-s", "/proc/1/root/etc/hostname", "name"], timeout_s=300)
        for path in ("link", "folder/secret.txt", f"../..{secret}", "name"):
            with pytest.raises((FileNotFoundError, RuntimeError)):
                await box.read(path)
        with pytest.raises(RuntimeError):
            await box.write("folder/new.txt", b"x")
    assert secret.read_text() == "of the host"
    assert os.listdir(tmp_path) == ["secret.txt"]


def test_links_in_a_prepared_workspace_are_not_followed(tmp_path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of the host")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "link").symlink_to(secret)
    (workspace / "folder").symlink_to(tmp_path)

    async def run() -> str:
        async with Sandbox(workspace=workspace) as box:
            done = await box.exec("cat link folder/secret.txt; ls -l", timeout_s=300)
            return done.stdout

    assert "of the host" not in asyncio.run(run())
