"""Starts the teachers of a run: a pool of engines for each, on the controller's machine."""

import asyncio

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.generator_setup import GeneratorSetup
from forgeasync.actors.moving_teacher import MovingTeacher
from forgeasync.actors.process_manager import TEACHER, ProcessManager
from forgeasync.actors.replica import SpawnedReplica
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.start_generators import while_running
from forgeasync.actors.taught_groups import TaughtGroups
from forgeasync.actors.teacher import TeacherActor
from forgeasync.actors.teaching import EndpointTeacher, PoolTeacher, Teacher, TeacherModel, Teaching
from forgeasync.config import ModelFacts, RunConfig, named_sources, weights_of_teacher
from forgeasync.faults import Role
from forgeasync.launch import Host, HostRole
from forgeasync.models import model_folder, read_model_facts
from forgeasync.planning import Machine, least_bytes, teacher_memory, total_bytes
from forgeasync.rollouts import CaptureSpec, PromptEncoder, TeacherPrompts
from forgeasync.waiting import deadline


async def start_teachers(
    procs: ProcessManager, config: RunConfig, facts: ModelFacts, prompts: PromptEncoder
) -> Teaching:
    """Start the engines of all teachers, after the generators: they share their folders of payloads.

    ``facts`` and ``prompts`` are the policy's.
    """
    if not config.teachers:
        return Teaching()
    procs.hosts.allot(HostRole.TEACHERS, 0, gpus_per_proc=1)
    for section in config.teachers.values():
        for _ in range(section.num_engines):
            procs.hosts.allot_more(HostRole.TEACHERS, gpus_per_proc=section.engine.tensor_parallel)
    first_places, num_places = {}, 0
    for name, section in config.teachers.items():
        first_places[name] = num_places
        num_places += section.num_engines
    async with asyncio.TaskGroup() as starting:
        started = [
            starting.create_task(_start_teacher(procs, config, facts, prompts, name, first_place))
            for name, first_place in first_places.items()
        ]
    teachers = {one.result().name: one.result() for one in started}
    known = [source.name for source in named_sources(config.data)]
    return Teaching(
        {
            source: teachers[name]
            for name, section in config.teachers.items()
            for source in section.sources or known
        },
        moving=tuple(_moving(config, one) for one in teachers.values() if one.section.moves),
        score_limit_s=config.timeouts.score_s,
    )


def _moving(config: RunConfig, teacher: Teacher) -> MovingTeacher:
    assert isinstance(teacher.model, PoolTeacher), "as the section has checked"
    pool, engine = teacher.model.pool, teacher.section.engine
    return MovingTeacher(
        name=teacher.name,
        source=teacher.section.source,
        router=GeneratorRouter(pool, config.timeouts, max_lost_per_group=engine.max_lost_per_group),
    )


async def _start_teacher(
    procs: ProcessManager,
    config: RunConfig,
    facts: ModelFacts,
    prompts: PromptEncoder,
    name: str,
    first_place: int,
) -> Teacher:
    section = config.teachers[name]
    host = procs.hosts.of_procs(HostRole.TEACHERS, 1)[0]
    groups = TaughtGroups(
        teacher=name,
        folder=procs.payload_folders[0],
        host_id=host.id,
        capacity_bytes=int(config.payload.capacity_gib * 2**30),
        num_ids=config.algorithm.num_teacher_ids,
        asks_student_ids=config.algorithm.asks_student_ids,
        vocab_size=facts.vocab_size,
    )
    if section.endpoint is not None:
        # It imports the SDK, which only runs with such a teacher need.
        from forgeasync.scoring import TeacherClient

        num_at_once = section.endpoint.max_concurrent
        client = TeacherClient(section.endpoint)
        procs.closing.append(client.close)
        model: TeacherModel = EndpointTeacher(groups, client, asyncio.Semaphore(num_at_once))
    else:
        num_at_once = section.engine.num_replicas * section.engine.max_num_seqs
        model = PoolTeacher(await _start_pool(procs, config, groups, host, first_place))
    return Teacher(
        name=name,
        section=section,
        model=model,
        prompts=TeacherPrompts(encoder=prompts, max_tokens=_max_context_length(config, name) - 1),
        room=asyncio.Semaphore(max(1, num_at_once // config.algorithm.group_size)),
    )


async def _start_pool(
    procs: ProcessManager, config: RunConfig, groups: TaughtGroups, host: Host, first_place: int
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
        # Given ids have the sampled one among them.
        num_scored_ids=groups.num_ids + groups.asks_student_ids,
    )

    async def spawn(rank: int, number: int) -> SpawnedReplica:
        mesh_name = f"{TEACHER}{name}-{rank}-{number}"
        mesh = procs.hosts.spawn_one(HostRole.TEACHERS, mesh_name, first_place + rank)
        actor = mesh.spawn(mesh_name, TeacherActor, procs.log_dir, rank, name)
        call = f"loading engine {rank} of teacher {name}"
        pid = 0
        try:
            async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
                pid = await actor.pid.call_one()
                await while_running(host, pid, actor.setup.call_one(setup, host.id, groups.folder))
                await actor.open.call_one(groups)
        except BaseException:
            if pid:
                await host.kill(pid)
            procs.in_background(procs.hosts.stop_one(mesh))
            raise
        return SpawnedReplica(actor=actor, pid=pid, host=host, stop=lambda: procs.hosts.stop_one(mesh))

    pool = GeneratorPool(
        spawn,
        engine,
        [host] * engine.num_engines,
        faults=procs.faults,
        listing=procs.listing,
        role=Role.TEACHER,
        title=f"teacher {name}",
    )
    procs.teachers.append(pool)
    call = f"loading the engines of teacher {name}"
    async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
        await pool.start()
    return pool


def _max_context_length(config: RunConfig, name: str) -> int:
    # vLLM samples one token behind those that it is asked about.
    return config.teachers[name].max_context_length or config.model.max_context_length + 1
