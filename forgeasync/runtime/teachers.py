"""Teachers: models that compute log-probabilities of the tokens that the policy sampled.

A teacher is either engines of the run (a ``GeneratorPool`` of ``TeacherActor``) or a server. Its engines may
load versions of the policy's weights, as generators do. ``Teachers`` sends each sampled group to the teacher
of its task's source, which rewrites the group with its records.

Who waits for whom: the collecting loop waits for a group's teacher before the buffer receives the group as
finished. If an engine is lost, its group goes to another one.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from forgeasync.config import (
    AveragedPolicy,
    ModelFacts,
    RunConfig,
    TeacherSection,
    TimeoutSection,
    named_sources,
    weights_of_teacher,
)
from forgeasync.generator import SwapReport
from forgeasync.models import model_folder, read_model_facts
from forgeasync.observability import Role
from forgeasync.planning import Machine, least_bytes, teacher_memory, total_bytes
from forgeasync.rollouts import (
    CaptureSpec,
    PromptEncoder,
    Response,
    Score,
    StoredRollout,
    Task,
    TeacherPrompts,
    TeacherReads,
    TeacherRecord,
    WithoutPrompt,
)
from forgeasync.runtime.generator import GeneratorActor, GeneratorSetup
from forgeasync.runtime.generator_pool import GeneratorPool, spawn_engine
from forgeasync.runtime.job_hosts import Host
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import TEACHER, ProcessManager
from forgeasync.runtime.router import GeneratorRouter
from forgeasync.runtime.supervised import ProcessLost, Spawned, call_limit
from forgeasync.runtime.teacher import TeacherActor, TeacherFailure, TeacherRecorder
from forgeasync.scoring import RewardUnavailable
from forgeasync.waiting import DeadlineExceeded, deadline
from forgeasync.weights import WeightSet

if TYPE_CHECKING:
    from forgeasync.scoring import TeacherClient


TEACHER_HOST = 0
"""All engines of a teacher are on the controller's machine."""

TEACHER_COUNTS = (
    "teacher/num_retried",
    "teacher/num_failed",
    "teacher/num_tokens",
    "teacher/num_without_sibling",
    "teacher/num_without_feedback",
    "teacher/busy_s",
)
"""Names in metrics.jsonl of what is counted of all teachers."""


class TeacherEngines(GeneratorRouter):
    """Engines of the run, which are supervised like generators and may load published weights like them."""

    def __init__(self, pool: GeneratorPool, section: TeacherSection, timeouts: TimeoutSection) -> None:
        super().__init__(pool, timeouts, max_lost_per_group=section.engine.max_lost_per_group)
        self._source = section.source
        self.num_updates = 0
        """Number of swaps to a new version, summed over engines."""
        self.num_rescored = 0
        """Number of scores that a swap interrupted and that were recomputed with the new weights."""

    @property
    def version(self) -> int:
        """Version of the weights, starting at 0."""
        return self.pool.table.state.served

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """See ``TeacherRecorder.teach``.

        Raises:
            ProcessLost: the engine is lost.
        """
        async with self.pool.assigned(len(rollouts)) as replica:
            # The pool's type of actor is the base class.
            actor = cast(TeacherActor, replica.actor)
            return await replica.call(lambda: actor.teach.call_one(rollouts, reads))

    @property
    def weights(self) -> WeightSet:
        """Set of weights that the engines load of each version."""
        return WeightSet.AVERAGE if isinstance(self._source, AveragedPolicy) else WeightSet.POLICY

    @property
    def wanted(self) -> int:
        """Newest version that the engines should have."""
        return self.pool.table.state.newest

    def published(self, version: int) -> None:
        """Record that a version can be fetched; the engines load it if it is due."""
        if self._source.is_due(version, newest=self.wanted):
            super().published(version)

    async def until_current(self, version: int) -> None:
        """Wait until the healthy engines have the version that is due at ``version``."""
        await self.pool.table.until(
            lambda table: table.has_healthy and not self._source.is_due(version, newest=table.served)
        )

    def record_swap(self, number: int, swap: SwapReport) -> None:
        """Record that an engine scores with the version that it has swapped in."""
        self.num_updates += 1
        self.num_rescored += swap.num_recomputed
        super().record_swap(number, swap)


@dataclass(frozen=True, slots=True)
class EndpointTeacher:
    """A server, called from the controller's process."""

    groups: TeacherRecorder
    client: "TeacherClient"
    room: asyncio.Semaphore
    """Limits concurrent requests."""
    version: int = 0

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """See ``TeacherRecorder.teach``.

        Raises:
            RewardUnavailable: the server is unavailable.
        """
        return await self.groups.teach(rollouts, reads, self._score)

    async def _score(self, ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        assert given_TK is None, "no server gives log-probabilities of given ids, which the rules say"
        async with self.room:
            return await self.client.score(ids_S, num_prompt=num_prompt, num_ids=self.groups.num_ids)


@dataclass(slots=True, kw_only=True)
class Teacher:
    """One teacher, and its limit of concurrent groups."""

    name: str
    section: TeacherSection
    model: TeacherEngines | EndpointTeacher
    prompts: TeacherPrompts
    room: asyncio.Semaphore
    """Limits the groups in flight; waiting for it does not count against a group's deadline."""


@dataclass(slots=True)
class Teachers:
    """All teachers of a run; empty if the loss needs none."""

    by_source: Mapping[str, Teacher] = field(default_factory=dict)
    """Teacher of each data source."""
    score_limit_s: float = 60.0
    """Time limit of one attempt at a group (``timeouts.score_s``), in seconds."""
    moving: tuple[TeacherEngines, ...] = ()
    """Teachers that load published versions."""
    _counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TEACHER_COUNTS, 0))

    def needs_scores(self, task: Task) -> bool:
        """Return whether the prompt of a task's teacher depends on the scores of the group."""
        return bool(self.by_source) and self.by_source[task.source].section.needs_scores

    async def teach(
        self,
        group_id: int,
        task: Task,
        rollouts: tuple[StoredRollout, ...],
        scores: Sequence[Score] | None = None,
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """Return the rollouts of a group with references to a new file that has their teacher's records.

        The previous file remains. Without teachers the group is returned unchanged. ``scores`` are required
        if ``needs_scores`` returns True.
        """
        if not self.by_source:
            return rollouts
        teacher = self.by_source[task.source]
        reads = self._reads(teacher, task, rollouts, scores)
        async with teacher.room:
            start_s = time.perf_counter()
            try:
                return await self._attempts(teacher, group_id, rollouts, reads)
            finally:
                self._counts["teacher/busy_s"] += time.perf_counter() - start_s

    def _reads(
        self,
        teacher: Teacher,
        task: Task,
        rollouts: Sequence[StoredRollout],
        scores: Sequence[Score] | None,
    ) -> tuple[TeacherReads, ...]:
        """Return what the teacher reads before each rollout's response."""
        section, prompts = teacher.section, teacher.prompts
        if not section.needs_scores:
            return (prompts.of_task(section.prompt, task),) * len(rollouts)
        assert scores is not None, "needs_scores has said so"
        responses = [
            Response(
                text=rollout.text,
                num_tokens=rollout.num_response_tokens,
                is_correct=score.is_correct,
                feedback=score.feedback,
            )
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
        reads = prompts.of_group(section, task, responses)
        for response, read in zip(responses, reads, strict=True):
            if read is WithoutPrompt.NOTHING:
                has_feedback = not section.shows_feedback or prompts.can_show(response.feedback)
                lacks = "sibling" if section.shows_sibling and has_feedback else "feedback"
                self._counts[f"teacher/num_without_{lacks}"] += 1
        return reads

    async def _attempts(
        self,
        teacher: Teacher,
        group_id: int,
        rollouts: tuple[StoredRollout, ...],
        reads: Sequence[TeacherReads],
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        call = f"teacher {teacher.name} looking at group {group_id}"
        num_left, endpoint, away_since_s = teacher.section.max_attempts, teacher.section.endpoint, None
        while True:
            try:
                async with deadline(self.score_limit_s, call=call, key="timeouts.score_s"):
                    found = await teacher.model.teach(rollouts, reads)
            except (ProcessLost, DeadlineExceeded) as error:
                found = TeacherFailure(problem=str(error))
            except RewardUnavailable as error:
                assert endpoint is not None, "engines of the run are lost, not unavailable"
                now_s = time.monotonic()
                away_since_s = now_s if away_since_s is None else away_since_s
                if now_s - away_since_s < endpoint.max_unavailable_s:
                    self._counts["teacher/num_retried"] += 1
                    await asyncio.sleep(error.retry_after_s)
                    continue
                found, num_left = TeacherFailure(problem=str(error)), 0
            if not isinstance(found, TeacherFailure):
                self._counts["teacher/num_tokens"] += sum(
                    rollout.num_response_tokens
                    for rollout, read in zip(rollouts, reads, strict=True)
                    if read is not WithoutPrompt.NOTHING
                )
                return found
            num_left -= 1
            if num_left <= 0 or found.is_full:
                self._counts["teacher/num_failed"] += 1
                return replace(found, problem=f"teacher {teacher.name}, group {group_id}: {found.problem}")
            self._counts["teacher/num_retried"] += 1

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, by name in metrics.jsonl; empty without teachers."""
        if not self.by_source:
            return {}
        return {
            "teacher/served_version": min(one.model.version for one in self.by_source.values()),
            **self._counts,
            "teacher/num_updates": sum(one.num_updates for one in self.moving),
            "teacher/num_rescored": sum(one.num_rescored for one in self.moving),
        }


async def start_teachers(
    processes: ProcessManager, config: RunConfig, facts: ModelFacts, prompts: PromptEncoder
) -> Teachers:
    """Start the engines of all teachers, after the generators, whose payload folders they share.

    ``facts`` and ``prompts`` are the policy's.
    """
    if not config.teachers:
        return Teachers()
    processes.hosts.allot(HostRole.TEACHERS, 0, gpus_per_proc=1)
    first_places, num_places = {}, 0
    for name, section in config.teachers.items():
        first_places[name] = num_places
        num_places += section.num_engines
        for _ in range(section.num_engines):
            processes.hosts.allot_more(HostRole.TEACHERS, gpus_per_proc=section.engine.tensor_parallel)
    async with asyncio.TaskGroup() as starting:
        started = [
            starting.create_task(_start_teacher(processes, config, facts, prompts, name, first_place))
            for name, first_place in first_places.items()
        ]
    teachers = {one.result().name: one.result() for one in started}
    known = [source.name for source in named_sources(config.data)]
    return Teachers(
        {
            source: teachers[name]
            for name, section in config.teachers.items()
            for source in section.sources or known
        },
        moving=tuple(
            one.model
            for one in teachers.values()
            if isinstance(one.model, TeacherEngines) and one.section.moves
        ),
        score_limit_s=config.timeouts.score_s,
    )


async def _start_teacher(
    processes: ProcessManager,
    config: RunConfig,
    facts: ModelFacts,
    prompts: PromptEncoder,
    name: str,
    first_place: int,
) -> Teacher:
    section = config.teachers[name]
    host = processes.hosts.hosts_for(HostRole.TEACHERS, 1)[0]
    groups = TeacherRecorder(
        teacher=name,
        folder=processes.payload_folders[0],
        host_id=host.id,
        capacity_bytes=int(config.payload.capacity_gib * 2**30),
        num_ids=config.algorithm.num_teacher_ids,
        needs_student_ids=config.algorithm.needs_student_ids,
        vocab_size=facts.vocab_size,
    )
    if section.endpoint is not None:
        # Only runs with such a teacher need the SDK that this imports.
        from forgeasync.scoring import TeacherClient

        num_at_once = section.endpoint.max_concurrent
        client = TeacherClient(section.endpoint)
        processes.closing.append(client.close)
        model: TeacherEngines | EndpointTeacher = EndpointTeacher(
            groups, client, asyncio.Semaphore(num_at_once)
        )
    else:
        num_at_once = section.engine.num_replicas * section.engine.max_num_seqs
        pool = await _start_pool(processes, config, groups, host, first_place)
        model = TeacherEngines(pool, section, config.timeouts)
    return Teacher(
        name=name,
        section=section,
        model=model,
        prompts=TeacherPrompts(encoder=prompts, max_tokens=_max_context_length(config, name) - 1),
        room=asyncio.Semaphore(max(1, num_at_once // config.algorithm.group_size)),
    )


async def _start_pool(
    processes: ProcessManager, config: RunConfig, groups: TeacherRecorder, host: Host, first_place: int
) -> GeneratorPool:
    name = groups.teacher
    section = config.teachers[name]
    model_path = section.path(config.model.path)
    engine = section.engine.model_copy(update={"keep_in_flight": False})
    setup = GeneratorSetup(
        model_path=model_folder(model_path).resolve(),
        facts=read_model_facts(model_path),
        section=engine,
        max_context_length=_max_context_length(config, name),
        seed=config.seed,
        records=CaptureSpec(routing=False, kept_tokens=False, num_dense_layers=0),
        weights=weights_of_teacher(config.weights),
        lora=config.lora if section.moves else None,
        payload_capacity_bytes=groups.capacity_bytes,
        gpu_bytes=least_bytes(total_bytes(dict(teacher_memory(config, Machine.GPU))[name])),
        # The given ids include the sampled one.
        num_scored_ids=groups.num_ids + groups.needs_student_ids,
    )

    async def spawn(rank: int, number: int) -> Spawned[GeneratorActor]:
        mesh_name = f"{TEACHER}{name}-{rank}-{number}"

        async def set_up(actor: GeneratorActor) -> None:
            await actor.setup.call_one(setup, host.id, groups.folder)
            # It keeps no log of tokens in flight.
            await cast(TeacherActor, actor).open.call_one(groups)

        return await spawn_engine(
            processes,
            config,
            HostRole.TEACHERS,
            mesh_name,
            first_place + rank,
            host,
            call=f"loading engine {rank} of teacher {name}",
            spawn=lambda mesh: mesh.spawn(mesh_name, TeacherActor, processes.log_dir, rank, name),
            set_up=set_up,
        )

    pool = GeneratorPool(
        spawn,
        processes,
        engine,
        [host] * engine.num_replicas,
        role=Role.TEACHER,
        title=f"teacher {name}",
        key=f"teachers.{name}.engine",
    )
    processes.teachers.append(pool)
    async with call_limit(config.timeouts, "setup_s", f"loading the engines of teacher {name}"):
        await pool.start(engine.num_replicas)
    return pool


def _max_context_length(config: RunConfig, name: str) -> int:
    # vLLM samples one token after those that it scores.
    return config.teachers[name].max_context_length or config.model.max_context_length + 1
