"""Starts the generators, and connects them to the weights of the trainer."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from forgeasync.actors.generator import GeneratorActor
from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.generator_setup import GeneratorSetup
from forgeasync.actors.moving_teacher import MovingTeacher
from forgeasync.actors.process_manager import GENERATOR, ProcessManager
from forgeasync.actors.replica import ReplicaLost, SpawnedReplica
from forgeasync.actors.replica_health import LOOK_S
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.config import Dtype, ModelFacts, RoutingReplay, RunConfig
from forgeasync.launch import Host, HostRole
from forgeasync.planning import Machine, count_parameters, generator_memory, least_bytes, total_bytes
from forgeasync.rollouts import CaptureSpec
from forgeasync.waiting import deadline, forget
from forgeasync.weights import NUM_SLOTS, WeightSet, build_transport, require_reach

T = TypeVar("T")


async def start_generators(
    procs: ProcessManager, config: RunConfig, facts: ModelFacts, model_path: Path
) -> GeneratorRouter:
    """Start the generators, with their engines loaded, behind a router that replaces those that are lost."""
    section = config.generator
    capacity_bytes = int(config.payload.capacity_gib * 2**30)
    procs.hosts.allot(HostRole.GENERATORS, section.num_engines, gpus_per_proc=section.tensor_parallel)
    hosts = procs.hosts.of_procs(HostRole.GENERATORS, section.num_engines)
    # All generators together hold no more than that: on every host it is asked for once.
    ids = [host.id for host in hosts]
    sizes = [capacity_bytes if ids.index(name) == index else 0 for index, name in enumerate(ids)]
    folders = procs.payload_folders = await make_folders(hosts, sizes)
    setup = GeneratorSetup(
        model_path=model_path,
        facts=facts,
        section=section,
        max_context_length=config.model.max_context_length,
        seed=config.seed,
        records=CaptureSpec(
            routing=config.trainer.routing_replay is not RoutingReplay.OFF,
            kept_tokens=config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary,
            num_dense_layers=facts.num_dense_layers,
        ),
        weights=config.weights,
        lora=config.lora,
        payload_capacity_bytes=capacity_bytes,
        gpu_bytes=least_bytes(
            total_bytes(generator_memory(config, facts, count_parameters(facts), Machine.GPU))
        ),
    )

    folder_of = dict(zip(ids, folders, strict=True))

    async def spawn(rank: int, number: int) -> SpawnedReplica:
        # More ranks may be added later.
        name, host = f"{GENERATOR}{rank}-{number}", pool.host_of(rank)
        mesh = procs.hosts.spawn_one(HostRole.GENERATORS, name, rank)
        actor = mesh.spawn(name, GeneratorActor, procs.log_dir, rank)
        call = f"loading the engine of generator {rank}"
        pid = 0
        try:
            async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
                pid = await actor.pid.call_one()
                setting_up = actor.setup.call_one(setup, host.id, folder_of[host.id])
                await while_running(host, pid, setting_up)
                in_flight = await actor.in_flight.call_one()
        except BaseException:
            if pid:
                await host.kill(pid)
            procs.in_background(procs.hosts.stop_one(mesh))
            raise
        return SpawnedReplica(
            actor=actor,
            pid=pid,
            host=host,
            stop=lambda: procs.hosts.stop_one(mesh),
            in_flight=in_flight,
        )

    pool = GeneratorPool(spawn, section, hosts, faults=procs.faults, listing=procs.listing)
    procs.generators = pool
    call = "loading the generators' engines"
    async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
        await pool.start()
    return GeneratorRouter(pool, config.timeouts, max_lost_per_group=section.max_lost_per_group)


async def while_running(host: Host, pid: int, call: Awaitable[T]) -> T:
    """Wait for an answer of a process that no pool looks after yet.

    Raises:
        ReplicaLost: it has ended.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
            if not await host.is_running(pid):
                raise ReplicaLost(f"its process {pid} has ended while it was started")
        return answer.result()
    finally:
        answer.add_done_callback(forget)
        answer.cancel()


async def connect_weights(
    procs: ProcessManager,
    config: RunConfig,
    trainer: TrainerMesh,
    generators: GeneratorRouter,
    teachers: Sequence[MovingTeacher] = (),
) -> list[str]:
    """Allocate the trainer's staging buffers, and let every generator plan how it reads them.

    So do the engines of ``teachers``, those that move; each of these has a receive buffer of its own.

    Returns in words how engines take versions.

    Raises:
        ValueError: trainer and engines do not have the same tensors, the transport asked for cannot work,
            or a host has not enough shared memory.
    """
    trainer_hosts = procs.hosts.of_procs(HostRole.TRAINER, trainer.num_procs)
    generator_hosts = procs.hosts.of_procs(HostRole.GENERATORS, config.generator.num_engines)
    choice = config.weights.transport
    transport = build_transport(choice)
    teacher_hosts = [host for one in teachers for host in one.router.pool.hosts]
    readers = (*generator_hosts, *teacher_hosts)
    require_reach(transport, choice, (host.id for host in (*trainer_hosts, *readers)))
    await transport.start(procs.spawn_here)
    # Adapters are small, and merged in float32.
    dtype = config.generator.dtype if config.lora is None else Dtype.FLOAT32
    layout = await trainer.lay_out_weights(dtype)
    staged = [NUM_SLOTS * rank.num_bytes for rank in layout.ranks]
    receive_buffer = layout.of(WeightSet.POLICY).num_bytes
    # The generators of a host share one.
    received = [
        receive_buffer * (generators.pool.rank_on_host(rank) == 0) for rank in range(len(generator_hosts))
    ]
    folders = await make_folders([*trainer_hosts, *generator_hosts], [*staged, *received])
    sources = await trainer.open_staging(
        folders[: trainer.num_procs],
        choice,
        generator_hosts=frozenset(host.id for host in readers),
    )
    policy = layout.of(WeightSet.POLICY)
    of_generators = folders[trainer.num_procs :]
    routes = dict.fromkeys(await generators.connect_weights(policy, sources, of_generators))
    for one in teachers:
        # Generators of the same host have a receive buffer too, in a folder of their own.
        (folder,) = await make_folders(one.router.pool.hosts, [layout.of(one.weights).num_bytes])
        of_engines = [folder] * len(one.router.pool.replicas)
        taken = await one.router.connect_weights(layout.of(one.weights), sources, of_engines)
        routes |= dict.fromkeys(taken)
    return list(routes)


async def make_folders(hosts: Sequence[Host], sizes: Sequence[int]) -> list[Path]:
    """Make a folder on each host, large enough for all its sizes; return the folder of each entry."""
    totals: dict[str, int] = {}
    by_id = {host.id: host for host in hosts}
    for host, size in zip(hosts, sizes, strict=True):
        totals[host.id] = totals.get(host.id, 0) + size
    made = await asyncio.gather(*(by_id[name].make_folder(total) for name, total in totals.items()))
    folders = dict(zip(totals, made, strict=True))
    return [folders[host.id] for host in hosts]
