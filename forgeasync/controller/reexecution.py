"""Executes a recorded run again, and compares: what the generators sampled and what the scorers said.

``plan_reexecution`` reads the record of a run (``forgeasync.observability.ExecutionLog``) and prepares a
config. apps/reexecute.py has the loop over the steps.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forgeasync.checkpoints import list_checkpoints, step_of
from forgeasync.config import JudgeReward, RunConfig, load_config, named_sources
from forgeasync.controller.starting import Fleet
from forgeasync.environments import response_of, sampling_seed
from forgeasync.generator import TokenDifference
from forgeasync.models import kernel_digest
from forgeasync.observability import Execution, RecordedStep, RunDir, machine_name
from forgeasync.rollouts import (
    EVERY_HOST,
    Group,
    PayloadReader,
    SpilledGroup,
    SpilledGroupTorn,
    decode_rollout,
    file_name,
    read_spilled,
)
from forgeasync.runtime import Unscored
from forgeasync.schema import ConfigError, Problem, raise_if_any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reexecution:
    """Steps of a run to execute again, and how."""

    config: RunConfig
    """Config of the processes that execute them."""
    checkpoint: Path | None
    """Checkpoint to begin with; None: the run's first model."""
    first_version: int
    steps: tuple[RecordedStep, ...]
    digests: dict[int, str]
    groups: dict[int, SpilledGroup]
    """Groups of all steps by draw."""

    @property
    def scores_again(self) -> bool:
        """Whether scores follow from responses. An environment's and a judge's are taken from the record."""
        rewards = [reward for source in named_sources(self.config.data) for reward in source.rewards]
        return self.config.environment is None and not any(isinstance(one, JudgeReward) for one in rewards)

    @property
    def num_not_sampled(self) -> int:
        """Number of groups that began before the first version, and thus are not sampled again."""
        return sum(one.group.first_version < self.first_version for one in self.groups.values())

    def beginning(self, version: int) -> list[SpilledGroup]:
        """Return the groups whose oldest token has this version, in the order of their draws."""
        found = [one for one in self.groups.values() if one.group.first_version == version]
        return sorted(found, key=lambda one: one.group.draw_id)

    def batch(self, step: RecordedStep) -> list[Group]:
        """Return the groups of a step with the rollouts and rewards that trained."""
        groups = (self.groups[draw] for draw in step.draws)
        return [one.group.trained(one.rewards, one.kept, one.scores) for one in groups]


def plan_reexecution(
    run: Path, *, first: int | None, last: int | None, overrides: Sequence[str]
) -> Reexecution:
    """Read a run's record, and prepare to execute the steps after ``first``, up to ``last``, again.

    Args:
        first: Step of a checkpoint of the run; None or 0: the beginning.
        last: Last step; None: the last one recorded.
        overrides: Changes of the run's config, as on the command line.

    Raises:
        ConfigError: The run has no record of these steps, this machine's kernels round differently from those
            of the run's, or an override is wrong.
    """
    run_dir = RunDir(path=run)
    execution = _read_execution(run_dir)
    if execution.kernels != kernel_digest():
        remedy = f"was recorded on a {execution.machine}, whose kernels round differently from those here"
        remedy += f" ({machine_name()}); must be executed again on such a machine"
        raise ConfigError([Problem(field="RUN", value=str(run), remedy=remedy)])
    recorded = load_config([run_dir.config])
    checkpoint = None if not first else _checkpoint(recorded, run_dir, first)
    begin, newest = first or 0, max(execution.steps, default=0)
    end = newest if last is None else last
    if not begin < end <= newest:
        remedy = f"must be a step after {begin}; the run has recorded {newest} steps"
        raise ConfigError([Problem(field="--to", value=end, remedy=remedy)])
    steps = [execution.steps.get(step) for step in range(begin + 1, end + 1)]
    missing = [begin + 1 + index for index, one in enumerate(steps) if one is None]
    raise_if_any(Problem(field=run_dir.execution.name, remedy=f"has no step {step}") for step in missing[:1])
    known = tuple(one for one in steps if one is not None)
    groups = dict(_read_groups(run_dir, known))
    config = load_config([run_dir.config], [*_settings(recorded, run), *overrides])
    return Reexecution(
        config=config,
        checkpoint=checkpoint,
        first_version=begin,
        steps=known,
        digests=execution.digests,
        groups=groups,
    )


def _read_execution(run_dir: RunDir) -> Execution:
    try:
        return Execution.read(run_dir.execution)
    except FileNotFoundError:
        remedy = f"has no {run_dir.execution.name}: the run needs record_execution=true"
        raise ConfigError([Problem(field="RUN", value=str(run_dir.path), remedy=remedy)]) from None
    except ValueError as error:
        raise ConfigError([Problem(field=run_dir.execution.name, remedy=str(error))]) from None


def _checkpoint(config: RunConfig, run_dir: RunDir, step: int) -> Path:
    folder = run_dir.checkpoints if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    found = {step_of(one): one for one in list_checkpoints(folder)}
    if step not in found:
        there = ", ".join(str(one) for one in found if one is not None) or "none"
        remedy = f"must be 0 or the step of a checkpoint of the run, which are: {there}"
        raise ConfigError([Problem(field="--from", value=step, remedy=remedy)])
    return found[step].resolve()


def _read_groups(run_dir: RunDir, steps: Iterable[RecordedStep]) -> Iterator[tuple[int, SpilledGroup]]:
    for step in steps:
        for draw in step.draws:
            yield draw, _read_group(run_dir, draw, missing=f"step {step.step} trained on it")


def _read_group(run_dir: RunDir, draw: int, *, missing: str) -> SpilledGroup:
    """Read a group of a run; ``missing`` is added to the error if it has no file."""
    file = run_dir.payloads / file_name(draw)
    try:
        return read_spilled(file)
    except FileNotFoundError:
        remedy = f"{file} is missing: {missing}"
    except SpilledGroupTorn as error:
        remedy = str(error)
    raise ConfigError([Problem(field="RUN", value=str(run_dir.path), remedy=remedy)])


def _settings(config: RunConfig, run: Path) -> Iterator[str]:
    """Yield the overrides of a re-execution: its own folder, and nothing that only a whole run does."""
    yield f"run_dir={run.with_name(f'{run.name}-reexecution-{datetime.now():%Y%m%d-%H%M%S}')}"
    # One engine has room for all requests that wait for a version, of every engine, and for those that run.
    generator = config.generator
    num_engines = generator.num_replicas + 1
    yield f"generator.kv_cache_gib={generator.kv_cache_gib * num_engines}"
    yield f"generator.max_num_seqs={generator.max_num_seqs * num_engines}"
    yield from ("generator.keep_in_flight=false", "record_execution=false")
    yield "weights.archive=false"
    # Filters have chosen the rollouts that are in the record.
    yield from ("algorithm.filters=[]", "evaluation.sets=[]", "logging.wandb=null", "checkpoint.folder=null")


async def sample_again(
    fleet: Fleet, version: int, groups: Sequence[SpilledGroup], *, seed: int
) -> list[TokenDifference]:
    """Sample everything that ``version`` sampled again, ``groups`` from their beginning; compare.

    Returns the differences in those requests that have ended.
    """
    places = [
        (Path(one.group.rollouts[0].branches[0].response.file), sampling_seed(seed, one.group.draw_id))
        for one in groups
    ]
    replicas = fleet.generators.pool.replicas
    of_replicas = await asyncio.gather(
        *(
            replica.call(
                lambda replica=replica, index=index: replica.actor.reexecute.call_one(  # type: ignore[misc]
                    version, places[index :: len(replicas)], fleet.config.sampling
                )
            )
            for index, replica in enumerate(replicas)
        )
    )
    found = [one for of_replica in of_replicas for one in of_replica.differences]
    return sorted(found, key=lambda one: (one.version, one.draw_id, one.position))


async def score_again(fleet: Fleet, groups: Sequence[Group]) -> str | None:
    """Score the rollouts of a batch again; describe the first reward that differs, or return None."""
    answers = await asyncio.gather(
        *(
            fleet.scorer.score_group(
                group.draw_id, group.task, [response_of(rollout) for rollout in group.rollouts]
            )
            for group in groups
        )
    )
    for group, answer in zip(groups, answers, strict=True):
        if isinstance(answer, Unscored):
            return f"group of draw {group.draw_id}: {answer.reason}"
        assert group.scores is not None
        for rollout, before, now in zip(group.rollouts, group.scores, answer, strict=True):
            if before.value != now.value:
                where = f"score of rollout {rollout.episode}, group of draw {group.draw_id}"
                return f"{where}: recorded {before.value!r}, found {now.value!r}"
    return None


def describe_token(run: Path, token: str) -> list[str]:
    """Return lines with everything that the record of a run has of one token.

    ``token`` is DRAW/ROLLOUT/POSITION, as a difference names it; a later branch or agent of an episode is not
    shown.

    Raises:
        ConfigError: The record has no such token.
    """
    run_dir = RunDir(path=run)
    match = re.fullmatch(r"(\d+)/(\d+)/(\d+)", token)
    if match is None:
        raise ConfigError([Problem(field="--token", value=token, remedy="must be DRAW/ROLLOUT/POSITION")])
    draw, episode, position = map(int, match.groups())
    one = _read_group(run_dir, draw, missing=f"--token = {token!r} names it")
    rollouts = {rollout.episode: rollout for rollout in one.group.rollouts if not rollout.agent}
    if episode not in rollouts or position >= (branch := rollouts[episode].branches[0]).num_response_tokens:
        remedy = f"has no such token; the group's rollouts are {sorted(rollouts)}"
        raise ConfigError([Problem(field="--token", value=token, remedy=remedy)])
    reader = PayloadReader(EVERY_HOST)
    trace = decode_rollout(reader.read(branch.prompt), reader.read(branch.response))
    lines = [f"id {trace.response_ids_T[position]}, log-probability {float(trace.logprobs_T[position])!r}"]
    lines += [
        f"sampled under version {span.version}"
        for span in branch.version_spans
        if span.start <= position < span.end
    ] or ["given by the environment"]
    lines += [
        f"by request {span.request} of the rollout, its token {position - span.start}"
        for span in branch.request_spans
        if span.start <= position < span.end
    ]
    if trace.kept_tokens is not None:
        kept = trace.kept_tokens.row(position).tolist()
        lines.append(f"drawn from {len(kept)} ids: {kept}" if kept else "drawn from the whole vocabulary")
    row = len(trace.prompt_ids_P) + position
    if trace.routed_experts is not None and row < trace.routed_experts.num_recorded:
        rows_MK = trace.routed_experts.to_dense()[row]
        experts = "; ".join(f"{layer}: {ids.tolist()}" for layer, ids in enumerate(rows_MK))
        lines.append(f"as an input, its experts by MoE layer were {experts}")
    steps = [step.step for step in _read_execution(run_dir).steps.values() if draw in step.draws]
    trained = (
        "trained" if any(one.group.rollouts[kept] is rollouts[episode] for kept in one.kept) else "filtered"
    )
    return [*lines, f"its rollout was {trained}, its group in step {steps[0] if steps else 'none'}"]
