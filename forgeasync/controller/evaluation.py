"""Evaluates a model on problems that are not trained on, during a run or without one.

The parts:

    sample_problems       samples and scores rollouts of problems; used by all evaluations
    EvaluationSchedule    when a run evaluates, and whether training waits for it
    prepare_evaluation    checks an evaluation without a run (apps/evaluate.py) before any process starts
    EvaluationFolder      the files of an evaluation without a run: config, summary and episodes
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import torch
from rich.console import Console
from rich.table import Table

from forgeasync.config import (
    EvaluationMode,
    LocalLauncher,
    ModelFacts,
    RoutingReplay,
    RunConfig,
    all_sources,
    check_without_model,
    is_served,
    resolve,
)
from forgeasync.controller.hosts import check_local_gpus
from forgeasync.controller.preparation import HELD_OUT, Prepared, ProblemSet, load_prompts, load_tasks
from forgeasync.environments import EndpointModel, check_environment
from forgeasync.files import JsonLines
from forgeasync.models import check_checkpoint_shapes, check_generator, model_folder, read_model_facts
from forgeasync.observability import (
    Estimate,
    HeldOutScores,
    ProblemScores,
    SetSummary,
    StepConsole,
    check_folder,
    part_means,
)
from forgeasync.planning import check_memory
from forgeasync.processes import available_host_bytes
from forgeasync.rollouts import PromptEncoder, Score, Task, spanned
from forgeasync.runtime import GroupSampler, HeldOutRollout, Unscored
from forgeasync.schema import ConfigError, Problem, raise_if_any
from forgeasync.scoring import check_verifiers, try_rewards

logger = logging.getLogger(__name__)


OnEnded = Callable[[int, int, HeldOutRollout], None]
"""Callback with the index of the problem, the index of the sample, and the rollout."""


def num_responses(sets: Mapping[str, ProblemSet]) -> int:
    """Return the number of responses that one evaluation of ``sets`` samples."""
    return sum(len(one.tasks) * one.num_samples for one in sets.values())


async def evaluate_all(
    sets: Mapping[str, ProblemSet],
    groups: GroupSampler,
    *,
    on_answered: Callable[[], None] = lambda: None,
    max_concurrent: int | None = None,
) -> HeldOutScores:
    """Evaluate the held-out problems and every other set, one set after the other; see ``evaluate``."""
    start_s = time.perf_counter()
    scores = {
        name: await evaluate(one, groups, on_answered=on_answered, max_concurrent=max_concurrent)
        for name, one in sets.items()
    }
    held_out = scores.pop(HELD_OUT)
    return dataclasses.replace(held_out, sets=scores, wall_s=time.perf_counter() - start_s)


async def evaluate(
    problems: ProblemSet,
    groups: GroupSampler,
    *,
    on_answered: Callable[[], None] = lambda: None,
    max_concurrent: int | None = None,
) -> HeldOutScores:
    """Sample and score rollouts of every problem, and return the total scores; see ``sample_problems``.

    ``on_answered`` is called after every rollout. Without ``max_concurrent`` all rollouts are sampled
    concurrently. Rollouts that could not be scored are excluded from the accuracy and counted separately.
    """
    rollouts = await sample_problems(
        problems,
        groups,
        on_ended=lambda problem, sample, rollout: on_answered(),
        max_concurrent=max_concurrent,
    )
    scores = [one.result for one in rollouts if isinstance(one.result, Score)]
    return HeldOutScores(
        num_correct=sum(one.is_correct for one in scores),
        score_sum=math.fsum(one.value for one in scores),
        parts=part_means(scores),
        num_scored=len(scores),
        num_unscored=len(rollouts) - len(scores),
        versions=spanned(one.versions for one in rollouts),
    )


async def sample_problems(
    problems: ProblemSet,
    groups: GroupSampler,
    *,
    on_ended: OnEnded,
    max_concurrent: int | None = None,
    keeps_record: bool = False,
) -> list[HeldOutRollout]:
    """Sample and score the rollouts of each problem, each with its own sampling seed.

    The seed is sample index x number of problems + problem index: raising ``num_samples`` adds rollouts
    and leaves the others unchanged. ``on_ended`` is called after every rollout. Returns the rollouts ordered
    by sample, then by problem.
    """
    tasks, num_samples = problems.tasks, problems.num_samples
    places = contextlib.nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def sample_one(problem: int, sample: int) -> HeldOutRollout:
        async with places:
            rollout = await groups.score(
                tasks[problem],
                sampling=problems.sampling,
                seed=sample * len(tasks) + problem,
                keeps_record=keeps_record,
            )
        if isinstance(rollout.result, Unscored):
            logger.warning("%s", rollout.result.reason)
        on_ended(problem, sample, rollout)
        return rollout

    async with asyncio.TaskGroup() as all_tasks:
        answers = [
            all_tasks.create_task(sample_one(problem, sample))
            for sample in range(num_samples)
            for problem in range(len(tasks))
        ]
    return [answer.result() for answer in answers]


SHARE_BESIDE = 4
"""Divisor of the generators' concurrent sequences that gives the limit of an evaluation beside training.

Without a limit, training would wait behind the evaluation's requests in the engines' queues."""


def max_beside(config: RunConfig) -> int:
    """Return the maximum number of concurrent rollouts of an evaluation beside training."""
    generator = config.generator
    return max(1, generator.max_num_seqs * generator.num_replicas // SHARE_BESIDE)


class EvaluationSchedule:
    """Decides when a run evaluates and whether training waits, and runs the evaluations.

    With ``evaluation.mode: pinned`` training waits for every evaluation. With ``beside`` it waits only

        before the first step   for the evaluation of version 0, the initial model
        before the last step    for the evaluation in flight, which is recorded with the last but one step
        after the last step     until the last version is served and evaluated

    At most one evaluation is in flight. An evaluation that becomes due meanwhile is skipped and counted; a
    late one would measure other versions, close to the next evaluation. Each line of metrics has at most one
    evaluation, and every evaluation that begins is recorded in a line.
    """

    def __init__(
        self,
        prepared: Prepared,
        groups: GroupSampler,
        console: StepConsole,
        *,
        until_served: Callable[[int], Awaitable[None]],
    ) -> None:
        """``until_served`` waits until every generator samples with a version."""
        self._sets = prepared.sets
        self._max_beside = max_beside(prepared.config)
        self._groups = groups
        self._console = console
        self._until_served = until_served
        self._section = prepared.config.evaluation
        self._max_steps = prepared.config.max_steps
        self._wanted: asyncio.Queue[int] = asyncio.Queue()
        self._is_in_flight = False
        self._ended: HeldOutScores | None = None
        self._num_skipped = 0

    def waits_after(self, step: int) -> bool:
        """Return whether training waits after this step for an evaluation that is due or in flight."""
        if step == self._max_steps:
            return True
        if self._section.mode is EvaluationMode.PINNED:
            return self._is_due(step)
        return step == self._max_steps - 1

    async def first(self) -> HeldOutScores:
        """Evaluate version 0."""
        return await self._pinned(0)

    def resume(self, step: int) -> None:
        """Begin the evaluation that was due after ``step``, from which the run resumes.

        The run that wrote the checkpoint had begun that evaluation and did not complete it.
        """
        if self._section.mode is EvaluationMode.BESIDE and self._is_due(step) and step < self._max_steps - 1:
            self._begin(step)

    async def after_step(self, step: int) -> HeldOutScores | None:
        """Run or begin the evaluation that is due, if any; return the evaluation that has ended, if any.

        The policy version that step ``step`` made is ``step``.
        """
        if step == self._max_steps:
            return await self._pinned(step)
        if self._section.mode is EvaluationMode.PINNED:
            return await self._pinned(step) if self._is_due(step) else None
        is_last_but_one = step == self._max_steps - 1
        if is_last_but_one:
            await self._wanted.join()
        ended, self._ended = self._ended, None
        if self._is_due(step):
            if is_last_but_one or self._is_in_flight:
                self._num_skipped += 1
            else:
                self._begin(step)
        return ended

    async def loop(self) -> None:
        """Run evaluations beside training, one at a time, until cancelled."""
        while True:
            version = await self._wanted.get()
            num_rollouts = num_responses(self._sets)
            self._console.message(f"evaluating with {num_rollouts} responses beside training")
            scores = await evaluate_all(
                self._sets,
                self._groups,
                max_concurrent=self._max_beside,
            )
            self._console.message(f"evaluation begun after step {version}: {scores}")
            self._ended = scores
            self._is_in_flight = False
            self._wanted.task_done()

    def metrics(self) -> dict[str, float]:
        """Return counts since the start of the command, by metric name."""
        if self._section.mode is EvaluationMode.PINNED:
            return {}
        return {"eval/num_skipped": self._num_skipped}

    def _is_due(self, step: int) -> bool:
        return step > 0 and step % self._section.every_steps == 0

    def _begin(self, version: int) -> None:
        self._is_in_flight = True
        self._wanted.put_nowait(version)

    async def _pinned(self, version: int) -> HeldOutScores:
        """Evaluate while training waits, after every generator samples with ``version``."""
        await self._until_served(version)
        sets, console = self._sets, self._console
        num_problems = sum(len(one.tasks) for one in sets.values())
        num_rollouts = num_responses(sets)
        what = f"{num_problems} problems"
        if num_rollouts > num_problems:
            what += f", with {num_rollouts} responses"
        console.phase(f"evaluating version {version} on {what}", num_parts=num_rollouts)
        scores = await evaluate_all(sets, self._groups, on_answered=console.part_done)
        console.end_phase()
        return scores


LIST_S = 20.0
"""Timeout in seconds of an endpoint's list of models."""

MAX_SAMPLES = 4096
"""Maximum number of samples of a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """Model in a folder, to be sampled by generators of this process."""

    facts: ModelFacts
    path: Path
    prompts: PromptEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A checked evaluation: config, model, problems, output folder and warnings."""

    config: RunConfig
    model: LocalModel | EndpointModel
    sets: Mapping[str, ProblemSet]
    out: Path
    warnings: tuple[str, ...]


def without_trainer(config: RunConfig, model: str | None) -> RunConfig:
    """Return the config without the features that only training needs; ``model`` replaces ``model.path``."""
    trainer = config.trainer.model_copy(
        update={"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0, "keep_sampling_mask": False}
    )
    path = config.model.path if model is None else model
    return config.model_copy(
        update={
            "trainer": trainer,
            "lora": None,
            "model": config.model.model_copy(update={"path": path}),
            # An evaluation stores no payloads.
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
    """Check the config, the arguments and the machine; load the problems and the tokenizer.

    Raises:
        ConfigError: lists every problem found.
    """
    out_problems = list(check_folder("--out", out))
    if not out_problems and out.is_dir() and any(out.iterdir()):
        remedy = "holds files already; name a new folder"
        out_problems = [Problem(field="--out", value=str(out), remedy=remedy)]
    problems = [*check_without_model(config), *out_problems]
    if num_samples is not None and not 1 <= num_samples <= MAX_SAMPLES:
        remedy = f"must be 1 to {MAX_SAMPLES}: responses to each problem"
        problems.append(Problem(field="--samples", value=num_samples, remedy=remedy))
    sources = all_sources(config)
    if config.environment is None or endpoint is None:
        problems += check_verifiers(sources, config.scorer)
    if config.environment is not None:
        problems += check_environment(config.environment, config.sandbox, is_served=is_served(config))
    if is_served(config):
        remedy = "its tasks come from clients, so none can be evaluated; give a config with other data"
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
        gpu_problems, gpu_words = check_local_gpus(config, facts, trains=False)
        problems += [*check_generator(config, facts), *gpu_problems]
        warnings += gpu_words
        if not torch.cuda.device_count():
            problems += check_memory(config, facts, host_bytes=available_host_bytes(), trains=False)
    raise_if_any(problems)
    served: LocalModel | EndpointModel
    if endpoint is None:
        folder = model_folder(config.model.path)
        raise_if_any(check_checkpoint_shapes(folder, facts))
        served = LocalModel(facts=facts, path=folder.resolve(), prompts=load_prompts(config, folder, facts))
    else:
        served = endpoint
        warnings += _not_sent(config)
    # An endpoint reports itself if a prompt is too long for it.
    prompts = served.prompts if isinstance(served, LocalModel) else None
    _, sets = load_tasks(config, prompts, trains=False, num_samples=num_samples)
    if config.environment is None:
        first_tasks = {task.source: task for one in sets.values() for task in reversed(one.tasks)}
        raise_if_any(try_rewards(sources, first_tasks))
    return PreparedEvaluation(
        config=config,
        model=served,
        sets=sets,
        out=out,
        warnings=tuple(warnings),
    )


def find_endpoint(base_url: str, *, model: str | None, api_key_variable: str | None) -> EndpointModel:
    """Return the model ``model`` of an endpoint, or the only model that the endpoint lists.

    Raises:
        ConfigError: the URL or the API key is invalid; or, without ``model``, the endpoint does not list its
            models or lists a number other than one.
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
    """Return a warning for each setting that the Chat Completions API has no field for."""
    words = []
    sections = {"sampling": config.sampling} | {
        f"evaluation.sets.{index}.sampling": one.sampling
        for index, one in enumerate(config.evaluation.sets)
        if one.sampling is not None
    }
    for path, section in sections.items():
        for name, value in (("top_k", section.top_k), ("min_p", section.min_p)):
            if value:
                words.append(f"{path}.{name} = {value:g} is not sent: Chat Completions have no such field")
    if config.data.template_arguments is not None and config.data.chat_template:
        words.append("data.template_arguments are not sent: the endpoint renders its own template")
    return words


METHODS = {
    "accuracy": "mean over problems of the share of correct responses; Wilson interval, 95 percent, of the "
    "effective number of problems",
    "pass_at": "unbiased estimator of Chen et al. 2021 (arXiv:2107.03374); the same interval",
    "score": "mean over problems of the mean score; percentile bootstrap over problems, 95 percent",
}
"""How each figure of summary.json is computed, written into that file."""

COLUMNS = 120
"""Width of the table in characters, also when the output is a pipe."""


@dataclass(slots=True)
class EvaluationFolder:
    """Writes the files of an evaluation without a run; a context manager that closes ``episodes.jsonl``.

    The files:

        runs/evaluate-<name>-<time>/
            config.yaml      the config that was evaluated
            summary.json     every figure with its confidence interval
            episodes.jsonl   every response or episode, in order of completion
            artifacts/       files that episodes kept
            logs/            output of the processes
    """

    path: Path
    _lines: JsonLines = field(init=False)

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> "EvaluationFolder":
        """Create the folder, which must be empty or absent, and write ``config.yaml``."""
        folder = cls(path)
        folder.logs.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        return folder

    @property
    def logs(self) -> Path:
        """Folder with the output of processes."""
        return self.path / "logs"

    @property
    def artifacts(self) -> Path:
        """Folder with the files that episodes keep."""
        return self.path / "artifacts"

    @property
    def episodes(self) -> Path:
        """File with every response or episode."""
        return self.path / "episodes.jsonl"

    def log(self, process: str) -> Path:
        """Return the path of a process's log file."""
        return self.logs / f"{process}.log"

    def write(self, name: str, problem: int, sample: int, task: Task, rollout: HeldOutRollout) -> None:
        """Append the rollout of one sample of a problem in the set ``name``."""
        place = {"set": name, "problem": problem, "sample": sample}
        self._lines.append(place | rollout_record(task, rollout))

    def write_summary(
        self,
        what: str,
        summaries: Mapping[str, SetSummary],
        *,
        wall_s: float,
        warnings: Sequence[str],
    ) -> None:
        """Write ``summary.json``; ``what`` names the model that was evaluated."""
        record = {
            "evaluated": what,
            "wall_s": wall_s,
            "warnings": list(warnings),
            "methods": METHODS,
            "sets": {name: one.record for name, one in summaries.items()},
        }
        (self.path / "summary.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        self._lines = JsonLines(self.episodes)
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.close()


def rollout_record(task: Task, rollout: HeldOutRollout) -> dict[str, Any]:
    """Return the record of a rollout in ``episodes.jsonl``, as JSON values."""
    result, versions = rollout.result, rollout.versions
    record: dict[str, Any] = {
        "task_id": task.task_id,
        "source": task.source,
        "prompt": task.prompt,
        "answer": task.answer,
        "ending": None if rollout.ending is None else rollout.ending.value,
        "num_turns": rollout.num_turns,
        "versions": None if versions is None else [versions.first, versions.last],
        "reward": None,
        "is_correct": None,
        "unscored": None,
    }
    if isinstance(result, Score):
        record |= {
            "reward": result.value,
            "is_correct": result.is_correct,
            "parts": dict(result.parts),
            "penalties": dict(result.penalties),
        }
    else:
        record["unscored"] = result.reason
    return record | {"episode_record": rollout.record}


def problem_scores(rollouts: Sequence[HeldOutRollout], num_problems: int) -> list[ProblemScores]:
    """Return the scores of each problem; ``rollouts`` is ordered by sample, then by problem."""
    problems = []
    for problem in range(num_problems):
        of_problem = [one.result for one in rollouts[problem::num_problems]]
        scores = [one for one in of_problem if isinstance(one, Score)]
        problems.append(
            ProblemScores(
                num_correct=sum(one.is_correct for one in scores),
                values=tuple(one.value for one in scores),
            )
        )
    return problems


def summary_table(summaries: Mapping[str, SetSummary]) -> str:
    """Return the figures of all sets as a table, with 95 percent intervals in brackets."""
    table = Table(title="95 percent confidence intervals over problems")
    for column in ("set", "problems", "samples", "unscored", "figure", "value"):
        table.add_column(column, justify="left" if column in ("set", "figure", "value") else "right")
    for name, one in summaries.items():
        figures: list[tuple[str, Estimate | None]] = [("accuracy", one.accuracy), ("mean score", one.score)]
        figures += [(f"pass@{k}", estimate) for k, estimate in one.pass_at.items() if k > 1]
        for number, (figure, estimate) in enumerate(figures):
            counts = (name, str(one.num_problems), str(one.num_samples), str(one.num_unscored))
            shown = counts if number == 0 else ("",) * 4
            words = "none was scored" if estimate is None else str(estimate)
            if estimate is not None and estimate.num_problems < one.num_problems:
                words += f" of {estimate.num_problems} problems"
            table.add_row(*shown, figure, words)
    stream = io.StringIO()
    Console(file=stream, width=COLUMNS).print(table)
    return stream.getvalue().rstrip()
