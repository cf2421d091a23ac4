"""All procs of a run: spawned, set up, watched, and stopped."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import monarch.actor
from monarch.actor import MeshFailure, ProcMesh, this_host
from monarch.spmd import setup_torch_elastic_env_async

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.generator import GeneratorActor, GeneratorSetup
from forgeasync.actors.placement import GpuAllocator, spawn_role
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.scorer import ScorerActor
from forgeasync.actors.trainer import TrainerActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.buffer.snapshot import BufferSnapshot
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import Dtype, LoraSection, RoutingReplay, RunConfig, TrainerSection
from forgeasync.config.weights_schema import TransportChoice
from forgeasync.data.records import Records
from forgeasync.payload.run_folder import create_run_folder, remove_run_folder, sweep_stale_folders
from forgeasync.trainer.loss import LossChoice
from forgeasync.weights.staging import NUM_SLOTS
from forgeasync.weights.transports.store import open_store
from forgeasync.weights.transports.transport import choose_transport

HOST_ID = "host-0"
"""The one host that all procs of a run share, unless a fleet is told otherwise."""

MONARCH_OWN_ACTORS = ("logger", "setup")
"""Names of the actors that Monarch puts into every proc."""


class ActorDied(RuntimeError):
    """A proc of the run ended, or one of its actors failed outside of a call."""


@dataclass(slots=True)
class Fleet:
    """The meshes that a run has spawned so far; ``close`` stops them in any state."""

    log_dir: Path
    trainer_host_id: str = HOST_ID
    """Another one than the generators': payloads then go through RDMABuffer instead of shared memory."""
    _gpus: GpuAllocator = field(default_factory=GpuAllocator)
    _meshes: list[ProcMesh] = field(default_factory=list)
    _failure: asyncio.Future[None] = field(init=False)
    _closing: bool = False
    _payload_folder: Path | None = None
    _weights_folder: Path | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()

        def on_fault(failure: MeshFailure) -> None:
            # Monarch's default ends the process from here; the loops are to end it in their own order. A dead
            # proc is reported once for each of its actors: those that Monarch itself put there say nothing
            # about the role.
            if not self._closing and not failure.mesh_name.startswith(MONARCH_OWN_ACTORS):
                loop.call_soon_threadsafe(self._fail, str(failure.report()))

        monarch.actor.unhandled_fault_hook = on_fault

    def _fail(self, report: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(ActorDied(report))

    async def watch(self) -> None:
        """Wait until something dies.

        Raises:
            ActorDied: always, with Monarch's report.
        """
        await asyncio.shield(self._failure)

    def _spawn(self, role: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        gpus = [self._gpus.take(gpus_per_proc, role=role) for _ in range(num_procs)]
        mesh = spawn_role(this_host(), role, num_procs=num_procs, gpus_per_proc=gpus)
        self._meshes.append(mesh)
        return mesh

    async def connect_weights(
        self, config: RunConfig, trainer: TrainerMesh, generators: GeneratorRouter
    ) -> None:
        """Allocate the trainer's staging buffers, and let every generator plan how it reads them.

        Raises:
            ValueError: trainer and engines do not have the same tensors, the transport asked for cannot work,
                or the host has not enough shared memory.
        """
        transport = choose_transport(
            config.weights.transport, trainer_host=self.trainer_host_id, generator_host=HOST_ID
        )
        if transport is TransportChoice.TORCHSTORE:
            await open_store(self._spawn("weights", 1, gpus_per_proc=0))
        # Adapters are small, and merged in float32.
        dtype = config.generator.dtype if config.lora is None else Dtype.FLOAT32
        layout = await trainer.lay_out_weights(dtype)
        num_copies = NUM_SLOTS + generators.num_replicas
        self._weights_folder = create_run_folder(num_copies * sum(rank.num_bytes for rank in layout.ranks))
        sources = await trainer.open_staging(self._weights_folder, frozenset({transport}))
        await generators.connect_weights(layout, sources, self._weights_folder)

    async def start_trainer(
        self,
        config: RunConfig,
        section: TrainerSection,
        facts: ModelFacts,
        *,
        loss: LossChoice,
        seed: int,
        checkpoint: Path | None,
        lora: LoraSection | None = None,
        max_token_age: int | None = None,
        resume_from: Path | None = None,
    ) -> TrainerMesh:
        """The trainer mesh, with its process group up and its model built, or ``resume_from`` a checkpoint.

        Tokens older than ``max_token_age`` versions are not trained on.
        """
        num_procs = section.parallel.num_procs
        mesh = self._spawn("trainer", num_procs, gpus_per_proc=1)
        await setup_torch_elastic_env_async(mesh)
        actors = mesh.spawn("trainer", TrainerActor, self.log_dir)
        trainer = TrainerMesh(actors, num_procs, config.timeouts)
        await trainer.setup(
            section=section,
            facts=facts,
            temperature=config.sampling.temperature,
            loss=loss,
            seed=seed,
            checkpoint=checkpoint,
            lora=lora,
            max_token_age=max_token_age,
            host_id=self.trainer_host_id,
            resume_from=resume_from,
        )
        return trainer

    async def start_generators(
        self, config: RunConfig, facts: ModelFacts, model_path: Path
    ) -> GeneratorRouter:
        """The generator mesh, with its engines loaded, behind a router."""
        section = config.generator
        sweep_stale_folders()
        capacity_bytes = int(config.payload.capacity_gib * 2**30)
        self._payload_folder = create_run_folder(capacity_bytes)
        setup = GeneratorSetup(
            model_path=model_path,
            facts=facts,
            section=section,
            max_context_length=config.model.max_context_length,
            seed=config.seed,
            records=Records(
                routing=config.trainer.routing_replay is not RoutingReplay.OFF,
                kept_tokens=config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary,
                num_dense_layers=facts.num_dense_layers,
            ),
            weights=config.weights,
            lora=config.lora,
            payload_folder=self._payload_folder,
            payload_capacity_bytes=capacity_bytes,
            host_id=HOST_ID,
        )
        mesh = self._spawn("generator", section.num_replicas, gpus_per_proc=section.tensor_parallel)
        actors = mesh.spawn("generator", GeneratorActor, self.log_dir)
        async with asyncio.timeout(config.timeouts.setup_s):
            await actors.setup.call(setup)
        return GeneratorRouter(actors, section.num_replicas, config.timeouts)

    async def start_scorer(self, config: RunConfig) -> ScorerActor:
        """The scorer; its endpoints are called with ``call_one``."""
        actor = self._spawn("scorer", 1, gpus_per_proc=0).spawn("scorer", ScorerActor, self.log_dir)
        async with asyncio.timeout(config.timeouts.setup_s):
            await actor.setup.call_one(config.data, config.seed)
        return actor

    async def start_buffer(self, config: RunConfig, resumed: BufferSnapshot | None = None) -> BufferActor:
        """The replay buffer, empty or as it was; its endpoints are called with ``call_one``."""
        actor = self._spawn("buffer", 1, gpus_per_proc=0).spawn("buffer", BufferActor, self.log_dir)
        async with asyncio.timeout(config.timeouts.setup_s):
            await actor.setup.call_one(config, resumed)
        return actor

    async def close(self) -> None:
        """Stop every proc; procs that are gone already are no error."""
        self._closing = True
        for mesh in reversed(self._meshes):
            await mesh.stop()
        self._meshes.clear()
        for folder in (self._payload_folder, self._weights_folder):
            if folder is not None:
                remove_run_folder(folder)
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()
        else:
            self._failure.cancel()
