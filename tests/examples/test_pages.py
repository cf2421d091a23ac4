"""README and pages: their scripts, configs and commands, from the pages' own text.

A block says by its language what it is: ``python`` blocks of a page are one script, ``yaml`` blocks are
merged over a config, each line of ``bash`` is a command. A first line ``# my_rewards.py`` names a file of
the reader's. ``text`` and ``console`` are only read.
"""

import argparse
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from docs.build_site import config_reference
from examples.agents.model import write_model
from forgeasync.config import check_without_model, dump_config, load_config
from forgeasync.observability import METRICS
from forgeasync.testing import write_tiny_model
from tests.support.config_samples import SMALL_RUN
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    *("README", "docs/algorithms", "docs/debugging", "docs/environments", "docs/evaluation"),
    *("docs/first_run", "docs/gpu", "docs/models", "docs/plugins", "docs/profiling", "docs/rewards"),
    *("docs/serving", "docs/teachers", "docs/testing", "docs/tools", "docs/training_loop", "docs/viewer"),
    "docs/weights",
)
NAME = re.compile(r"# (?P<name>\w+\.(?:py|yaml))(?:: (?P<base>configs/\S+))?$", re.MULTILINE)
SHELL = {".", "cd", "git", "tail", "tensorboard"}
STARTS = re.compile(r"fa\.train\(|Fleet|httpx")
"""What a script does only in a whole run."""

SMALL = (
    *SMALL_RUN,
    "data.num_held_out=8",
    "evaluation.num_problems=8",
    # A teacher reads one token more.
    "model.max_context_length=159",
    "trainer.optimizer={learning_rate: 0.01, warmup_steps: 0}",
    # A model of random weights is hardly ever right.
    "data.reward={kind: python, factory: own_rewards.anything}",
)


def blocks(page: str, language: str) -> list[str]:
    text = (REPOSITORY / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


def script(page: str) -> list[str]:
    """The blocks of a page's script, with few steps."""
    own = [block for block in blocks(page, "python") if not NAME.match(block)]
    return [re.sub(r'("max_steps": |max_steps=)\d+', r"\g<1>2", block) for block in own]


def commands(page: str) -> list[list[str]]:
    lines = "".join(blocks(page, "bash")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def with_language(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's checkout, with the files that pages say to save; configs are small."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").mkdir()
    (folder / "models").mkdir()
    for path in (REPOSITORY / "configs").iterdir():
        (folder / "configs" / path.name).symlink_to(path)
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    for name in ("tiny_moe", "tiny_teacher", "tiny_self"):
        (folder / "models" / name).symlink_to(folder / "models" / "written")
    write_tiny_model(folder / "models" / "written")
    for name in ("tiny_moe_cpu", "distill_cpu"):
        small = dump_config(load_config(REPOSITORY / "configs" / f"{name}.yaml", SMALL))
        (folder / "configs" / f"{name}.yaml").unlink()
        (folder / "configs" / f"{name}.yaml").write_text(small)
    (folder / "own_rewards.py").write_text("def anything(task, response):\n    return 1.0\n")
    for page in PAGES:
        for block in (*blocks(page, "python"), *blocks(page, "yaml")):
            if match := NAME.match(block):
                (folder / match["name"]).write_text(block)
    return folder


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder as the working directory, from which modules are imported."""
    before = set(sys.modules)
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    yield workplace
    for name in set(sys.modules) - before:
        if (workplace / f"{name}.py").exists():
            del sys.modules[name]


# --- scripts ---


def run_here(page: str, parts: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for part in parts:
        exec(compile(part, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", with_language("python"))
def test_scripts_run_as_far_as_they_start_no_run(page: str, here: Path) -> None:
    parts = script(page)
    for part in parts:
        compile(part, page, "exec")
    names = run_here(page, list(takewhile(lambda part: not STARTS.search(part), parts)))
    for name, value in names.items():
        if name.startswith("test_") and not value.__code__.co_argcount:
            value()


# --- configs ---


@pytest.mark.parametrize("page", with_language("yaml"))
def test_configs_are_valid(page: str, here: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        match = NAME.match(block)
        base = REPOSITORY / ((match and match["base"]) or "configs/tiny_moe_cpu.yaml")
        (here / "overlay.yaml").write_text(block)
        config = load_config([base, here / "overlay.yaml"])
        assert check_without_model(config) == [], f"block {number} of {page}"


# --- commands ---


class Parsed(Exception):
    """A command has parsed its arguments."""


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps end once their own parsers have accepted the arguments."""
    for name in ("parse_args", "parse_known_args", "parse_known_intermixed_args"):
        method = getattr(argparse.ArgumentParser, name)

        def parse(*given: Any, method: Callable[..., Any] = method, **named: Any) -> object:
            found = method(*given, **named)
            # Intermixed parsing parses in two rounds, through parse_known_args.
            if sys._getframe(1).f_globals["__name__"] == "argparse":
                return found
            namespace, unknown = found if isinstance(found, tuple) else (found, [])
            assert not unknown
            raise Parsed(namespace)

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)


@pytest.mark.parametrize("page", with_language("bash"))
def test_commands_are_accepted(page: str, here: Path, parsing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([\w./-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    for words in commands(page):
        match words:
            case ["make", *given]:
                assert given and set(given) <= targets, words
            case ["python", "-m", module, *given]:
                monkeypatch.setattr(sys, "argv", [f"{module.replace('.', '/')}.py", *given])
                with pytest.raises(Parsed) as parsed:
                    importlib.import_module(module).main()
                (arguments,) = parsed.value.args
                if files := getattr(arguments, "config", None):
                    load_config(files, arguments.overrides)
            case ["python", file, *_]:
                saved = [name for name in (REPOSITORY / file, here / file) if name.exists()]
                assert saved or f"`{file}`" in (REPOSITORY / f"{page}.md").read_text(), words
            case _:
                assert words[0] in SHELL, words


# --- names and figures ---


@pytest.mark.parametrize("page", PAGES)
def test_metrics_and_keys_exist(page: str) -> None:
    text = (REPOSITORY / f"{page}.md").read_text(encoding="utf-8")
    rooms = {metric.key.partition("/")[0] for metric in METRICS if "/" in metric.key}
    for name in re.findall(r"`([a-z_]+/[a-z_<>/0-9]+)`", text):
        if name.partition("/")[0] in rooms:
            plain = re.sub("<part>", "part", name)
            assert any(metric.matches(name) or metric.matches(plain) for metric in METRICS), name
    keys = re.findall(r"^\| `(\S+)` \|", config_reference(), flags=re.MULTILINE)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_<>]+)+)[`=:]", text):
        if name.partition(".")[0] in sections and not name.endswith((".md", ".yaml", ".jsonl", ".respond")):
            assert name.replace("<name>", "NAME") in keys, name


def test_the_picture_has_the_figures_of_the_table() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (row,) = re.findall(r"^\| `make demo`.*$", readme, flags=re.MULTILINE)
    accuracies = re.findall(r"([\d.]+) %", row)
    picture = (REPOSITORY / "docs" / "demo.svg").read_text()
    assert re.findall(r"<text class=\"value\".*?>([\d.]+) %</text>", picture) == accuracies
    points = re.findall(r"([\d.]+),([\d.]+)", re.findall(r'<polyline.*? points="(.*?)"', picture)[0])
    # From 0 % at y = 250 to 100 % at y = 50, 60 steps over 480.
    expected = [(80 + 160 * number, 250 - 2 * float(value)) for number, value in enumerate(accuracies)]
    assert [(float(x), float(y)) for x, y in points] == [pytest.approx(one) for one in expected]


def test_the_figures_of_the_demos_are_those_of_the_results() -> None:
    pages = ("README.md", "docs/results.md", "docs/environments.md")
    readme, results, tutorial = ((REPOSITORY / page).read_text() for page in pages)
    demo, agent = re.findall(r"^\| seed 0 \| (.*) \|$", results, flags=re.MULTILINE)
    *learned, first, last = agent.split(" | ")
    claims = re.findall(r"^\| `make demo.*?\| (.*) \|$", readme, flags=re.MULTILINE)
    assert claims == [demo, " | ".join(learned)]
    before, after = (round(float(learned[number].removesuffix(" %"))) for number in (0, 3))
    assert f"from {first} to {last}, and held-out accuracy from {before} % to {after} %" in tutorial


# --- whole runs ---


@starts(Starts.PROCESSES)
def run(workplace: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=workplace,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{workplace}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_commands(page: str, workplace: Path, *, app: str, less: tuple[str, ...] = ()) -> list[str]:
    """What the commands of a page that call an app print."""
    called = [words[1:] for words in commands(page) if words[:3] == ["python", "-m", app]]
    return [run(workplace, *words, *less) for words in called]


def run_script(page: str, workplace: Path) -> str:
    (workplace / "page.py").write_text("\n\n".join(script(page)))
    return run(workplace, "page.py")


@pytest.mark.exhaustive
def test_the_reward_of_the_tutorial_trains(workplace: Path) -> None:
    out = run_script("docs/rewards", workplace)
    assert re.search(r"step 1: brevity [\d.]+\naccuracy: [\d.]+; the model is in runs/", out)


@pytest.mark.exhaustive
def test_the_loop_of_the_tutorial_samples_trains_and_publishes(workplace: Path) -> None:
    out = run_script("docs/training_loop", workplace)
    assert "round 2: 8 of 8 responses are right" in out and "left out" not in out
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 8 and losses[-1] < losses[0], "it imitates what it has sampled"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_run_of_the_page_on_testing(here: Path, tmp_path: Path) -> None:
    run_here("docs/testing", script("docs/testing"))["test_the_environment_trains"](tmp_path)


@pytest.mark.exhaustive
def test_the_environment_of_the_tutorial_trains(workplace: Path) -> None:
    write_model(workplace / "models" / "tiny_agent", num_steps=40)
    less = ("max_steps=2", "evaluation.num_problems=2")
    (out,) = run_commands("docs/environments", workplace, app="apps.grpo", less=less)
    assert "environment ready" in out and re.search(r"step +2/", out)
    (shown,) = run_commands("docs/environments", workplace, app="apps.show")
    assert "--- user" in shown and "on shelf" in shown


@pytest.mark.exhaustive
def test_the_first_run_and_its_evaluation(workplace: Path) -> None:
    first, resumed = [words[1:] for words in commands("docs/first_run") if "run_dir=runs/demo" in words]
    out = run(workplace, *[re.sub("max_steps=.*", "max_steps=2", word) for word in first])
    assert "age 0.0/0" in out and "find bottlenecks: " in out
    out = run(workplace, *[re.sub("max_steps=.*", "max_steps=3", word) for word in resumed])
    assert re.search(r"step +3/3", out) and not re.search(r"step +2/3", out)
    evaluate, *_ = [words[1:] for words in commands("docs/evaluation") if "--model" in words]
    assert "pass@4" in run(workplace, *evaluate, "evaluation.num_problems=8")
    _, shown = run_commands("docs/evaluation", workplace, app="apps.show")
    assert "=== verdict" in shown


@pytest.mark.exhaustive
def test_the_distillation_of_the_tutorial(workplace: Path) -> None:
    (out,) = run_commands("docs/teachers", workplace, app="apps.distill", less=("max_steps=2",))
    assert "teacher trained" in out and re.search(r"step +2/", out)


@starts(Starts.PROCESSES)
def serve(workplace: Path) -> "subprocess.Popen[str]":
    (words,) = [words[1:] for words in commands("docs/serving") if "apps.serve" in words]
    return subprocess.Popen([sys.executable, *words], cwd=workplace, stdout=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_the_client_of_the_tutorial_is_served(workplace: Path) -> None:
    (workplace / "client.py").write_text("\n".join(script("docs/serving")))
    with serve(workplace) as server:
        assert server.stdout is not None
        assert any(line.startswith("step 0: ") for line in server.stdout)
        out = run(workplace, "client.py")
        server.send_signal(signal.SIGINT)
        server.stdout.read()
    assert "the model says" in out and "'num_feedback': 1" in out
