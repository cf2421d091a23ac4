"""Rules on data, rewards and evaluation sets that concern several sections."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from forgeasync.algorithms import Grpo
from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.data import (
    PART_NAME_RULE,
    NamedSource,
    PythonReward,
    ReasoningGymReward,
    ReasoningGymSource,
    RendererName,
    is_part_name,
    name_of,
    named_sources,
)
from forgeasync.config.evaluation import named_sets
from forgeasync.config.generator import SamplingSection
from forgeasync.config.process_reward_model import ProcessRewardModel
from forgeasync.config.run import RunConfig
from forgeasync.schema import Problem

RESERVED_SETS = frozenset({"accuracy", "score_mean", "num_unscored", "reward"})
"""Names that no set may have, because other metrics are called ``eval/<name>`` already."""


_SET_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,99}", re.ASCII)


OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments that a run itself passes to the chat template, and those that change the form of its result."""


def check_data(config: RunConfig) -> Iterator[Problem]:
    """Check sources, their rewards and how prompts are rendered."""
    sources = named_sources(config.data)
    yield from _check_names(sources)
    # A reward that all sources share is checked with each of them; its problems are reported once.
    found = [
        problem
        for source in (*sources, *named_sets(config.evaluation))
        for problem in _check_rewards(source, config.timeouts.score_s, config.scorer.num_replicas)
    ]
    yield from {(problem.field, str(problem)): problem for problem in found}.values()
    yield from _check_step_rewards(sources, config.algorithm)
    yield from _check_template(config)
    if config.environment is not None:
        yield from _check_unused_rewards(config)


def _check_unused_rewards(config: RunConfig) -> Iterator[Problem]:
    """An environment scores its episodes itself."""
    given = {
        "data.reward": config.data.reward,
        **{f"data.sources.{i}.reward": one.reward for i, one in enumerate(config.data.sources or ())},
        **{f"evaluation.sets.{i}.reward": one.reward for i, one in enumerate(config.evaluation.sets)},
    }
    for field, reward in given.items():
        if reward is not None:
            remedy = "must be left out with an environment, which scores its episodes itself"
            yield Problem(field=field, value=field.rpartition(".")[2], remedy=remedy)


def _check_names(sources: tuple[NamedSource, ...]) -> Iterator[Problem]:
    counts = Counter(source.name for source in sources)
    for index, source in enumerate(sources):
        if counts[source.name] > 1:
            yield Problem(
                field=f"data.sources.{index}.name",
                value=source.name,
                remedy="is the name of another source too; metrics are kept by name, so give each its own",
            )


def _check_rewards(source: NamedSource, score_s: float, num_replicas: int) -> Iterator[Problem]:
    if not source.rewards:
        remedy = "must have at least one reward; leave the key out to use the source's own reward"
        yield Problem(field=source.reward_field, value=[], remedy=remedy)
    counts = Counter(map(name_of, source.rewards))
    for index, reward in enumerate(source.rewards):
        field, name = source.field_of_reward(index), name_of(reward)
        if isinstance(reward, ReasoningGymReward) and not isinstance(source.source, ReasoningGymSource):
            yield Problem(
                field=f"{field}.kind",
                value=reward.kind,
                remedy="needs a source of kind 'reasoning_gym', whose verifier it is; "
                f"{source.field} is of kind {source.source.kind!r}; use 'math' or 'python'",
            )
        if isinstance(reward, ProcessRewardModel) and len(source.rewards) > 1:
            remedy = "scores steps, which only a reward without others can; must not be in a list"
            yield Problem(field=f"{field}.kind", value=reward.kind, remedy=remedy)
        if counts[name] > 1:
            remedy = "is the name of another reward in the list too; give each its own name"
            yield Problem(field=f"{field}.name", value=name, remedy=remedy)
        if not is_part_name(name):
            yield Problem(
                field=f"{field}.name",
                value=name,
                remedy=f"becomes the metric reward/<name>; must be {PART_NAME_RULE}",
            )
        if reward.max_concurrent is not None and reward.max_concurrent < num_replicas:
            yield Problem(
                field=f"{field}.max_concurrent",
                value=reward.max_concurrent,
                remedy=f"must be at least scorer.num_replicas = {num_replicas}: every scorer has its share",
            )
        if isinstance(reward, PythonReward | ProcessRewardModel) and reward.limit_s >= score_s:
            yield Problem(
                field=f"{field}.limit_s",
                value=reward.limit_s,
                remedy=f"must be less than timeouts.score_s = {score_s:g}, the limit for a whole group",
            )


def _check_step_rewards(sources: Sequence[NamedSource], algorithm: AlgorithmSection) -> Iterator[Problem]:
    """A process reward model scores steps, and not every advantage takes them."""
    scores_steps = any(isinstance(one, ProcessRewardModel) for source in sources for one in source.rewards)
    if scores_steps and not isinstance(algorithm.advantage, Grpo):
        remedy = (
            "has no formula for rewards of steps, which kind 'process_reward_model' gives; must be 'grpo'"
        )
        yield Problem(field="algorithm.advantage", value=algorithm.advantage.kind, remedy=remedy)


def _check_template(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if not data.chat_template:
        for key, value in (
            ("system_prompt", data.system_prompt),
            ("template_arguments", data.template_arguments),
        ):
            if value is not None:
                remedy = "is used by the chat template only; needs data.chat_template = true"
                yield Problem(field=f"data.{key}", value=value, remedy=remedy)
    if data.renderer is not RendererName.AUTO:
        if not data.chat_template:
            remedy = "renders by a chat template; needs data.chat_template = true, or must be left out"
            yield Problem(field="data.renderer", value=data.renderer.value, remedy=remedy)
        if config.environment is None:
            remedy = "renders the messages of an environment; must be left out without one"
            yield Problem(field="data.renderer", value=data.renderer.value, remedy=remedy)
    if config.environment is not None and data.system_prompt is not None:
        remedy = "must be left out with an environment, whose messages are its own: give it a system message"
        yield Problem(field="data.system_prompt", value=data.system_prompt, remedy=remedy)
    for name, argument in (data.template_arguments or {}).items():
        if name in OWN_ARGUMENTS:
            remedy = "is set by the run itself, or would change what rendering returns; leave it out"
            yield Problem(field=f"data.template_arguments.{name}", value=argument, remedy=remedy)


def check_evaluation(config: RunConfig) -> Iterator[Problem]:
    """Check held-out problems and evaluation sets."""
    num_held_out = sum(source.num_held_out for source in named_sources(config.data))
    if config.evaluation.num_problems > num_held_out:
        yield Problem(
            field="evaluation.num_problems",
            value=config.evaluation.num_problems,
            remedy=f"must be at most data.num_held_out = {num_held_out}"
            + (", of all sources" if config.data.sources is not None else ""),
        )
    counts = Counter(one.name for one in config.evaluation.sets)
    for index, one in enumerate(config.evaluation.sets):
        field = f"evaluation.sets.{index}"
        if counts[one.name] > 1:
            yield Problem(field=f"{field}.name", value=one.name, remedy="is the name of another set too")
        if one.name in RESERVED_SETS or _SET_NAME.fullmatch(one.name) is None:
            yield Problem(
                field=f"{field}.name",
                value=one.name,
                remedy="becomes part of the metrics eval/<name>/...; must be up to 100 letters, digits, '_', "
                f"'-' or '.', and none of {', '.join(sorted(RESERVED_SETS))}",
            )
        if one.sampling is not None:
            yield from check_response_length(config, one.sampling, f"{field}.sampling")


def check_response_length(config: RunConfig, sampling: SamplingSection, field: str) -> Iterator[Problem]:
    """Check that the longest response leaves room for its prompt."""
    context = config.model.max_context_length
    if sampling.max_response_tokens >= context:
        yield Problem(
            field=f"{field}.max_response_tokens",
            value=sampling.max_response_tokens,
            remedy=f"must be less than model.max_context_length = {context}, which includes the prompt",
        )
