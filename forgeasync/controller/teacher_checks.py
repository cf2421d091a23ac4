"""Checks on the folders of teachers, before anything starts."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from forgeasync.config import ModelFacts, RunConfig, TeacherEndpoint
from forgeasync.models import model_folder
from forgeasync.planning import teacher_facts
from forgeasync.rollouts import PromptEncoder, Task, check_teacher_record, teacher_prompt
from forgeasync.schema import ConfigError, Problem
from forgeasync.scoring import RewardUnavailable


def check_teacher_models(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Find teachers that cannot read what the policy writes; ``facts`` are the policy's."""
    if not config.teachers:
        return
    own = _vocabulary(model_folder(config.model.path))
    for name, section in config.teachers.items():
        if section.endpoint is not None:
            continue
        path = section.path(config.model.path)
        field = f"teachers.{name}.model_path"
        try:
            teacher = teacher_facts(config, name)
        except ConfigError as error:
            yield from error.problems
            continue
        if section.moves and teacher != facts:
            remedy = (
                f"is a model of another shape than model.path = {config.model.path!r}; must be of the same: "
                "with this source it takes the policy's weights. null is the policy itself"
            )
            yield Problem(field=field, value=path, remedy=remedy)
            continue
        if _vocabulary(model_folder(path)) != own:
            remedy = (
                f"has another tokenizer than model.path = {config.model.path!r}; must have the same: a "
                "teacher is asked about the policy's own tokens"
            )
            yield Problem(field=field, value=path, remedy=remedy)
        num_ids = config.algorithm.num_teacher_ids
        if num_ids > teacher.vocab_size:
            yield Problem(
                field="algorithm.terms",
                value=num_ids,
                remedy=f"top_k must be at most {teacher.vocab_size}, the vocabulary of teacher {name}",
            )
        needed = section.max_context_length or config.model.max_context_length + 1
        if needed > teacher.max_position_embeddings:
            what = f"teachers.{name}.max_context_length"
            if section.max_context_length is None:
                what = "model.max_context_length + 1"
            remedy = (
                f"reads {teacher.max_position_embeddings} tokens; must read {what} = {needed}: one more than "
                "it is asked about"
            )
            yield Problem(field=field, value=path, remedy=remedy)


def check_teacher_prompts(
    config: RunConfig, prompts: PromptEncoder, tasks: Sequence[Task]
) -> Iterator[Problem]:
    """Find teachers' prompts that cannot be filled in, or leave no room for a response: one for each teacher.

    ``tasks`` are those that train. What ``$sibling`` and ``$feedback`` will be is not known yet.
    """
    for name, section in config.teachers.items():
        if section.prompt is None:
            continue
        field = f"teachers.{name}.prompt"
        limit = (section.max_context_length or config.model.max_context_length + 1) - 1
        limit -= config.sampling.max_response_tokens
        for task in tasks:
            if section.sources and task.source not in section.sources:
                continue
            try:
                text = teacher_prompt(section.prompt, task, sibling="", feedback="")
                num_tokens = len(prompts.encode(text))
            except ValueError as error:
                yield Problem(field=field, value=section.prompt, remedy=str(error))
                break
            if num_tokens > limit:
                yield Problem(
                    field=f"teachers.{name}.max_context_length",
                    value=section.max_context_length,
                    remedy=f"the prompt of task {task.task_id} has {num_tokens} tokens; must leave room for "
                    f"sampling.max_response_tokens = {config.sampling.max_response_tokens} and one more: at "
                    f"least {num_tokens + config.sampling.max_response_tokens + 1}",
                )
                break


def probe_teachers(
    config: RunConfig, facts: ModelFacts, prompts: PromptEncoder, tasks: Sequence[Task]
) -> Iterator[Problem]:
    """Ask every teacher behind a server about one prompt: whether it answers, as one with this tokenizer."""
    for name, section in config.teachers.items():
        if section.endpoint is None:
            continue
        task = next(task for task in tasks if not section.sources or task.source in section.sources)
        probing = _probe(name, section.endpoint, config.algorithm.num_teacher_ids, facts, prompts, task)
        problem = asyncio.run(probing)
        if problem is not None:
            yield Problem(field=f"teachers.{name}.endpoint", value=section.endpoint.base_url, remedy=problem)


async def _probe(
    name: str,
    endpoint: TeacherEndpoint,
    num_ids: int,
    facts: ModelFacts,
    prompts: PromptEncoder,
    task: Task,
) -> str | None:
    """What is wrong with a teacher behind a server, in words."""
    # It imports the SDK, which only runs with such a teacher need.
    from forgeasync.scoring import TeacherClient

    ids_S = prompts.encode(task.prompt)
    try:
        client = TeacherClient(endpoint)
    except ValueError as error:
        return str(error)
    try:
        record, texts = await client.probe(ids_S, num_ids=num_ids)
        check_teacher_record(
            record, num_tokens=len(ids_S) - 1, num_ids=num_ids, vocab_size=facts.vocab_size, teacher=name
        )
    except (RewardUnavailable, ValueError) as error:
        return str(error)
    finally:
        await client.close()
    for token, text in zip(ids_S[1:].tolist(), texts, strict=True):
        own = prompts.text_of(token)
        if text is not None and text != own:
            return f"its token {token} is {text!r}, the policy's {own!r}; must have the policy's tokenizer"
    return None


def _vocabulary(folder: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
