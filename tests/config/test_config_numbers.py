"""Numbers of a config against what they are handed to: what a library would refuse, overflow on or ignore."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError
from vllm import SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.exceptions import VLLMValidationError

from forgeasync.config import MAX_LORA_RANK, MIN_TEMPERATURE, OptimizerSection, RunConfig, load_config
from forgeasync.models import check_config
from forgeasync.schema import MAX_SEED, ConfigError
from tests.support.config_samples import FACTS, WARMUP

LEFT_OUT = {
    "lora": ["lora={rank: 8, alpha: 16, targets: [q_proj]}"],
    "warmup": [WARMUP, "warmup.num_steps=2"],
}
"""Sections that a config need not have."""


def problems(config_file: Path, *overrides: str) -> list[str]:
    """What is said about the config before anything starts."""
    try:
        config = load_config(config_file, overrides)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return [str(problem) for problem in check_config(config, FACTS)]


KIMI = "{kind: kimi15, tau: 1}"
K2 = "{estimator: k2, coefficient: 1}"
CASES = [
    ("seed", 4294967296, ["at most 4294967295", "32 bits"], 4294967295),
    ("trainer.optimizer.betas", "[1.5, 0.9]", ["betas.0 = 1.5", "less than 1", "moment"], "[0.5, 0.9]"),
    ("trainer.optimizer.betas", "[0.9, 1.0]", ["betas.1 = 1.0", "less than 1"], "[0.9, 0.999]"),
    ("trainer.optimizer.betas", "[-0.1, 0.9]", ["betas.0 = -0.1", "at least 0"], "[0.0, 0.9]"),
    ("trainer.optimizer.learning_rate", 1e30, ["at most 1"], 1.0),
    ("trainer.optimizer.learning_rate", 1e-300, ["at least 1e-12"], 1e-12),
    ("trainer.optimizer.eps", 1e-45, ["at least 1e-20", "0 in float32"], 1e-15),
    ("trainer.optimizer.weight_decay", 1000.0, ["learning_rate = 0.001 must be less than 1"], 999.0),
    ("trainer.optimizer.max_grad_norm", 1e-30, ["at least 1e-06"], 1e-3),
    ("trainer.optimizer.decay_steps", "[0, 2]", ["must end at max_steps = 3 or later"], "[0, 3]"),
    ("trainer.optimizer.decay_steps", "[-1, 3]", ["decay_steps.0 = -1", "at least 0"], "[1, 4]"),
    ("trainer.router_bias_speed", 2.0, ["at most 1", "from 0 to 1"], 0.5),
    ("trainer.bad_steps.spike_factor", 1.0, ["greater than 1"], 1.5),
    ("trainer.bad_steps.num_kept", 0, ["greater than 0"], 1),
    ("sampling.temperature", 2.5, ["at most 2", "vLLM allows at most"], 2.0),
    ("sampling.temperature", 0.001, ["at least 0.01", "below 0.01 to 0.01", "trainer"], 0.01),
    ("sampling.temperature", 0, ["at least 0.01", "0 would be greedy", "no gradient"], 0.5),
    ("sampling.top_k", 1, ["probability 1", "no gradient"], 2),
    ("sampling.min_p", 0.999, ["at most 0.99"], 0.5),
    ("sampling.top_p", 0.01, ["greater than 1 / 100", "no gradient"], 0.02),
    ("weights.lease_timeout_s", 0.5, ["at least 1", "whole seconds"], 1.0),
    ("timeouts.setup_s", 1e-9, ["at least 0.1"], 0.1),
    ("timeouts.generate_s", 0, ["at least 0.1"], 1),
    ("data.num_train", 10**10, ["at most 10000000", "in memory"], 10**7),
    ("algorithm.objective", "{kind: kimi15, tau: 1e39}", ["tau = 1e+39", "at most 1e+30"], KIMI),
    ("algorithm.kl", "{estimator: k2, coefficient: 1e-300}", ["at least 1e-30"], K2),
    ("max_steps", 10**20, ["max_steps = 1", "at most 1000000000", "training steps"], 10**9),
    ("lora.rank", 1024, ["lora.rank = 1024", "at most 512", "vLLM"], 512),
    ("lora.alpha", 1e30, ["lora.alpha = 1e+30", "at most 1000000"], 64.0),
    ("warmup.seed", -1, ["warmup.seed = -1", "at least 0"], 0),
    ("warmup.shape.head_dim", 33, ["head_dim = 33", "multiple of 2", "rotary"], 34),
    ("warmup.shape.num_layers", 10**9, ["num_layers", "at most 1024"], 2),
    ("warmup.num_steps", 10**8, ["examples_per_step = 1", "at most 10000000", "memory"], 10**7),
    ("warmup.optimizer.decay_steps", "[0, 1]", ["end at warmup.num_steps = 2"], "[0, 2]"),
    ("warmup.optimizer.betas", "[1.0, 0.9]", ["betas.0 = 1.0", "less than 1"], "[0.9, 0.9]"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "bad", "words", "good"), CASES, ids=lambda value: str(value)[:40])
def test_values_are_held_against_what_they_are_handed_to(
    config_file: Path, field: str, bad: object, words: list[str], good: object
) -> None:
    section = field.partition(".")[0]
    sections = LEFT_OUT.get(section, [])
    (message,) = problems(config_file, *sections, f"{field}={bad}")
    assert message.startswith(section if sections else field)
    for word in words:
        assert word in message
    # A neighbour has no problem of its own; other fields may have to go along with it.
    assert not [
        text for text in problems(config_file, *sections, f"{field}={good}") if text.startswith(field)
    ]


def test_every_replica_has_a_seed_that_numpy_takes(config_file: Path) -> None:
    (message,) = problems(config_file, f"seed={MAX_SEED}", "generator.num_replicas=2")
    assert f"seed = {MAX_SEED}: must be at most {MAX_SEED - 1}" in message
    assert problems(config_file, f"seed={MAX_SEED - 1}", "generator.num_replicas=2") == []
    np.random.RandomState(MAX_SEED)
    with pytest.raises(ValueError):
        np.random.RandomState(MAX_SEED + 1)


def test_temperatures_that_are_let_in_are_sampled_at() -> None:
    assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    assert SamplingParams(temperature=0.9 * MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    SamplingParams(temperature=2.0)
    with pytest.raises(VLLMValidationError):
        SamplingParams(temperature=2.01)


def test_the_largest_rank_of_adapters_is_vllms() -> None:
    assert max(get_args(MaxLoRARanks)) == MAX_LORA_RANK


@pytest.mark.parametrize("gradient", [0.0, 1e-30, 1e-22, 1e-10, 1.0, 1e10])
def test_the_smallest_eps_makes_no_step_larger_than_adams(gradient: float) -> None:
    """Below 1e-20 a gradient whose square underflows would move a parameter by m / eps."""
    section = OptimizerSection(learning_rate=1e-3, eps=1e-20)
    parameter = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.AdamW([parameter], lr=section.learning_rate, betas=section.betas, eps=section.eps)
    parameter.grad = torch.full((1,), gradient)
    adam.step()
    assert abs(parameter.item()) <= 1.1e-3


def sections(model: type[BaseModel], seen: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    if model.__name__ not in seen:
        seen[model.__name__] = model
        for field in model.model_fields.values():
            for member in members(field.annotation):
                sections(member, seen)
    return seen


def members(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from members(part)


def numbers(kinds: str) -> list[tuple[type[BaseModel], str, str]]:
    """Every field of the schema that holds numbers, and how a number stands in it."""
    found = []
    for section in sections(RunConfig, {}).values():
        for name, field in section.model_fields.items():
            text = str(field.annotation)
            if not re.search(rf"\b({kinds})\b", text) or any(members(field.annotation)):
                continue
            form = "{}"
            if text.startswith("dict"):
                form = '{{"key": {}}}'
            elif "tuple" in text:
                form = "[{0}, {0}]"
            found.append((section, name, form))
    return found


def errors_of(section: type[BaseModel], name: str, value: str) -> list[str]:
    """Types of the errors that a field of a section makes of a JSON value; others may be missing."""
    try:
        section.model_validate_json(f'{{"{name}": {value}}}', strict=True)
    except ValidationError as error:
        return [details["type"] for details in error.errors() if details["loc"][0] == name]
    return []


FLOATS, ALL = numbers("float"), numbers("int|float")


def test_the_walk_finds_the_numbers() -> None:
    assert len(FLOATS) > 40 and len(ALL) > 90


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(("section", "name", "form"), FLOATS, ids=lambda value: str(value)[-30:])
def test_no_number_is_nan_or_infinite(section: type[BaseModel], name: str, form: str, value: str) -> None:
    assert errors_of(section, name, form.format(value))


@pytest.mark.parametrize(("section", "name", "form"), ALL, ids=lambda value: str(value)[-30:])
def test_every_number_has_an_upper_bound(section: type[BaseModel], name: str, form: str) -> None:
    if form.startswith("{{"):
        pytest.skip("options of a package or of a function: theirs to refuse")
    found = errors_of(section, name, form.format(json.dumps(10**31)))
    assert {"less_than", "less_than_equal"} & set(found), found
