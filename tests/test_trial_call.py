"""A loss of one's own is tried on made-up tokens before anything starts."""

import textwrap
from pathlib import Path

import pytest
import torch

from forgeasync.algorithms.trial_call import check_objective_result, check_own_objective
from forgeasync.config.load import load_config
from forgeasync.config.loss_schema import PythonObjective
from forgeasync.config.problems import ConfigError
from forgeasync.controller.preparation import check
from tests.config_samples import CONFIGS, only

TAKES = "*, logprobs_T, behavior_logprobs_T, advantages_T, mask_T, sequence_ids_T"
GOOD = "-advantages_T * logprobs_T"


def write_loss(folder: Path, name: str, body: str, *, takes: str = TAKES) -> str:
    """A module with a factory ``loss`` whose objective has this body; the factory's path."""
    lines = textwrap.indent(textwrap.dedent(body), " " * 8)
    source = f"import torch\ndef loss():\n    def objective({takes}):\n{lines}\n    return objective\n"
    (folder / f"{name}.py").write_text(source)
    return f"{name}.loss"


def section(factory: str, **options: float) -> PythonObjective:
    return PythonObjective(kind="python", factory=factory, options=options)


@pytest.mark.parametrize(
    "factory",
    [
        "forgeasync.algorithms.objectives.ppo_clip",
        "forgeasync.algorithms.objectives.gspo",
        "forgeasync.algorithms.objectives.topr",
        "forgeasync.algorithms.objectives.reinforce",
        "forgeasync.algorithms.objectives.supervised",
    ],
)
def test_sound_objectives_pass(factory: str) -> None:
    assert list(check_own_objective(section(factory))) == []


def test_an_objective_with_sums_as_numbers_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    factory = write_loss(tmp_path, "trial_good", f"return {GOOD}, {{'objective/ones': float(mask_T.sum())}}")
    assert list(check_own_objective(section(factory))) == []


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("scalar", f"return ({GOOD}).mean(), {{}}", ["shape [] on 8 tokens", "must be [8]"]),
        ("bare", f"return ({GOOD}).mean()", ["returned a Tensor of shape []", "(losses_T, sums)"]),
        ("bare_t", f"return {GOOD}", ["returned a Tensor of shape [8]", "(losses_T, sums)"]),
        ("three", f"return {GOOD}, {{}}, 1", ["a tuple of 3", "(losses_T, sums)"]),
        ("column", f"return ({GOOD})[:, None], {{}}", ["shape [8, 1]", "must be [8]"]),
        ("masked", f"return ({GOOD})[mask_T], {{}}", ["shape [7]", "must be [8]"]),
        ("number", "return 1.0, {}", ["losses are a float"]),
        ("int", "return mask_T.long(), {}", ["torch.int64", "floating-point"]),
        ("nan", f"return ({GOOD}) / 0.0 * 0.0, {{}}", ["losses are [nan", "finite where mask_T"]),
        ("inf", f"return ({GOOD}) / 0.0, {{}}", ["inf", "finite where mask_T"]),
        ("root", "return (logprobs_T - behavior_logprobs_T).abs().sqrt(), {}", ["gradient", "nan", "finite"]),
        ("detached", f"return ({GOOD}).detach(), {{}}", ["no gradient reaches logprobs_T"]),
        ("behavior", "return -advantages_T * behavior_logprobs_T, {}", ["no gradient reaches logprobs_T"]),
        ("zero", f"return 0.0 * ({GOOD}), {{}}", ["is 0 for every token"]),
        ("sums", f"return {GOOD}, [1]", ["sums are a list"]),
        ("names", f"return {GOOD}, {{1: mask_T.sum()}}", ["key 1", "names of metrics"]),
        ("vector", f"return {GOOD}, {{'objective/x': mask_T}}", ["'objective/x' has shape [8]", "scalar"]),
        ("text", f"return {GOOD}, {{'objective/x': 'y'}}", ["'objective/x' is a str"]),
        ("mean", f"return {GOOD}, {{'objective/x': logprobs_T.mean()}}", ["is nan on a row without tokens"]),
        ("empty", f"logprobs_T.max()\nreturn {GOOD}, {{}}", ["raised", "a row without tokens"]),
        ("raises", "raise KeyError('gone')", ["raised KeyError: 'gone' on 8 made-up tokens"]),
    ],
)
def test_what_would_spoil_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str, words: list[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    factory = write_loss(tmp_path, f"trial_{name}", body)
    message = only(list(check_own_objective(section(factory))))
    assert message.startswith(f"algorithm.objective.factory = '{factory}': ")
    for word in words:
        assert word in message


def test_wrong_keywords_and_factories_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    factory = write_loss(tmp_path, "trial_keywords", "return 0", takes="logprobs, old_logprobs")
    message = only(list(check_own_objective(section(factory))))
    assert "takes (logprobs, old_logprobs)" in message and "logprobs_T, behavior_logprobs_T" in message
    (tmp_path / "trial_factory.py").write_text(
        "def f():\n    return 3\n\ndef g():\n    raise OSError('no')\n"
    )
    assert "returned a int" in only(list(check_own_objective(section("trial_factory.f"))))
    assert "raised OSError: no when it was called" in only(
        list(check_own_objective(section("trial_factory.g")))
    )


def test_the_check_of_a_run_tries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --dry-run and a start both begin with."""
    monkeypatch.syspath_prepend(tmp_path)
    factory = write_loss(tmp_path, "trial_of_run", f"return ({GOOD}).sum(), {{}}")
    override = f"algorithm.objective={{kind: python, factory: {factory}}}"
    config = load_config(CONFIGS / "tiny_moe_cpu.yaml", ["model.path=nowhere", override])
    with pytest.raises(ConfigError) as caught:
        check(config)
    fields = [problem.field for problem in caught.value.problems]
    assert sorted(fields) == ["algorithm.objective.factory", "model.path"]


@pytest.mark.parametrize(("path", "how"), [("models/tiny_moe", "make model, or "), ("m/other", "")])
def test_a_model_that_is_not_built_yet_comes_with_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(load_config(CONFIGS / "tiny_moe_cpu.yaml", [f"model.path={path}"]))
    message = only(list(caught.value.problems))
    assert message.startswith(f"model.path = {path!r}: no such folder; ")
    assert f"how to build it: {how}python -m apps.warmup with the same --config" in message


def test_at_run_time_a_scalar_is_not_broadcast() -> None:
    like_T = torch.zeros(5)
    check_objective_result(torch.zeros(5), {"objective/x": torch.zeros(())}, like_T)
    with pytest.raises(ValueError, match=r"shape \[\] on 5 tokens"):
        check_objective_result(torch.zeros(()), {}, like_T)
    with pytest.raises(ValueError, match=r"shape \[1\] on 5 tokens"):
        check_objective_result(torch.zeros(1), {}, like_T)
