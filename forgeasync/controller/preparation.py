"""Finds everything that can be wrong with a run's input before any process starts.

take_up       claims the run's folder, and prepares the run or the one that --resume names
prepare       checks everything, and loads the tokenizer and the tasks
check         the part of it that needs neither the model's weights nor the data
check_plan    what a dry run checks: ``check`` and a look at the data
"""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgeasync.checkpoints import check_problems, check_room
from forgeasync.config import (
    ModelFacts,
    RunConfig,
    SamplingSection,
    TeacherEndpoint,
    all_sources,
    check_gpus,
    check_without_model,
    is_served,
    named_sets,
    resolve,
)
from forgeasync.controller.hosts import check_local_gpus, places_of_rewards
from forgeasync.controller.resume import (
    Resumed,
    check_checkpoint_folder,
    find_checkpoint,
    message_if_done,
    planned_export,
    planned_folder,
    resume_or_begin_anew,
    take_over,
)
from forgeasync.environments import build_source, check_environment, digest_of, look_at_data
from forgeasync.files import SHARED_MEMORY
from forgeasync.models import (
    check_checkpoint_shapes,
    check_config,
    model_folder,
    read_model_facts,
)
from forgeasync.observability import check_run_dir, check_wandb
from forgeasync.planning import (
    Machine,
    check_memory,
    check_shared_memory,
    request_warnings,
    teacher_facts,
    with_host_requests,
)
from forgeasync.process_memory import available_host_bytes
from forgeasync.rollouts import (
    PromptEncoder,
    Task,
    check_teacher_record,
    sweep_stale_folders,
    teacher_prompt,
)
from forgeasync.runtime import check_prerequisites
from forgeasync.schema import ConfigError, Problem, raise_if_any
from forgeasync.scoring import RewardUnavailable, check_verifiers, try_rewards
from forgeasync.weights import check_transport

MADE_MODEL = "models/tiny_moe"
"""The model that ``make model`` builds."""


HELD_OUT = "held_out"
"""Name of the held-out problems among the sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems that are evaluated, and how."""

    tasks: list[Task]
    sampling: SamplingSection
    num_samples: int
    """Responses to each problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked run: its config, its model's shape and folder, its tokenizer and its tasks."""

    config: RunConfig
    """The config as the run uses it."""
    facts: ModelFacts
    model_path: Path
    prompts: PromptEncoder
    train: Sequence[Task]
    sets: Mapping[str, ProblemSet]
    """What is evaluated, by name: the held-out problems (``HELD_OUT``), then each evaluation set."""
    resumed: Resumed | None
    """The checkpoint to resume from; None: a new run."""
    warnings: tuple[str, ...] = ()
    """What ends no run, but its user should know."""


def take_up(config: RunConfig, resume: str | None) -> Prepared | None:
    """Claim the run's folder, end what a dead run has left there, and prepare; prints what was done.

    Returns None, and says so, if ``resume`` names a run that has made all of its steps.

    Raises:
        ConfigError: lists every problem found, or a run goes on in the folder.
        NotEnded: something of the run before does not end.
    """
    for line in take_over(config):
        print(line)
    if (done := message_if_done(config, resume)) is not None:
        print(done)
        return None
    choice, words = resume_or_begin_anew(config, resume)
    for line in words:
        print(line)
    return prepare(config, choice)


def prepare(config: RunConfig, resume: str | None = None) -> Prepared:
    """Check everything, and load what the controller itself needs: tokenizer and tasks.

    ``resume`` is "latest" or the folder of a checkpoint.

    Raises:
        ConfigError: lists every problem found.
    """
    facts = check(config, is_resumed=resume is not None)
    config = with_host_requests(resolve(config, facts), facts)
    resumed = None if resume is None else find_checkpoint(config, facts, resume)
    num_gpus = torch.cuda.device_count()
    gpu_problems, warnings = check_local_gpus(config, facts)
    # Before the memory of their engines is counted.
    raise_if_any(check_teacher_models(config, facts))
    machine = Machine.GPU if num_gpus else Machine.CPU
    # What dead runs hold in shared memory is as good as free.
    sweep_stale_folders()
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    raise_if_any(
        [
            *check_prerequisites(config.launcher),
            *check_gpus(config, num_gpus, num_of_rewards=len(places_of_rewards(config, num_gpus))),
            *gpu_problems,
            *([] if num_gpus else check_memory(config, facts, host_bytes=available_host_bytes())),
            *check_shared_memory(config, facts, machine, free_bytes=free_bytes),
            *check_room(config, facts, checkpoints=planned_folder(config), export=planned_export(config)),
        ]
    )
    folder = model_folder(config.model.path)
    raise_if_any(check_checkpoint_shapes(folder, facts))
    prompts = load_prompts(config, folder, facts)
    train, evaluated = load_tasks(config, prompts)
    raise_if_any(check_teacher_prompts(config, prompts, train))
    raise_if_any(probe_teachers(config, facts, prompts, train))
    if resumed is not None:
        raise_if_any(check_problems(resumed.state, resumed.folder, digest_of(train)))
    all_tasks = (*(one.tasks for one in evaluated.values()), train)
    first_tasks = {task.source: task for tasks in all_tasks for task in reversed(tasks)}
    raise_if_any(try_rewards(all_sources(config), first_tasks))
    return Prepared(
        config=config,
        facts=facts,
        model_path=folder.resolve(),
        prompts=prompts,
        train=train,
        sets=evaluated,
        resumed=resumed,
        warnings=(*request_warnings(config, facts), *warnings),
    )


def load_tasks(
    config: RunConfig,
    prompts: PromptEncoder | None,
    *,
    trains: bool = True,
    num_samples: int | None = None,
) -> tuple[Sequence[Task], dict[str, ProblemSet]]:
    """Load the tasks to train on, and those to evaluate; see ``problem_sets``.

    With ``prompts`` every task must leave room for a full response. Without ``trains`` those to train on are
    not looked at.

    Raises:
        ConfigError: the data cannot be read, or a task leaves no room.
    """
    named = named_sets(config.evaluation)
    try:
        source = build_source(config.data, seed=config.seed, sets=named)
        of_sets = [source.sets[one.name] for one in named]
        num_held_out = config.evaluation.num_problems
        sets = problem_sets(config, source.held_out[:num_held_out], of_sets, num_samples=num_samples)
        # An environment makes prompts of its own, and every turn is bounded by the room that is left.
        if config.environment is None and prompts is not None:
            checked = [(one.sampling, iter(one.tasks)) for one in sets.values()]
            if trains:
                checked.append((config.sampling, chain(source.train, source.held_out[num_held_out:])))
            for sampling, tasks in checked:
                for task in tasks:
                    prompts.check_length(
                        task,
                        max_context_length=config.model.max_context_length,
                        max_response_tokens=sampling.max_response_tokens,
                    )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([Problem(field="data", remedy=str(error))]) from error
    return source.train, sets


def problem_sets(
    config: RunConfig,
    held_out: list[Task],
    of_sets: Sequence[list[Task]],
    *,
    num_samples: int | None = None,
) -> dict[str, ProblemSet]:
    """Return what is evaluated: the held-out problems, and of each of ``evaluation.sets`` its tasks.

    ``num_samples`` replaces that of the config.
    """
    sets = {HELD_OUT: ProblemSet(tasks=held_out, sampling=config.sampling, num_samples=num_samples or 1)}
    for one, tasks in zip(config.evaluation.sets, of_sets, strict=True):
        sampling = one.sampling or config.sampling
        sets[one.name] = ProblemSet(
            tasks=tasks, sampling=sampling, num_samples=num_samples or one.num_samples
        )
    return sets


def load_prompts(config: RunConfig, folder: Path, facts: ModelFacts) -> PromptEncoder:
    """Return the encoder of prompts, with the tokenizer in the model's folder.

    Raises:
        ConfigError: the tokenizer cannot be loaded, is not one of the package tokenizers or has too many
            tokens, or its chat template cannot do what ``data`` or the messages of an environment ask of it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        remedy = f"its tokenizer cannot be loaded: {error}"
        raise ConfigError([Problem(field="model.path", value=config.model.path, remedy=remedy)]) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        remedy = (
            f"its tokenizer is a {type(tokenizer).__name__}, which the package tokenizers does not run; "
            "its folder must have one that does, as a tokenizer.json"
        )
        raise ConfigError([Problem(field="model.path", value=config.model.path, remedy=remedy)])
    raise_if_any(_check_vocabulary(config, max(tokenizer.get_vocab().values()) + 1, facts))
    try:
        prompts = PromptEncoder.from_section(tokenizer, config.data)
    except ValueError as error:
        raise ConfigError([Problem(field="data", remedy=str(error))]) from error
    if config.environment is not None:
        # It imports the package renderers, which takes most of a second, and which no other run needs.
        from forgeasync.environments import check_template

        raise_if_any(check_template(tokenizer, config.data))
    return prompts


def _check_vocabulary(config: RunConfig, tokenizer_size: int, facts: ModelFacts) -> list[Problem]:
    """Find an embedding that is smaller than its tokenizer's vocabulary; a larger one is padded."""
    if tokenizer_size <= facts.vocab_size:
        return []
    remedy = (
        f"its tokenizer has {tokenizer_size} token ids, its config.json vocab_size = {facts.vocab_size}; "
        "the embedding must have a row for every token"
    )
    return [Problem(field="model.path", value=config.model.path, remedy=remedy)]


def check(config: RunConfig, *, is_resumed: bool = False) -> ModelFacts:
    """Check the config against itself, its model's shape and files of earlier runs; return that shape.

    Code of the user's own is called on made-up input, an environment is built, and what isolates verifiers
    is tried.

    Raises:
        ConfigError: lists every problem.
    """
    own = check_without_model(config)
    others = [*check_run_dir(config, is_resumed=is_resumed)]
    others += check_checkpoint_folder(config, is_resumed=is_resumed)
    others += check_transport(config)
    others += check_wandb(config.logging)
    others += check_verifiers(all_sources(config), config.scorer)
    if config.environment is not None:
        others += check_environment(config.environment, config.sandbox, is_served=is_served(config))
    if is_served(config):
        # It imports the server of sessions, which no other run needs here.
        from forgeasync.environments import check_address

        others += check_address(config.serving)
    try:
        raise_if_any(_check_built(config))
        facts = read_model_facts(config.model.path)
    except ConfigError as error:
        # Other problems of the config are reported along with the missing model.
        raise ConfigError([*error.problems, *own, *others]) from None
    raise_if_any([*check_config(config, facts), *others])
    return facts


def _check_built(config: RunConfig) -> list[Problem]:
    """Find a model that is described by the config's ``warmup`` section, and not built yet."""
    if config.warmup is None or Path(config.model.path).exists():
        return []
    make = "make model, or " if config.model.path == MADE_MODEL else ""
    remedy = (
        f"no such folder; the warmup section says how to build it: {make}python -m apps.warmup with the same "
        "--config and overrides"
    )
    return [Problem(field="model.path", value=config.model.path, remedy=remedy)]


def check_plan(config: RunConfig) -> tuple[ModelFacts, str]:
    """Check what a dry run checks; return the model's facts, and in words which data were looked at.

    The chat template is checked if the model's folder has its tokenizer.

    Raises:
        ConfigError: lists every problem.
    """
    problems: list[Problem] = []
    facts, looked_at = None, ""
    try:
        facts = check(config)
        if (folder := Path(config.model.path)).joinpath("tokenizer.json").exists():
            load_prompts(config, folder, facts)
    except ConfigError as error:
        problems += error.problems
    try:
        look = look_at_data(config.data, seed=config.seed, sets=named_sets(config.evaluation))
        looked_at = look.words
        if not any(".reward" in problem.field for problem in problems):
            problems += try_rewards(all_sources(config), look.first_tasks)
    except ConfigError as error:
        problems += error.problems
    raise_if_any(problems)
    assert facts is not None, "a check without facts has raised"
    return facts, looked_at


def gpu_memory_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU; None without any."""
    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), default=None)


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
    """Find prompts of teachers that cannot be filled in, or leave no room for a response.

    One problem for each teacher. ``tasks`` are those that train. ``$sibling`` and ``$feedback`` are not known
    yet.
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
    """Ask every teacher behind a server about one prompt: it must answer, and have the policy's tokenizer."""
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
    """Return what is wrong with a teacher behind a server, in words."""
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
