"""Code of one's own is tried on made-up input before anything starts."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from forgeasync.algorithms import (
    Advantage,
    Aggregation,
    Correction,
    Filter,
    KlEstimator,
    Objective,
    PythonAdvantage,
    check_losses,
)
from forgeasync.config import AlgorithmSection, check_own_code, load_config
from forgeasync.controller import check
from forgeasync.schema import ConfigError, Problem, refuse
from tests.support.config_samples import CONFIGS, only

GOOD = "-row.advantages_T * row.logprobs_T"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules Python finds."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_loss(folder: Path, body: str, *, takes: str = "row") -> str:
    """A module with a factory ``loss`` whose objective has this body; the factory's path."""
    lines = textwrap.indent(textwrap.dedent(body), " " * 8)
    source = f"import torch\ndef loss():\n    def objective({takes}):\n{lines}\n    return objective\n"
    # Each test has a folder of its own name, so no module is another test's.
    (folder / f"{folder.name}.py").write_text(source)
    return f"{folder.name}.loss"


def problems(factory: str, part: str = "objective", **others: object) -> list[Problem]:
    """What is found with this code in this part of the algorithm section."""
    own = {"kind": "python", "factory": factory}
    parts = {part: [own] if part in ("corrections", "filters") else own}
    if part == "kl":
        parts = {"kl": {"estimator": own, "coefficient": 0.1}}
    keys = {"group_size": 4, "groups_per_step": 2, **parts, **others}
    section = AlgorithmSection.model_validate(keys)
    return [refuse(section, *refusal) for refusal in check_own_code(section)]


@pytest.mark.parametrize("name", ["PpoClip", "Gspo", "Topr", "Reinforce", "Supervised"])
def test_sound_objectives_pass(name: str) -> None:
    assert problems(f"forgeasync.algorithms.objectives.{name}") == []


def test_an_objective_with_sums_as_numbers_passes(folder: Path) -> None:
    factory = write_loss(folder, f"return {GOOD}, {{'objective/ones': float(row.mask_T.sum())}}")
    assert problems(factory) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"return ({GOOD}).mean(), {{}}", r"shape \[\] on 8 tokens.*must be \[8\]"),
        (f"return {GOOD}", r"returned a Tensor of shape \[8\].*\(losses_T, sums\)"),
        (f"return {GOOD}, {{}}, 1", r"a tuple of 3.*\(losses_T, sums\)"),
        (f"return ({GOOD})[row.mask_T], {{}}", r"shape \[7\].*must be \[8\]"),
        ("return 1.0, {}", r"losses are a float"),
        ("return row.mask_T.long(), {}", r"torch\.int64.*floating\-point"),
        (f"return ({GOOD}) / 0.0 * 0.0, {{}}", r"losses are \[nan.*finite where mask_T"),
        (f"return ({GOOD}) / 0.0, {{}}", r"inf.*finite where mask_T"),
        ("return (row.logprobs_T - row.behavior_logprobs_T).abs().sqrt(), {}", r"gradient.*nan.*finite"),
        (f"return ({GOOD}).detach(), {{}}", r"no gradient reaches logprobs_T"),
        ("return -row.advantages_T * row.behavior_logprobs_T, {}", r"no gradient reaches logprobs_T"),
        (f"return 0.0 * ({GOOD}), {{}}", r"is 0 for every token"),
        (f"return {GOOD}, [1]", r"sums are a list"),
        (f"return {GOOD}, {{1: row.mask_T.sum()}}", r"key 1.*names of metrics"),
        (f"return {GOOD}, {{'objective/x': row.mask_T}}", r"'objective/x' has shape \[8\].*scalar"),
        (f"return {GOOD}, {{'objective/x': 'y'}}", r"'objective/x' is a str"),
        (f"return {GOOD}, {{'objective/x': row.logprobs_T.mean()}}", r"is nan on a row without tokens"),
        (f"row.logprobs_T.max()\nreturn {GOOD}, {{}}", r"raised.*a row without tokens"),
        ("raise KeyError('gone')", r"raised KeyError: 'gone' on 8 made-up tokens"),
    ],
)
def test_what_would_spoil_a_run_is_refused(folder: Path, body: str, words: str) -> None:
    factory = write_loss(folder, body)
    message = only(problems(factory))
    assert re.match(rf"objective.factory = '{factory}': .*{words}", message)


def test_wrong_parameters_and_factories_that_fail(folder: Path) -> None:
    factory = write_loss(folder, "return 0", takes="row, logprobs")
    message = only(problems(factory))
    assert "missing 1 required positional argument: 'logprobs'" in message
    (folder / "trial_factory.py").write_text("def f():\n    return 3\n\ndef g():\n    raise OSError('no')\n")
    assert "returned a int" in only(problems("trial_factory.f"))
    assert "raised OSError: no when it was called" in only(problems("trial_factory.g"))


def test_the_check_of_a_run_tries_it(folder: Path) -> None:
    """What --dry-run and a start both begin with."""
    factory = write_loss(folder, f"return ({GOOD}).sum(), {{}}")
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
    assert "add warmup=null" in message


def test_at_run_time_a_scalar_is_not_broadcast() -> None:
    like_T = torch.zeros(5)
    check_losses((torch.zeros(5), {"objective/x": torch.zeros(())}), like_T=like_T)
    for shape in ((), (1,)):
        with pytest.raises(ValueError, match=rf"shape \[{''.join(map(str, shape))}\] on 5 tokens"):
            check_losses((torch.zeros(shape), {}), like_T=like_T)


OWN = """
import math
import torch
from forgeasync.algorithms.advantages import Advantage
from forgeasync.algorithms.aggregation import Aggregation, TokenMean
from forgeasync.algorithms.own_results import Filtered

def weights(row):
    return row.mask_T.float() * 0.5, {"correction/half_share": row.mask_T.sum()}

def weights_unmasked(row):
    return torch.ones(len(row.mask_T)), {}

def weights_of_nan(row):
    return (row.behavior_logprobs_T - row.logprobs_T).exp().detach(), {}

def weights_with_gradient(row):
    return row.masked(row.logprobs_T.exp()), {}

def bare_weights(row):
    return row.mask_T.float()

def kl(row):
    return row.masked(row.logprobs_T - row.ref_logprobs_T).abs()

def kl_mean(row):
    return kl(row).mean()

def kl_without_gradient(row):
    return kl(row).detach()

class Twice(TokenMean):
    def summed(self, values_T, mask_T, sequence_ids_T):
        return 2 * super().summed(values_T, mask_T, sequence_ids_T)

class Unsummed(TokenMean):
    def summed(self, values_T, mask_T, sequence_ids_T):
        return values_T

class NoCount(Aggregation):
    def summed(self, values_T, mask_T, sequence_ids_T):
        return values_T.sum()

def mean(values_T, mask_T, sequence_ids_T):
    return values_T[mask_T].mean()

def median(rewards_G):
    return rewards_G - rewards_G.median()

def best(rewards_G):
    return rewards_G.max()

def standardized(rewards_G):
    return (rewards_G - rewards_G.mean()) / rewards_G.std()

class OverBatch(Advantage):
    over_batch = True
    def __call__(self, rewards_N):
        assert len(rewards_N) == 8, len(rewards_N)
        return rewards_N - rewards_N.mean()

def short(facts, rng):
    return facts.keep([i for i, length in enumerate(facts.lengths) if length < 25])

def twice_the_first(facts, rng):
    return facts.keep([0, 0])

def infinite(facts, rng):
    return facts.keep([0], [math.inf])

def indices(facts, rng):
    return [0, 1]
"""


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("corrections", "weights", None),
        ("corrections", "weights_unmasked", "0 where mask_T is false"),
        ("corrections", "weights_of_nan", "must be finite"),
        ("corrections", "weights_with_gradient", "must be detached"),
        ("corrections", "bare_weights", "returned a Tensor of shape [8]; must return (weights_T, sums)"),
        ("kl", "kl", None),
        ("kl", "kl_mean", "estimates have shape []"),
        ("kl", "kl_without_gradient", "no gradient reaches logprobs_T from its estimates"),
        ("aggregation", "Twice", None),
        ("aggregation", "Unsummed", "its summed gave the shape [8]"),
        ("aggregation", "NoCount", "abstract"),
        ("aggregation", "mean", "must be a subclass of forgeasync.Aggregation"),
        ("advantage", "median", None),
        ("advantage", "OverBatch", None),
        ("advantage", "best", "gave advantages of shape [] for 4 rewards"),
        ("advantage", "standardized", "gave advantages [nan, nan, nan, nan] for rewards [1, 1, 1, 1]"),
        ("filters", "short", None),
        ("filters", "twice_the_first", "keeps the rollouts [0, 0] of 4"),
        ("filters", "infinite", "gives the rewards [inf]; must be finite"),
        ("filters", "indices", "gave a list; must give what facts.keep or facts.drop does"),
    ],
)
def test_every_part_of_ones_own_is_tried(folder: Path, part: str, name: str, words: str | None) -> None:
    (folder / "own_parts.py").write_text(OWN)
    found = problems(f"own_parts.{name}", part)
    if words is None:
        assert found == []
        return
    message = only(found)
    field = {"corrections": "corrections.0", "filters": "filters.0", "kl": "kl.estimator"}.get(part, part)
    assert message.startswith(f"{field}.factory = 'own_parts.{name}': ") and words in message


def test_an_advantage_of_ones_own_over_the_batch_sees_all_of_it(folder: Path) -> None:
    (folder / "own_parts.py").write_text(OWN)
    advantage = PythonAdvantage(factory="own_parts.OverBatch")
    first, second = advantage.of_batch([torch.ones(3).double(), torch.zeros(5).double()])
    assert first.tolist() == [0.625] * 3 and second.tolist() == [-0.375] * 5


def test_the_examples_in_the_docstrings_work(folder: Path) -> None:
    """Each base class shows a complete class of one's own."""
    bases = (Objective, Correction, Aggregation, KlEstimator, Advantage, Filter)
    parts = ("objective", "corrections", "aggregation", "kl", "advantage", "filters")
    for part, base in zip(parts, bases, strict=True):
        text = textwrap.dedent(base.__doc__.split("\n", 1)[1])
        code = re.search(r"\n((?:    .*\n|\n)+)", text)
        assert code is not None
        own_module = f"import {base.__module__} as fa"
        source = textwrap.dedent(code[1]).replace("import forgeasync as fa", own_module)
        (name,) = re.findall(r"^class (\w+)", source, flags=re.MULTILINE)
        (folder / f"docstring_{part}.py").write_text(source)
        assert problems(f"docstring_{part}.{name}", part) == [], part
        assert f".{name}" in base.__doc__, "the text says how it is named in a config"


@pytest.mark.parametrize("column", ["ref_logprobs_T", "proximal_logprobs_T"])
def test_columns_that_the_run_will_not_have_are_missed_before_it(folder: Path, column: str) -> None:
    body = f"return -row.advantages_T * (row.logprobs_T - row.{column}), {{}}"
    factory = write_loss(folder, body)
    assert "NoneType" in only(problems(factory))
    kl = {"estimator": "k3", "coefficient": 0.1}
    assert len(problems(factory, kl=kl)) == (0 if column == "ref_logprobs_T" else 1)


def test_an_objective_that_asks_for_proximal_logprobs_is_tried_with_and_without(folder: Path) -> None:
    (folder / "proximal.py").write_text(
        "import forgeasync as fa\n"
        "class Careless(fa.Objective):\n"
        "    @property\n"
        "    def needs_proximal(self): return True\n"
        "    def __call__(self, row):\n"
        "        return -row.advantages_T * (row.logprobs_T - row.proximal_logprobs_T), {}\n"
        "class Careful(Careless):\n"
        "    def __call__(self, row):\n"
        "        if row.proximal_logprobs_T is None:\n"
        "            return -row.advantages_T * row.logprobs_T, {}\n"
        "        return super().__call__(row)\n"
    )
    assert "NoneType" in only(problems("proximal.Careless"))
    assert problems("proximal.Careful") == []
