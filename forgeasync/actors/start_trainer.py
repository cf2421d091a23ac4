"""Starts the trainer mesh, and starts it again in the place of one that is gone."""

import asyncio

from monarch.actor import ProcMesh
from monarch.spmd import setup_torch_elastic_env_async
from monarch.tools.network import AddrType

from forgeasync.actors.deaths import Proc
from forgeasync.actors.process_manager import ProcessManager
from forgeasync.actors.trainer import TrainerActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.config import TimeoutSection
from forgeasync.launch import HostRole
from forgeasync.trainer import TrainerSetup

OWN_ACTORS = ("trainer", "_SPMDActor")
"""Begin the names of the actors in the trainer's procs; the second is Monarch's, by which ranks meet."""


async def start_trainer(procs: ProcessManager, setup: TrainerSetup, timeouts: TimeoutSection) -> TrainerMesh:
    """Start the trainer mesh, with its process group and its model; the run ends when a rank does."""
    trainer = await spawn_trainer(procs, setup.section.parallel.num_procs, timeouts)
    procs.peers = list(trainer.members)
    await set_up_trainer(trainer, setup)
    return trainer


async def spawn_trainer(
    procs: ProcessManager, num_procs: int, timeouts: TimeoutSection, *, number: int = 0
) -> TrainerMesh:
    """Spawn the procs of the trainer, on the hosts and GPUs of the one before; ``number`` counts them.

    They have no model yet: see ``set_up_trainer``.
    """
    name = "trainer" if number == 0 else f"trainer-{number}"
    mesh: ProcMesh = procs.hosts.spawn(HostRole.TRAINER, name, num_procs, gpus_per_proc=1)
    by_ip = procs.hosts.master_address_is_ip()
    await setup_torch_elastic_env_async(mesh, use_ipaddr=AddrType.IPv4 if by_ip else None)
    actors = mesh.spawn(name, TrainerActor, procs.log_dir).flatten("procs")
    trainer = TrainerMesh(actors, num_procs, timeouts)
    hosts = procs.hosts.of_procs(HostRole.TRAINER, num_procs)
    trainer.members = tuple(
        Proc(role="trainer", rank=rank, pid=pid, host=host)
        for rank, (pid, host) in enumerate(zip(await trainer.pids(), hosts, strict=True))
    )
    for one in trainer.members:
        procs.listing.put(one.role, one.rank, pid=one.pid, host=one.host.id)
    return trainer


async def set_up_trainer(trainer: TrainerMesh, setup: TrainerSetup) -> None:
    """Have all ranks join their process group and build the model."""
    await trainer.setup(setup, host_ids=[one.host.id for one in trainer.members])


async def kill_trainer(trainer: TrainerMesh) -> None:
    """Kill all ranks: those that are left wait in collectives for one that is gone, and answer nothing."""
    await asyncio.gather(*(one.host.kill(one.pid) for one in trainer.members))
