"""Checks a run's input before any process starts.

The parts:

    prepare_run   claims the run's folder, and prepares a new or a resumed run
    prepare       checks everything, and loads the tokenizer and the tasks
    check         the checks that need neither the model's weights nor the data
    check_plan    the checks of a dry run: check and a sample of the data
"""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from forgeasync.checkpoints import check_problems, check_room
from forgeasync.config import (
    LocalLauncher,
    ModelFacts,
    ProcessLauncher,
    RunConfig,
    SamplingSection,
    TeacherEndpoint,
    all_sources,
    check_gpus,
    check_without_model,
    gpus_per_host,
    is_served,
    named_sets,
    resolve,
)
from forgeasync.controller.hosts import check_local_gpus, places_of_rewards
from forgeasync.controller.resume import (
    Resumed,
    check_checkpoint_folder,
    claim_run,
    find_checkpoint,
    message_if_done,
    planned_export,
    planned_folder,
    resume_or_begin_anew,
)
from forgeasync.environments import build_source, check_environment, digest_of, preview_data
from forgeasync.files import SHARED_MEMORY
from forgeasync.models import (
    check_checkpoint_shapes,
    check_config,
    check_cpu_engine,
    load_tokenizer,
    model_folder,
    read_model_facts,
    untrained_tensors,
)
from forgeasync.observability import check_run_dir, check_wandb
from forgeasync.planning import (
    Machine,
    check_host_memory,
    check_memory,
    check_shared_memory,
    teacher_facts,
    with_host_requests,
)
from forgeasync.processes import available_host_bytes
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
"""Path of the model that ``make model`` builds."""


HELD_OUT = "held_out"
"""Name of the set of held-out problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems to evaluate, and how to sample their responses."""

    tasks: list[Task]
    sampling: SamplingSection
    num_samples: int
    """Number of responses to each problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked run: its config, its model's shape and folder, its tokenizer and its tasks."""

    config: RunConfig
    """Config with all defaults that depend on the model resolved."""
    facts: ModelFacts
    model_path: Path
    prompts: PromptEncoder
    train: Sequence[Task]
    sets: Mapping[str, ProblemSet]
    """Problems to evaluate, by name: the held-out problems (``HELD_OUT``), then each evaluation set."""
    resumed: Resumed | None
    """Checkpoint to resume from; None for a new run."""
    warnings: tuple[str, ...] = ()


def prepare_run(config: RunConfig, resume: str | None) -> Prepared | None:
    """Claim the run's folder, clean up after a dead run there, and prepare; print what was done.

    Returns None, and prints why, if ``resume`` names a run that has made all of its steps.

    Raises:
        ConfigError: lists every problem found, or names a run in progress in the folder.
        NotEnded: a process of the earlier run does not end.
    """
    for line in claim_run(config):
        print(line)
    if (done := message_if_done(config, resume)) is not None:
        print(done)
        return None
    choice, words = resume_or_begin_anew(config, resume)
    for line in words:
        print(line)
    return prepare(config, choice)


def prepare(config: RunConfig, resume: str | None = None) -> Prepared:
    """Check everything, and load what the controller needs: tokenizer and tasks.

    ``resume`` is "latest" or the folder of a checkpoint.

    Raises:
        ConfigError: lists every problem found.
    """
    facts = check(config, is_resumed=resume is not None)
    config = with_host_requests(resolve(config, facts), facts)
    resumed = None if resume is None else find_checkpoint(config, facts, resume)
    num_gpus = torch.cuda.device_count()
    on_hosts = num_gpus if isinstance(config.launcher, LocalLauncher) else gpus_per_host(config.launcher)
    gpu_problems, warnings = check_local_gpus(config, facts)
    # Before check_memory, which counts the memory of the teachers' engines.
    raise_if_any(check_teacher_models(config, facts))
    machine = Machine.GPU if num_gpus else Machine.CPU
    free_bytes = 0
    if isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # Shared memory of dead runs is freed before the free space is measured.
        sweep_stale_folders()
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    raise_if_any(
        [
            *check_prerequisites(config.launcher),
            *check_gpus(config, num_gpus, num_of_rewards=len(places_of_rewards(config, num_gpus))),
            *gpu_problems,
            *(() if on_hosts else check_cpu_engine(config, facts)),
            *(check_host_memory if num_gpus else check_memory)(
                config, facts, host_bytes=available_host_bytes()
            ),
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
        warnings=(*warnings, *_untrained(folder, facts)),
    )


def _untrained(folder: Path, facts: ModelFacts) -> Iterator[str]:
    if names := untrained_tensors(folder, facts):
        yield (
            f"{len(names)} tensors for multi-token prediction, vision or rotary frequencies are not trained; "
            "exported folders have them unchanged"
        )


def load_tasks(
    config: RunConfig,
    prompts: PromptEncoder | None,
    *,
    trains: bool = True,
    num_samples: int | None = None,
) -> tuple[Sequence[Task], dict[str, ProblemSet]]:
    """Return the tasks to train on and the sets to evaluate; see ``problem_sets``.

    With ``prompts``, every task must leave room for a full response in the context. ``trains=False`` skips
    this check for the training tasks.

    Raises:
        ConfigError: the data cannot be read, or a prompt is too long.
    """
    named = named_sets(config.evaluation)
    try:
        source = build_source(config.data, seed=config.seed, sets=named)
        of_sets = [source.sets[one.name] for one in named]
        num_held_out = config.evaluation.num_problems
        sets = problem_sets(config, source.held_out[:num_held_out], of_sets, num_samples=num_samples)
        # An environment makes its own prompts, and the room left in the context bounds each of its turns.
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
    """Return the sets to evaluate, by name: the held-out problems, then each of ``evaluation.sets``.

    ``num_samples`` replaces the config's number of responses to each problem.
    """
    sets = {HELD_OUT: ProblemSet(tasks=held_out, sampling=config.sampling, num_samples=num_samples or 1)}
    for one, tasks in zip(config.evaluation.sets, of_sets, strict=True):
        sampling = one.sampling or config.sampling
        sets[one.name] = ProblemSet(
            tasks=tasks, sampling=sampling, num_samples=num_samples or one.num_samples
        )
    return sets


def load_prompts(config: RunConfig, folder: Path, facts: ModelFacts) -> PromptEncoder:
    """Return the prompt encoder, with the tokenizer in the model's folder.

    Raises:
        ConfigError: the tokenizer cannot be loaded, does not run on the package ``tokenizers``, or has more
            tokens than the model; or its chat template does not support ``data`` or an environment.
    """
    try:
        tokenizer = load_tokenizer(folder)
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
        # Imported here: it imports the package renderers, which takes most of a second; other runs need none.
        from forgeasync.environments import check_template

        raise_if_any(check_template(tokenizer, config.data))
    return prompts


def _check_vocabulary(config: RunConfig, tokenizer_size: int, facts: ModelFacts) -> list[Problem]:
    """Return a problem if the embedding has fewer rows than the tokenizer has ids; more rows are padding."""
    if tokenizer_size <= facts.vocab_size:
        return []
    remedy = (
        f"its tokenizer has {tokenizer_size} token ids, its config.json vocab_size = {facts.vocab_size}; "
        "the embedding must have a row for every token"
    )
    return [Problem(field="model.path", value=config.model.path, remedy=remedy)]


def check(config: RunConfig, *, is_resumed: bool = False) -> ModelFacts:
    """Check the config against itself, the model's shape and files of earlier runs; return the shape.

    The checks call the user's own code on made-up input, build the environment and try the isolation of
    verifiers.

    Raises:
        ConfigError: lists every problem found.
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
        # Imported here: it imports the session server, which other runs do not need here.
        from forgeasync.environments import check_address

        others += check_address(config.serving)
    try:
        raise_if_any(_check_built(config))
        facts = read_model_facts(config.model.path)
    except ConfigError as error:
        # Report the other problems of the config together with the missing model.
        raise ConfigError([*error.problems, *own, *others]) from None
    raise_if_any([*check_config(config, facts), *others])
    return facts


def _check_built(config: RunConfig) -> list[Problem]:
    """Return a problem if the model that the config's ``warmup`` section describes is not built yet."""
    if config.warmup is None or Path(config.model.path).exists():
        return []
    make = "make model, or " if config.model.path == MADE_MODEL else ""
    remedy = (
        f"no such folder; the warmup section says how to build it: {make}python -m apps.warmup with the same "
        "--config and overrides; if the model needs no warm-up, add warmup=null"
    )
    return [Problem(field="model.path", value=config.model.path, remedy=remedy)]


def check_plan(config: RunConfig) -> tuple[ModelFacts, str]:
    """Run the checks of a dry run; return the model's facts and a message that says which data were read.

    The chat template is checked if the model's folder has a tokenizer.

    Raises:
        ConfigError: lists every problem found.
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
        look = preview_data(config.data, seed=config.seed, sets=named_sets(config.evaluation))
        looked_at = look.words
        if not any(".reward" in problem.field for problem in problems):
            problems += try_rewards(all_sources(config), look.first_tasks)
    except ConfigError as error:
        problems += error.problems
    raise_if_any(problems)
    assert facts is not None, "a check without facts has raised"
    return facts, looked_at


def gpu_memory_bytes() -> int | None:
    """Return the memory in bytes of this machine's smallest GPU; None without GPUs."""
    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), default=None)


def check_teacher_models(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Yield problems of teachers that cannot evaluate the policy's tokens; ``facts`` are the policy's.

    A teacher needs the policy's tokenizer, a long enough context, and a vocabulary of at least ``top_k``. One
    that takes the policy's weights needs the policy's shape.
    """
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
                "teacher scores the policy's tokens"
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
                "it scores"
            )
            yield Problem(field=field, value=path, remedy=remedy)


def check_teacher_prompts(
    config: RunConfig, prompts: PromptEncoder, tasks: Sequence[Task]
) -> Iterator[Problem]:
    """Yield problems of teacher prompts that cannot be filled in or leave no room for a response.

    At most one problem for each teacher. ``tasks`` are the training tasks. ``$sibling`` and ``$feedback`` are
    filled with empty text, because their values are not known yet.
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
    """Send one prompt to every teacher behind a server; yield problems with its answer or tokenizer."""
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
    """Return a message with the problem of a teacher behind a server, or None."""
    # Imported here: it imports the SDK, which only runs with such a teacher need.
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
