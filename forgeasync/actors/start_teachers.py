"""Starts the teachers of a run: a pool of engines for each, on the controller's machine."""

import asyncio
import functools
from pathlib import Path

import numpy as np

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.generator_setup import GeneratorSetup
from forgeasync.actors.procs import TEACHER, Procs
from forgeasync.actors.replica import SpawnedReplica
from forgeasync.actors.start_generators import while_running
from forgeasync.actors.teacher import TeacherActor
from forgeasync.actors.teaching import Teacher, Teaching
from forgeasync.config.data import named_sources
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig
from forgeasync.faults.fault_log import Role
from forgeasync.launch.jobs import HostRole
from forgeasync.models.config_file import model_folder, read_model_facts
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.records import Records
from forgeasync.rollouts.task import Task
from forgeasync.rollouts.teacher_prompt import teacher_prompt
from forgeasync.waiting import deadline


async def start_teachers(
    procs: Procs, config: RunConfig, facts: ModelFacts, prompts: PromptEncoder
) -> Teaching:
    """Start the engines of all teachers, after the generators: they share their folders of payloads.

    ``facts`` and ``prompts`` are the policy's.
    """
    if not config.teachers:
        return Teaching()
    procs.hosts.allot(HostRole.TEACHERS, 0, gpus_per_proc=1)
    for section in config.teachers.values():
        for _ in range(section.engine.num_engines):
            procs.hosts.allot_more(HostRole.TEACHERS, gpus_per_proc=section.engine.tensor_parallel)
    first_places, num_places = {}, 0
    for name, section in config.teachers.items():
        first_places[name] = num_places
        num_places += section.engine.num_engines
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
        config.timeouts.score_s,
    )


async def _start_teacher(
    procs: Procs,
    config: RunConfig,
    facts: ModelFacts,
    prompts: PromptEncoder,
    name: str,
    first_place: int,
) -> Teacher:
    section = config.teachers[name]
    folder = model_folder(section.model_path).resolve()
    engine = section.engine.model_copy(update={"keep_in_flight": False})
    host = procs.hosts.of_procs(HostRole.TEACHERS, 1)[0]
    payload_folder: Path = procs.payload_folders[0]
    setup = GeneratorSetup(
        model_path=folder,
        facts=read_model_facts(section.model_path),
        section=engine,
        # vLLM samples one token behind those that it is asked about.
        max_context_length=section.max_context_length or config.model.max_context_length + 1,
        seed=config.seed,
        records=Records(routing=False, kept_tokens=False, num_dense_layers=0),
        weights=config.weights,
        lora=None,
        payload_capacity_bytes=int(config.payload.capacity_gib * 2**30),
        num_scored_ids=config.algorithm.num_teacher_ids,
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
                await while_running(host, pid, actor.setup.call_one(setup, host.id, payload_folder))
                await actor.open.call_one(setup, payload_folder, facts.vocab_size)
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
    groups_at_once = max(1, engine.max_num_seqs // config.algorithm.group_size)
    return Teacher(
        name=name,
        section=section,
        pool=pool,
        prompt_of=None if section.prompt is None else functools.partial(_prompt_of, section.prompt, prompts),
        room=asyncio.Semaphore(engine.num_replicas * groups_at_once),
    )


def _prompt_of(template: str, prompts: PromptEncoder, task: Task) -> np.ndarray:
    return prompts.encode(teacher_prompt(template, task))
