"""Finds everything that can be wrong with an evaluation outside of a run, before any process starts."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from forgeasync.config import (
    LocalLauncher,
    ModelFacts,
    RoutingReplay,
    RunConfig,
    SamplingSection,
    check_without_model,
    is_served,
    named_sets,
    named_sources,
    resolve,
)
from forgeasync.controller.host_gpus import check_generator_gpus
from forgeasync.controller.preparation import check_task_lengths, load_prompts
from forgeasync.environments import EndpointModel, build_source, check_environment
from forgeasync.models import check_checkpoint_shapes, check_generator, model_folder, read_model_facts
from forgeasync.observability import check_folder
from forgeasync.planning import available_host_bytes, check_generator_memory
from forgeasync.rollouts import PromptEncoder, Task
from forgeasync.schema import ConfigError, Problem, raise_if_any
from forgeasync.scoring import check_verifiers, try_rewards

HELD_OUT = "held_out"
"""Name of the held-out problems among the sets."""

LIST_S = 20.0
"""Seconds for an endpoint to list its models."""

MAX_SAMPLES = 4096
"""Most samples of a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model that generators of ours sample from."""

    facts: ModelFacts
    path: Path
    prompts: PromptEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems that are evaluated, and how."""

    tasks: list[Task]
    sampling: SamplingSection
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A checked evaluation."""

    config: RunConfig
    model: LocalModel | EndpointModel
    sets: Mapping[str, ProblemSet]
    out: Path
    warnings: tuple[str, ...]


def without_trainer(config: RunConfig, model: str | None) -> RunConfig:
    """Return the config with what only training needs left out; ``model`` replaces ``model.path``."""
    trainer = config.trainer.model_copy(
        update={"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0, "keep_sampling_mask": False}
    )
    path = config.model.path if model is None else model
    return config.model_copy(
        update={
            "trainer": trainer,
            "lora": None,
            "model": config.model.model_copy(update={"path": path}),
            # Nothing is stored.
            "payload": config.payload.model_copy(update={"capacity_gib": 2.0**-10}),
        }
    )


def prepare_evaluation(
    config: RunConfig,
    *,
    model: str | None,
    endpoint: EndpointModel | None,
    num_samples: int | None,
    out: Path,
) -> PreparedEvaluation:
    """Check everything, and load problems and tokenizer.

    Raises:
        ConfigError: lists every problem found.
    """
    problems = [*check_without_model(config), *_check_out(out), *_check_samples(num_samples)]
    if config.environment is None or endpoint is None:
        sources = (*named_sources(config.data), *named_sets(config.evaluation))
        problems += check_verifiers(sources, config.scorer)
    if config.environment is not None:
        problems += check_environment(config.environment, config.sandbox, is_served=is_served(config))
    if is_served(config):
        remedy = "people bring its tasks, so there is nothing to evaluate on; give a config with other data"
        problems.append(Problem(field="data.source.kind", value="served", remedy=remedy))
    if endpoint is None and not isinstance(config.launcher, LocalLauncher):
        remedy = "an evaluation runs on this machine: give launcher.kind=local, or --base-url of an endpoint"
        problems.append(Problem(field="launcher.kind", value=config.launcher.kind, remedy=remedy))
    config = without_trainer(config, model)
    warnings: list[str] = []
    if endpoint is None:
        try:
            facts = read_model_facts(config.model.path)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        config = resolve(config, facts)
        gpu_problems, gpu_words = check_generator_gpus(config, facts)
        problems += [*check_generator(config, facts), *gpu_problems]
        warnings += gpu_words
        if not torch.cuda.device_count():
            problems += check_generator_memory(config, facts, host_bytes=available_host_bytes())
    raise_if_any(problems)
    served: LocalModel | EndpointModel
    if endpoint is None:
        folder = model_folder(config.model.path)
        raise_if_any(check_checkpoint_shapes(folder, facts))
        served = LocalModel(facts=facts, path=folder.resolve(), prompts=load_prompts(config, folder, facts))
    else:
        served = endpoint
        warnings += _not_sent(config)
    return PreparedEvaluation(
        config=config,
        model=served,
        sets=_load_sets(config, served, num_samples),
        out=out,
        warnings=tuple(warnings),
    )


def _load_sets(
    config: RunConfig, model: LocalModel | EndpointModel, num_samples: int | None
) -> dict[str, ProblemSet]:
    named = named_sets(config.evaluation)
    try:
        source = build_source(config.data, seed=config.seed, sets=named)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([Problem(field="data", remedy=str(error))]) from error
    sets = {
        HELD_OUT: ProblemSet(
            tasks=source.held_out[: config.evaluation.num_problems],
            sampling=config.sampling,
            num_samples=num_samples or 1,
        )
    }
    for one, of_set in zip(config.evaluation.sets, named, strict=True):
        sets[one.name] = ProblemSet(
            tasks=source.sets[of_set.name],
            sampling=one.sampling or config.sampling,
            num_samples=num_samples or one.num_samples,
        )
    # An environment makes prompts of its own; what an endpoint has room for, it says itself.
    if config.environment is None and isinstance(model, LocalModel):
        for of_name in sets.values():
            try:
                check_task_lengths(config, model.prompts, of_name.tasks, of_name.sampling)
            except ValueError as error:
                raise ConfigError([Problem(field="data", remedy=str(error))]) from error
    if config.environment is None:
        first_tasks = {task.source: task for one in sets.values() for task in reversed(one.tasks)}
        raise_if_any(try_rewards((*named_sources(config.data), *named), first_tasks))
    return sets


def _check_out(out: Path) -> Iterator[Problem]:
    problems = list(check_folder("--out", out))
    yield from problems
    if not problems and out.is_dir() and any(out.iterdir()):
        yield Problem(field="--out", value=str(out), remedy="holds files already; name a new folder")


def _check_samples(num_samples: int | None) -> Iterator[Problem]:
    if num_samples is not None and not 1 <= num_samples <= MAX_SAMPLES:
        remedy = f"must be 1 to {MAX_SAMPLES}: responses to each problem"
        yield Problem(field="--samples", value=num_samples, remedy=remedy)


def find_endpoint(base_url: str, *, model: str | None, api_key_variable: str | None) -> EndpointModel:
    """Return the endpoint's model of this name; without a name, the only one that the endpoint lists.

    Raises:
        ConfigError: the URL or the key is none, the endpoint cannot be asked, or it has several models.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        remedy = "must be a URL up to the version, such as http://localhost:8000/v1"
        raise ConfigError([Problem(field="--base-url", value=base_url, remedy=remedy)])
    endpoint = EndpointModel(base_url=base_url, model=model or "", api_key_variable=api_key_variable)
    try:
        key = endpoint.api_key()
    except ValueError as error:
        problem = Problem(field="--api-key-env", value=api_key_variable, remedy=str(error))
        raise ConfigError([problem]) from None
    if model is not None:
        return endpoint
    from openai import APIError, OpenAI

    try:
        with OpenAI(base_url=base_url, api_key=key, max_retries=1, timeout=LIST_S) as client:
            names = [one.id for one in client.models.list()]
    except APIError as error:
        remedy = f"does not list its models ({type(error).__name__}: {error.message}); give --endpoint-model"
        raise ConfigError([Problem(field="--base-url", value=base_url, remedy=remedy[:500])]) from None
    if len(names) != 1:
        remedy = f"is needed: {base_url} has {len(names)} models: {', '.join(names[:20])}"
        raise ConfigError([Problem(field="--endpoint-model", remedy=remedy)])
    return dataclasses.replace(endpoint, model=names[0])


def _not_sent(config: RunConfig) -> list[str]:
    """Settings of the distribution that Chat Completions do not know."""
    words = []
    sections = {"sampling": config.sampling} | {
        f"evaluation.sets.{index}.sampling": one.sampling
        for index, one in enumerate(config.evaluation.sets)
        if one.sampling is not None
    }
    for field, section in sections.items():
        for name, value in (("top_k", section.top_k), ("min_p", section.min_p)):
            if value:
                words.append(f"{field}.{name} = {value:g} is not sent: Chat Completions have no such field")
    if config.data.template_arguments is not None and config.data.chat_template:
        words.append("data.template_arguments are not sent: the endpoint renders its own template")
    return words
