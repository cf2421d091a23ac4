"""The generator actor: a thin shell around one sampling engine and one payload writer.

Produces rollouts for the collecting loop: their arrays go into the host's payload store, small facts into the
answer. Consumes weight versions from the trainer's staging buffers. Calls overlap freely, also with an
update: what becomes of running sequences is the choice of ``weights.interruption``.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank
from monarch.rdma import RDMABuffer

from forgeasync.buffer.decisions import DropReason
from forgeasync.config.generator import GeneratorSection, SamplingSection
from forgeasync.config.model import LoraSection
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.weights import WeightsSection
from forgeasync.environments.reward import Response, response_of
from forgeasync.generator.reports import EngineStats, GroupCancelled, SwapReport
from forgeasync.models.checkpoint_shapes import expected_shapes
from forgeasync.observability.logs import redirect_process_output
from forgeasync.process_memory import MemoryWatch
from forgeasync.rollouts.group_payload import encode_group
from forgeasync.rollouts.payload_format import PayloadRef
from forgeasync.rollouts.payload_remote import PayloadServer
from forgeasync.rollouts.payload_store import PayloadStoreFull, PayloadWriter
from forgeasync.rollouts.records import Records, check_rollout
from forgeasync.rollouts.rollout import Rollout, StoredRollout
from forgeasync.rollouts.routing import RecordError
from forgeasync.rollouts.trajectory import EpisodeId, SampledTurn
from forgeasync.weights.fetcher import FetchReport, HostShare
from forgeasync.weights.layout import TORCH_DTYPES, WeightLayout
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.transports.build import connect_transports
from forgeasync.weights.transports.transport import StagingSource

if TYPE_CHECKING:
    from forgeasync.generator.engine import GeneratorEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """Everything that a generator is started with."""

    model_path: Path
    facts: ModelFacts
    section: GeneratorSection
    max_context_length: int
    seed: int
    records: Records
    weights: WeightsSection
    lora: LoraSection | None
    payload_capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedGroup:
    """A group that must not be trained on, or does not fit; ``problem`` says which rollout and why."""

    problem: str
    reason: DropReason = DropReason.BAD_RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledGroup:
    """A group that was given up because it would have been too old to train on at its end."""


def store_group(
    writer: PayloadWriter, rollouts: Sequence[Rollout], *, group_id: int, generator_rank: int
) -> tuple[StoredRollout, ...] | RefusedGroup:
    """Write a group's arrays, or return that there is no room for them."""
    payload = encode_group(rollouts)
    try:
        refs = writer.write_group([*payload.prompts, *payload.responses])
    except PayloadStoreFull as error:
        return RefusedGroup(problem=f"group {group_id}: {error}", reason=DropReason.OVERSIZED)
    prompts, responses = refs[: len(payload.prompts)], refs[len(payload.prompts) :]
    return tuple(
        StoredRollout(
            generator_rank=generator_rank,
            prompt=prompts[index],
            response=response,
            num_prompt_tokens=len(rollout.prompt_ids_P),
            num_response_tokens=rollout.num_response_tokens,
            version_spans=rollout.version_spans,
            text=rollout.text,
            finish_reason=rollout.finish_reason,
        )
        for rollout, response, index in zip(rollouts, responses, payload.prompt_of, strict=True)
    )


class GeneratorActor(Actor):
    """One engine in one proc."""

    def __init__(self, log_dir: Path) -> None:
        # The rank in the whole mesh: in a call to a slice of it, current_rank() counts within the slice.
        self._rank = current_rank().rank
        redirect_process_output(log_dir / f"generator-{self._rank}.log")
        self._engine: GeneratorEngine | None = None
        self._memory = MemoryWatch(with_descendants=True)

    @concurrent_endpoint
    async def setup(self, setup: GeneratorSetup, host_id: str, payload_folder: Path) -> int:
        """Load the model as policy version 0; returns the process id. The folder is on this proc's host."""
        # vLLM takes 10 s to import, so only the procs that sample import it.
        from forgeasync.generator.engine import GeneratorEngine
        from forgeasync.generator.episodes import EngineEpisodes
        from forgeasync.generator.workarounds.served_adapters import AdapterSetup, can_serve

        self._setup = setup
        self._host_id = host_id
        adapters = None
        if setup.lora is not None and can_serve(setup.lora):
            adapters = AdapterSetup(
                lora=setup.lora,
                shapes=expected_shapes(setup.facts),
                folder=payload_folder / f"adapter-{self._rank}",
            )
        self._payloads = PayloadWriter(payload_folder, host_id, setup.payload_capacity_bytes)
        self._payload_server = PayloadServer(self._payloads)
        self._engine = await GeneratorEngine.start(
            model_path=setup.model_path,
            generator=setup.section,
            max_context_length=setup.max_context_length,
            seed=setup.seed + self._rank,
            records=setup.records,
            weights=setup.weights,
            adapters=adapters,
        )
        self._episodes = EngineEpisodes(self._engine)
        return os.getpid()

    @concurrent_endpoint
    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup:
        """Sample a group of responses to one prompt, check their records and store their arrays."""
        assert self._engine is not None
        try:
            rollouts = await self._engine.generate(
                prompt_ids_P=prompt_ids_P,
                num_samples=num_samples,
                sampling=sampling,
                seed=seed,
                group_id=group_id,
            )
        except GroupCancelled:
            return CancelledGroup()
        return self._check_and_store(group_id, rollouts)

    def _check_and_store(
        self, group_id: int, rollouts: Sequence[Rollout]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        for index, rollout in enumerate(rollouts):
            try:
                check_rollout(rollout, self._setup.records, self._setup.facts)
            except RecordError as error:
                return RefusedGroup(problem=f"rollout {index} of group {group_id}: {error}")
        return store_group(self._payloads, rollouts, group_id=group_id, generator_rank=self._rank)

    @concurrent_endpoint
    async def continue_episode(
        self,
        episode: EpisodeId,
        given_ids: np.ndarray,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
    ) -> SampledTurn | CancelledGroup:
        """Append tokens to an episode and sample the model's next turn; its arrays stay here."""
        try:
            return await self._episodes.add_turn(
                episode, given_ids, sampling=sampling, max_tokens=max_tokens, seed=seed
            )
        except GroupCancelled:
            return CancelledGroup()

    @concurrent_endpoint
    async def store_episodes(
        self, group_id: int, is_truncated: Sequence[bool]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Check the records of a group's finished episodes and store their arrays, as ``sample_group`` does.

        ``is_truncated`` says of each episode whether it ended because its context was full.
        """
        return self._check_and_store(group_id, self._episodes.take(group_id, is_truncated))

    @concurrent_endpoint
    async def drop_episodes(self, group_id: int) -> None:
        """Forget the episodes of a group, and end what is sampled for them."""
        await self._episodes.drop(group_id)

    @concurrent_endpoint
    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        """Give up those of the groups that this engine samples; their calls return ``CancelledGroup``."""
        assert self._engine is not None
        await self._engine.cancel(group_ids)

    @concurrent_endpoint
    async def respond(
        self, prompt_ids_P: np.ndarray, num_samples: int, sampling: SamplingSection, seed: int | None
    ) -> tuple[Response, ...]:
        """Sample responses that are not trained on."""
        assert self._engine is not None
        rollouts = await self._engine.generate(
            prompt_ids_P=prompt_ids_P, num_samples=num_samples, sampling=sampling, seed=seed
        )
        return tuple(response_of(rollout) for rollout in rollouts)

    @concurrent_endpoint
    async def free_payloads(self, files: Sequence[str]) -> None:
        """Free the files of groups that were trained on or dropped."""
        for file in files:
            await self._payload_server.free(file)

    @concurrent_endpoint
    async def expose_payload(self, ref: PayloadRef) -> RDMABuffer:
        """Return a handle by which a trainer on another host reads a payload."""
        return self._payload_server.expose(ref)

    @concurrent_endpoint
    async def connect_weights(
        self, layout: WeightLayout, sources: Sequence[StagingSource], folder: Path, share: HostShare
    ) -> str:
        """Plan how versions get from the trainer's ranks into the engine, by a receive buffer in ``folder``.

        ``share`` is this generator's among those of its host; the first is connected before the others.
        Returns in words how the engine takes versions.

        Raises:
            ValueError: trainer and engine do not have the same tensors, or a transport cannot work.
        """
        from forgeasync.generator.host_memory import HostMemory
        from forgeasync.generator.weight_receiver import AdapterBase, WeightReceiver

        assert self._engine is not None
        setup = self._setup
        transports = connect_transports(setup.weights, layout, sources, generator_host=self._host_id)
        self._receiver = await WeightReceiver.connect(
            self._engine,
            layout=layout,
            transports=transports,
            host_memory=HostMemory(
                receive_buffer=folder / "receive-buffer", shadow=setup.weights.shadow, share=share
            ),
            delta=setup.weights.delta,
            base=None
            if setup.lora is None
            else AdapterBase(
                folder=setup.model_path,
                shapes=expected_shapes(setup.facts),
                dtype=TORCH_DTYPES[setup.section.dtype],
                scaling=setup.lora.alpha / setup.lora.rank,
            ),
        )
        return str(self._receiver.route)

    @concurrent_endpoint
    async def begin_update(self, manifest: Manifest) -> FetchReport:
        """Fetch this generator's share of a version that the caller has leased."""
        return await self._receiver.begin(manifest)

    @concurrent_endpoint
    async def stage_update(self) -> None:
        """Make the version ready, all shares of which have arrived on this host."""
        await self._receiver.stage()

    @concurrent_endpoint
    async def abandon_update(self) -> None:
        """Keep the old weights: a share of the version has not arrived on this host."""
        await self._receiver.abandon()

    @concurrent_endpoint
    async def finish_update(self) -> SwapReport:
        """Wait until the engine samples under the version that all generators of this host have staged."""
        return await self._receiver.finish()

    @concurrent_endpoint
    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of every worker's parameters, to compare with the trainer's (CPU engines only)."""
        assert self._engine is not None
        return await self._engine.parameters()

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        """What the engine has counted since it started, and the memory of its processes."""
        assert self._engine is not None
        return dataclasses.replace(self._engine.stats(), memory=self._memory.peak())

    @concurrent_endpoint
    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
