"""The generator actor: one sampling engine and one payload writer.

Produces rollouts for the collecting loop: their arrays go to the host's payload store, and their metadata is
returned. Consumes weight versions from the trainer's staging buffers. Calls overlap freely, also with an
update; ``weights.interruption`` is the policy for running sequences.
"""

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from monarch.actor import Actor, Port, concurrent_endpoint
from monarch.rdma import RDMABuffer

from forgeasync.buffer import DropReason
from forgeasync.config import (
    Delta,
    GeneratorSection,
    LoraSection,
    ModelFacts,
    SamplingSection,
    WeightsSection,
)
from forgeasync.environments import Response, response_of
from forgeasync.generator import EngineStats, GroupCancelled, ReexecutedVersion, SwapReport
from forgeasync.models import expected_shapes
from forgeasync.observability import State, open_trace, redirect_process_output, span, started
from forgeasync.processes import MemoryMonitor
from forgeasync.rollouts import (
    CaptureSpec,
    EpisodeId,
    EpisodeOutcome,
    FinishReason,
    PayloadRef,
    PayloadServer,
    PayloadStoreFull,
    PayloadWriter,
    RecordError,
    Rollout,
    SampledTurn,
    StoredBranch,
    StoredRollout,
    check_rollout,
    encode_group,
    ended_turns,
    group_turns,
    read_spilled,
)
from forgeasync.weights import (
    TORCH_DTYPES,
    FetchReport,
    HostShare,
    Manifest,
    StagingSource,
    WeightLayout,
    connect_transports,
)

if TYPE_CHECKING:
    from forgeasync.generator import EngineReexecution, GeneratorEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """Arguments of a generator's setup."""

    model_path: Path
    facts: ModelFacts
    section: GeneratorSection
    max_context_length: int
    seed: int
    records: CaptureSpec
    weights: WeightsSection
    lora: LoraSection | None
    payload_capacity_bytes: int
    gpu_bytes: int
    """Minimum GPU memory of each process of the engine, by the memory plan."""
    num_scored_ids: int = 0
    """Number of ids that a teacher scores at each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedGroup:
    """A group that must not be trained on, does not fit into the payload store, or was cancelled."""

    problem: str | None
    """The rollout and its problem; None: nothing failed, but it has no score or was cancelled."""
    reason: DropReason = DropReason.BAD_RECORD
    outcomes: tuple[EpisodeOutcome, ...] = ()
    """All attempts at the group's episodes, if it has episodes."""


CANCELLED = RefusedGroup(problem=None, reason=DropReason.CANCELLED)
"""A group that was cancelled because it would have been too old to train on at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEpisode:
    """An agent's part in an episode that is trained on."""

    episode: EpisodeId
    is_truncated: bool
    """Whether the episode ended because its context was full."""


def sampled_turn(rollout: Rollout) -> SampledTurn:
    """Return a response that is not trained on, as the only turn of an episode."""
    return SampledTurn(
        turn=0,
        ids_T=rollout.response_ids_T,
        text=rollout.text,
        finish_reason=rollout.finish_reason,
        first_version=rollout.version_spans[0].version,
        version=rollout.version_spans[-1].version,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRollout:
    """A rollout that is about to be written to the payload store."""

    branches: tuple[Rollout, ...]
    finish_reason: FinishReason
    episode: int
    agent: int = 0


def store_group(
    writer: PayloadWriter, rollouts: Sequence[SampledRollout], *, group_id: int, generator_rank: int
) -> tuple[StoredRollout, ...] | RefusedGroup:
    """Write a group's arrays; return a refusal if there is no space for them."""
    payload = encode_group([branch for rollout in rollouts for branch in rollout.branches])
    try:
        refs = writer.write_group([*payload.prompts, *payload.responses])
    except PayloadStoreFull as error:
        return RefusedGroup(problem=f"group {group_id}: {error}", reason=DropReason.OVERSIZED)
    prompts, responses = refs[: len(payload.prompts)], refs[len(payload.prompts) :]
    stored = zip((prompts[index] for index in payload.prompt_of), responses, strict=True)
    return tuple(
        StoredRollout(
            generator_rank=generator_rank,
            branches=tuple(_stored_branch(branch, *next(stored)) for branch in rollout.branches),
            finish_reason=rollout.finish_reason,
            episode=rollout.episode,
            agent=rollout.agent,
        )
        for rollout in rollouts
    )


def _stored_branch(branch: Rollout, prompt: PayloadRef, response: PayloadRef) -> StoredBranch:
    return StoredBranch(
        prompt=prompt,
        response=response,
        num_prompt_tokens=len(branch.prompt_ids_P),
        num_response_tokens=branch.num_response_tokens,
        version_spans=branch.version_spans,
        text=branch.text,
        request_spans=branch.request_spans,
        forks=branch.forks,
    )


LOG_RETENTION_S = 5.0
"""Seconds to keep a group's token log after its answer is sent: this process may die before it arrives."""


class GeneratorActor(Actor):
    """One engine in one process."""

    def __init__(
        self, log_dir: Path, rank: int, role: str = "generator", idle: State = State.WAITING_FOR_ROOM
    ) -> None:
        """``rank`` is its place among the processes of ``role``; it may replace an earlier process."""
        self._rank, self._name = rank, f"{role}-{rank}"
        redirect_process_output(log_dir / f"{self._name}.log")
        open_trace(log_dir, self._name, idle=idle)
        self._loaded: GeneratorEngine | None = None
        self._reexecution: EngineReexecution | None = None
        self._memory = MemoryMonitor(with_descendants=True)

    @property
    def _engine(self) -> "GeneratorEngine":
        assert self._loaded is not None, "setup was called"
        return self._loaded

    @concurrent_endpoint
    async def pid(self) -> int:
        """Return the id of this process on its host."""
        return os.getpid()

    @concurrent_endpoint
    async def beat(self) -> EngineStats:
        """Return the engine's counts, to show that this process answers; does not wait for the engine's
        thread.

        Raises:
            EngineDeadError: the engine has died.
        """
        self._engine.check_alive()
        return self._engine.stats()

    @concurrent_endpoint
    async def setup(self, setup: GeneratorSetup, host_id: str, payload_folder: Path) -> Path | None:
        """Load the model as policy version 0; ``payload_folder`` is on this host.

        Returns the folder of this process's log, for ``Host.read_in_flight``; None: it has none.
        """
        # vLLM takes 10 s to import, so only processes that sample import it.
        from forgeasync.generator import AdapterSetup, EngineEpisodes, GeneratorEngine, can_serve

        self._setup = setup
        self._host_id = host_id
        adapters = None
        if setup.lora is not None and can_serve(setup.lora):
            folder = payload_folder / f"adapter-of-{self._name}"
            # Left by the generator that this one replaces.
            shutil.rmtree(folder, ignore_errors=True)
            adapters = AdapterSetup(lora=setup.lora, shapes=expected_shapes(setup.facts), folder=folder)
        self._payloads = PayloadWriter(payload_folder, host_id, setup.payload_capacity_bytes)
        self._payload_server = PayloadServer(self._payloads)
        # Earlier processes have their own logs, which may still be read.
        in_flight = payload_folder / f"in-flight-{self._rank}-{os.getpid()}"
        kept_in = in_flight if setup.section.keep_in_flight else None
        self._loaded = await GeneratorEngine.start(
            model_path=setup.model_path,
            generator=setup.section,
            max_context_length=setup.max_context_length,
            seed=setup.seed + self._rank,
            records=setup.records,
            weights=setup.weights,
            adapters=adapters,
            in_flight=kept_in,
            num_scored_ids=setup.num_scored_ids,
            gpu_bytes=setup.gpu_bytes,
        )
        self._episodes = EngineEpisodes(self._loaded)
        started()
        return kept_in

    @concurrent_endpoint
    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None,
        continued: bytes | None = None,
        finished: Port[tuple[int, Response]] | None = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Sample a group of responses to one prompt, check their records and store their arrays.

        ``continued`` is the data that ``Host.read_in_flight`` read of the group from a lost generator.
        ``finished`` receives each response, with its index in the group, as soon as it has ended, before its
        records are checked.
        """

        def tell(index: int, rollout: Rollout) -> None:
            assert finished is not None
            finished.send((index, response_of(rollout)))

        facts: dict[str, int | str] = {"group": group_id, "prompt_tokens": len(prompt_ids_P)}
        try:
            with span("sample group", facts):
                rollouts = await self._engine.generate(
                    prompt_ids_P=prompt_ids_P,
                    num_samples=num_samples,
                    sampling=sampling,
                    seed=seed,
                    group_id=group_id,
                    continued=() if continued is None else group_turns(continued),
                    on_finished=None if finished is None else tell,
                )
                # Readers of the trace compute the time of a decode step from the token counts.
                facts["response_tokens"] = " ".join(str(one.num_response_tokens) for one in rollouts)
        except GroupCancelled:
            return CANCELLED
        self._forget_later(group_id)
        return self._check_and_store(
            group_id,
            [
                SampledRollout(branches=(rollout,), finish_reason=rollout.finish_reason, episode=index)
                for index, rollout in enumerate(rollouts)
            ],
        )

    def _forget_later(self, group_id: int) -> None:
        asyncio.get_running_loop().call_later(LOG_RETENTION_S, self._engine.forget_group, group_id)

    def _check_and_store(
        self, group_id: int, rollouts: Sequence[SampledRollout]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        for rollout in rollouts:
            for branch in rollout.branches:
                try:
                    check_rollout(branch, self._setup.records, self._setup.facts)
                except RecordError as error:
                    return RefusedGroup(problem=f"rollout {rollout.episode} of group {group_id}: {error}")
        return store_group(self._payloads, rollouts, group_id=group_id, generator_rank=self._rank)

    @concurrent_endpoint
    async def continue_episode(
        self,
        episode: EpisodeId,
        after: int | None,
        given_ids: np.ndarray,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
        repeated: bool = False,
    ) -> SampledTurn | None:
        """Sample a turn of an episode, after the turn ``after`` and the tokens ``given_ids``; its arrays stay
        here. None: the group was cancelled.

        ``repeated``: the turn was requested from a lost generator, and its episodes were restored here.
        """
        try:
            return await self._episodes.add_turn(
                episode,
                after,
                given_ids,
                sampling=sampling,
                max_tokens=max_tokens,
                seed=seed,
                repeated=repeated,
            )
        except GroupCancelled:
            return None

    @concurrent_endpoint
    async def restore_episodes(self, group_id: int, data: bytes) -> Mapping[EpisodeId, frozenset[int]] | None:
        """Take over the episodes of a group from a lost generator, with all their turns.

        ``data`` is the data that ``Host.read_in_flight`` read of the group. Returns the numbers of the
        completed turns, by episode: only these may have reached the environment. Returns None if the group
        was cancelled.

        Raises:
            ValueError: ``data`` is incomplete or of another group, or the group is already open here.
        """
        turns = group_turns(data)
        try:
            self._episodes.restore(group_id, turns)
        except GroupCancelled:
            return None
        return ended_turns(turns)

    @concurrent_endpoint
    async def store_episodes(
        self, group_id: int, ended: Sequence[EndedEpisode]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Check the records of a group's finished episodes and store their arrays, as ``sample_group`` does.

        Returns one rollout for each of ``ended``; all others of the group are dropped.
        """
        trees = await self._episodes.take(group_id, [one.episode for one in ended])
        self._forget_later(group_id)
        return self._check_and_store(
            group_id,
            [
                SampledRollout(
                    branches=branches,
                    finish_reason=FinishReason.LENGTH if one.is_truncated else branches[-1].finish_reason,
                    episode=one.episode.index,
                    agent=one.episode.agent,
                )
                for one, branches in zip(ended, trees, strict=True)
            ],
        )

    @concurrent_endpoint
    async def drop_episode(self, episode: EpisodeId) -> None:
        """Drop one attempt at an episode, and stop sampling for it."""
        await self._episodes.drop_episode(episode)

    @concurrent_endpoint
    async def drop_episodes(self, group_id: int) -> None:
        """Drop the episodes of a group, and stop sampling for them."""
        await self._episodes.drop(group_id)

    @concurrent_endpoint
    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        """Cancel those of the groups that this engine samples; their calls return ``CANCELLED``."""
        await self._engine.cancel(group_ids)

    @concurrent_endpoint
    async def respond(
        self, prompt_ids_P: np.ndarray, num_samples: int, sampling: SamplingSection, seed: int | None
    ) -> tuple[SampledTurn, ...]:
        """Sample responses that are not trained on."""
        rollouts = await self._engine.generate(
            prompt_ids_P=prompt_ids_P, num_samples=num_samples, sampling=sampling, seed=seed
        )
        return tuple(map(sampled_turn, rollouts))

    @concurrent_endpoint
    async def free_payloads(self, files: Sequence[str]) -> None:
        """Free the files of groups that were trained on or dropped, including those of a lost generator."""
        for file in files:
            await self._payload_server.free(file)

    @concurrent_endpoint
    async def expose_payload(self, ref: PayloadRef) -> RDMABuffer:
        """Return a handle with which a trainer on another host reads a payload."""
        return self._payload_server.expose(ref)

    @concurrent_endpoint
    async def connect_weights(
        self,
        layout: WeightLayout,
        sources: Sequence[StagingSource],
        folder: Path,
        share: HostShare,
        is_joining: bool,
    ) -> str:
        """Plan how versions get from the trainer's ranks into the engine, through a receive buffer in
        ``folder``.

        ``share`` is this generator's part among those of its host. The first one is connected before the
        others, and creates the files unless the generator is joining others. Returns a description of how the
        engine loads versions.

        Raises:
            ValueError: trainer and engine have different tensors, or a transport cannot work.
        """
        # These import vLLM, which takes 10 s.
        from forgeasync.generator import AdapterBase, HostMemory, WeightReceiver

        setup, base = self._setup, None
        if setup.lora is not None:
            base = AdapterBase(
                folder=setup.model_path,
                shapes=expected_shapes(setup.facts),
                dtype=TORCH_DTYPES[setup.section.dtype],
                scaling=setup.lora.alpha / setup.lora.rank,
            )
        self._receiver = await WeightReceiver.connect(
            self._engine,
            layout=layout,
            transports=connect_transports(setup.weights, layout, sources, generator_host=self._host_id),
            host_memory=HostMemory(
                receive_buffer=folder / "receive-buffer",
                shadow=setup.weights.shadow,
                share=share,
                is_joining=is_joining,
            ),
            delta=setup.weights.delta is Delta.EXACT,
            base=base,
        )
        return str(self._receiver.route)

    @concurrent_endpoint
    async def reconnect_weights(self, layout: WeightLayout, sources: Sequence[StagingSource]) -> None:
        """Fetch versions from the buffers of a restarted trainer, which has the same layout."""
        self._receiver.reconnect(
            connect_transports(self._setup.weights, layout, sources, generator_host=self._host_id)
        )

    @concurrent_endpoint
    async def begin_update(self, manifest: Manifest, new_share: HostShare | None) -> FetchReport:
        """Fetch this generator's share of a version that the caller has leased.

        ``new_share`` is given if the generators in this update differ from those in the last one.
        """
        return await self._receiver.begin(manifest, new_share)

    @concurrent_endpoint
    async def stage_update(self) -> None:
        """Prepare the version for the swap; all its shares have arrived on this host."""
        await self._receiver.stage()

    @concurrent_endpoint
    async def abandon_update(self) -> None:
        """Keep the old weights: a share of the version has not arrived on this host, or was not staged."""
        await self._receiver.abandon()

    @concurrent_endpoint
    async def finish_update(self) -> SwapReport:
        """Wait until the engine samples with the version that all generators of this host have staged."""
        return await self._receiver.finish()

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Take the engine off its GPU while the trainer makes a step there."""
        await self._engine.sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        """Put the engine back on its GPU."""
        await self._engine.wake()

    @concurrent_endpoint
    async def reexecute(
        self, version: int, groups: Sequence[tuple[Path, int]], sampling: SamplingSection
    ) -> ReexecutedVersion:
        """Sample everything that ``version`` sampled in a recorded run again, and compare.

        ``groups`` are the files and seeds of the groups whose oldest token has this version.
        """
        # Imports vLLM, which takes 10 s.
        from forgeasync.generator import EngineReexecution, recorded_requests

        if self._reexecution is None:
            self._reexecution = await EngineReexecution.begin(self._engine, sampling)
        requests = [
            request
            for file, seed in groups
            for request in recorded_requests(read_spilled(file).group, seed=seed)
        ]
        return await self._reexecution.run(version, requests)

    @concurrent_endpoint
    async def first_different_operator(self, file: Path) -> str:
        """Name the first operator that differs between a trainer's trace in ``file`` and this engine."""
        return await self._engine.first_different_operator(file)

    @concurrent_endpoint
    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of every worker's parameters, to compare with the trainer's (CPU engines only)."""
        return await self._engine.parameters()

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        """Return the engine's counts since its start, and the memory of its processes."""
        return dataclasses.replace(self._engine.stats(), memory=self._memory.peak())

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """End the engine, if it has started."""
        if self._loaded is not None:
            self._loaded.shutdown()
