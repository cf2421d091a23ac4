"""A vLLM engine that samples groups of rollouts and takes new weights between two decode steps.

Plain asyncio, no Monarch: the generator actor is a thin shell around this class.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from forgeasync.config.generator import GeneratorSection, SamplingSection
from forgeasync.config.weights import WeightsSection
from forgeasync.generator.interruption import (
    GROUP_ARGUMENT,
    AdmissionGate,
    Groups,
    Prefetch,
    RunningGroup,
    interruption_policy,
)
from forgeasync.generator.reports import EngineStats, GroupCancelled, SwapReport
from forgeasync.generator.sequence import SequenceReader, part_seed
from forgeasync.generator.updates import WeightUpdates
from forgeasync.generator.workarounds.batch_invariance import compute_batch_invariantly
from forgeasync.generator.workarounds.cpu_latent import expand_latents, rotate_in_torch
from forgeasync.generator.workarounds.inprocess_client import InProcessAsyncClient
from forgeasync.generator.workarounds.served_adapters import (
    AdapterSetup,
    ServedAdapter,
    engine_modules,
    engine_rank,
    install,
)
from forgeasync.rollouts.records import Records
from forgeasync.rollouts.rollout import FinishReason, Rollout
from forgeasync.rollouts.trajectory import SampledTurn, Trajectory

CPU_WORKER = "forgeasync.generator.workarounds.cpu_worker.UpdatableCPUWorker"

GPU_WORKER_EXTENSION = "forgeasync.generator.gpu_worker.UpdatableGPUWorker"


R = TypeVar("R")


@contextmanager
def _in_process_core(*, salt_with_version: bool) -> Iterator[None]:
    """AsyncLLM builds its core client through this one static method."""
    original = core_client.EngineCoreClient.make_async_mp_client

    def make(
        vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: object
    ) -> InProcessAsyncClient:
        # The rest addresses engine cores in other processes.
        return InProcessAsyncClient(
            vllm_config, executor_class, log_stats, salt_with_version=salt_with_version
        )

    core_client.EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        core_client.EngineCoreClient.make_async_mp_client = original


@dataclass(slots=True, kw_only=True)
class EngineSequence:
    """A trajectory that the engine goes on sampling."""

    trajectory: Trajectory
    index: int
    """Within its group."""
    num_requests: int = 0
    finish_reason: FinishReason | None = None
    """Why its last turn ended."""
    has_end_token: bool = False
    """Whether its last turn ended with a token of its own, not with a text of ``stop`` or at a bound."""
    stop: tuple[str, ...] = ()
    """The texts that end a turn."""


class GeneratorEngine:
    """One engine. Build it with ``await GeneratorEngine.start(...)`` inside an event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        client: InProcessAsyncClient,
        records: Records,
        *,
        weights: WeightsSection,
    ) -> None:
        model = llm.model_config
        self._llm = llm
        self._client = client
        self._records = records
        self._vocab_size = model.get_vocab_size()
        self._reader = SequenceReader(
            tokenizer=llm.get_tokenizer(),
            vocab_size=self._vocab_size,
            num_experts=model.get_num_experts(),
            num_dense_layers=records.num_dense_layers,
        )
        self._gate = AdmissionGate()
        self._groups = Groups()
        policy = interruption_policy(weights.interruption, client=client, gate=self._gate)
        self._updates = WeightUpdates(client, self._groups, policy, weights.kv_cache)
        self.adapter: ServedAdapter | None = None
        """Adapter that all requests are served with; None if weights are whole."""
        self._request_ids = itertools.count()
        self._num_generated_tokens = 0
        self._num_in_flight = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0

    @classmethod
    async def start(
        cls,
        *,
        model_path: Path,
        generator: GeneratorSection,
        max_context_length: int,
        seed: int,
        records: Records,
        weights: WeightsSection,
        adapters: AdapterSetup | None = None,
    ) -> "GeneratorEngine":
        """Load a Hugging Face folder as policy version 0; with ``adapters`` of it that vLLM serves."""
        is_cpu = current_platform.is_cpu()
        if generator.batch_invariant:
            compute_batch_invariantly()
        if is_cpu:
            expand_latents()
        args = AsyncEngineArgs(
            model=str(model_path),
            dtype=generator.dtype.value,
            max_model_len=max_context_length,
            max_num_seqs=generator.max_num_seqs,
            max_num_batched_tokens=generator.max_num_batched_tokens,
            tensor_parallel_size=generator.tensor_parallel,
            enable_expert_parallel=generator.expert_parallel,
            worker_cls=CPU_WORKER if is_cpu else "auto",
            worker_extension_cls="" if is_cpu else GPU_WORKER_EXTENSION,
            kv_cache_memory_bytes=int(generator.kv_cache_gib * 2**30),
            enforce_eager=not generator.compile,
            # The distribution really drawn from: after temperature, top-k, top-p and min-p.
            logprobs_mode="processed_logprobs",
            # Step outputs then belong to the weights of that very step, which makes version labels exact.
            async_scheduling=False,
            seed=seed,
            enable_return_routed_experts=records.routing and not is_cpu,
            return_sampling_mask=records.kept_tokens and not is_cpu,
            enable_lora=adapters is not None,
            max_lora_rank=16 if adapters is None else engine_rank(adapters.lora.rank),
            lora_target_modules=None if adapters is None else engine_modules(adapters),
        )
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if is_cpu:
            # Imports the CPU build's model runner, which other builds need not have.
            from forgeasync.generator.workarounds.cpu_capture import request_records

            rotate_in_torch(vllm_config)
            request_records(vllm_config, routing=records.routing, kept_tokens=records.kept_tokens)
        with _in_process_core(salt_with_version=not weights.prefix_cache_across_versions):
            llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        engine = cls(llm, llm.engine_core, records, weights=weights)
        await engine._client.between_steps(lambda core: core.set_weight_version("0"))
        if adapters is not None:
            engine.adapter = ServedAdapter(adapters)
            zero = engine.adapter.write_zero()
            await engine._client.between_steps(lambda core: install(core, zero))
        return engine

    async def generate(
        self,
        *,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
        group_id: int | None = None,
    ) -> tuple[Rollout, ...]:
        """Sample ``num_samples`` responses to one prompt; a seed makes them reproducible.

        By its ``group_id`` a group can be cancelled, and updates report its progress.

        Raises:
            GroupCancelled: ``cancel`` was called with the group's id.
            ValueError: another group of this id is being sampled.
        """
        with self._groups.running(group_id) as (key, group):
            sequences = [self.new_sequence(index) for index in range(num_samples)]
            for sequence in sequences:
                sequence.trajectory.give(prompt_ids_P)
            tasks = [
                asyncio.create_task(
                    self.sample_turn(
                        sequence,
                        group_key=key,
                        group=group,
                        sampling=sampling,
                        max_tokens=sampling.max_response_tokens,
                        seed=seed,
                    )
                )
                for sequence in sequences
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return tuple(map(self.rollout, sequences))

    def new_sequence(self, index: int) -> EngineSequence:
        """A sequence without tokens; ``index`` is its place in its group."""
        return EngineSequence(trajectory=self._reader.new_trajectory(), index=index)

    def open_group(self, group_id: int | None) -> tuple[int, RunningGroup]:
        """A group that is sampled turn by turn until ``close_group``: its number in the engine and its state.

        By this number it can be cancelled, and updates report its progress unless ``group_id`` is None.

        Raises:
            ValueError: another group of this id is being sampled.
        """
        return self._groups.open(group_id)

    def close_group(self, group_key: int) -> None:
        """Close a group; no further turn of it is sampled."""
        self._groups.close(group_key)

    def turn(self, sequence: EngineSequence, start: int) -> SampledTurn:
        """Facts of the turn that begins at token ``start`` and has just ended."""
        assert sequence.finish_reason is not None
        ids = sequence.trajectory.token_ids
        return SampledTurn(
            text=self._reader.text(
                ids[:start], ids[start:], has_end_token=sequence.has_end_token, stop=sequence.stop
            )[0],
            num_tokens=len(ids) - start,
            finish_reason=sequence.finish_reason,
            last_id=ids[-1],
            version=sequence.trajectory.last_version,
        )

    def rollout(self, sequence: EngineSequence, finish_reason: FinishReason | None = None) -> Rollout:
        """Return what was sampled, with the finish reason of its last turn or another one."""
        assert sequence.finish_reason is not None
        return self._reader.rollout(
            sequence.trajectory,
            finish_reason or sequence.finish_reason,
            has_end_token=sequence.has_end_token,
            stop=sequence.stop,
        )

    async def sample_turn(
        self,
        sequence: EngineSequence,
        *,
        group_key: int,
        group: RunningGroup,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
    ) -> None:
        """Sample one turn of the model, up to ``max_tokens``, in as many requests as swaps make of it.

        Raises:
            GroupCancelled: ``cancel`` was called with the group's number.
        """
        with self._busy():
            num_left = max_tokens
            sequence.stop = sampling.stop
            start = sequence.trajectory.num_tokens
            while True:
                if group.is_cancelled:
                    raise GroupCancelled
                params = SamplingParams(
                    temperature=sampling.temperature,
                    # vLLM records kept sets only where top_k is set; the size of the vocabulary keeps all.
                    top_k=sampling.top_k or (self._vocab_size if self._records.kept_tokens else 0),
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    max_tokens=num_left,
                    logprobs=0,
                    seed=part_seed(seed, sample=sequence.index, part=sequence.num_requests),
                    # Texts are decoded once, from all parts; here only to look for texts that end a turn.
                    detokenize=bool(sampling.stop),
                    stop=list(sampling.stop),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    extra_args={GROUP_ARGUMENT: group_key},
                )
                sequence.num_requests += 1
                part = await self._run_request(list(sequence.trajectory.token_ids), params)
                if group.is_cancelled:
                    raise GroupCancelled
                group.num_tokens += len(part.token_ids)
                self._num_generated_tokens += len(part.token_ids)
                end = self._reader.grow(sequence.trajectory, part, turn_start=start, stop=sampling.stop)
                num_left -= len(part.token_ids)
                if end is not None:
                    sequence.finish_reason, sequence.has_end_token = end.finish_reason, end.has_end_token
                    return

    async def _run_request(self, prompt_ids: list[int], params: SamplingParams) -> CompletionOutput:
        async with self._gate.inside():
            last = None
            prompt = tokens_input(prompt_ids)
            lora_request = None if self.adapter is None else self.adapter.request
            request_id = f"r{next(self._request_ids)}"
            async for output in self._llm.generate(prompt, params, request_id, lora_request=lora_request):
                last = output
        assert last is not None and last.finished and len(last.outputs) == 1
        return last.outputs[0]

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Give up groups between two steps; those that have ended meanwhile are not touched."""
        self._groups.cancel(group_ids)
        await self._client.between_steps(
            lambda core: self._client.end_requests(core, self._groups.cancelled_requests(core))
        )

    async def update_weights(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """Put new weights in place, with what the configured interruption does to running sequences.

        ``prefetch`` fetches the weights, on the event loop; ``install`` puts them in place, on the
        engine's thread between two decode steps. Tokens of every later step carry ``version``. Where either
        raises, the engine goes on under the old version and the caller gets the exception. Updates run one
        after another.
        """
        return await self._updates.run(version, prefetch=prefetch, install=install)

    async def between_steps(self, function: Callable[[EngineCore], R]) -> R:
        """Run a function of vLLM's engine core between two steps, on the engine's thread."""
        return await self._client.between_steps(function)

    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Copies of every worker's parameters, experts unpacked (CPU engines only)."""
        return await self._client.between_steps(lambda core: core.collective_rpc("copy_parameters"))

    def stats(self) -> EngineStats:
        running_s = time.perf_counter() - self._busy_since_s if self._num_in_flight else 0.0
        return EngineStats(num_generated_tokens=self._num_generated_tokens, busy_s=self._busy_s + running_s)

    def shutdown(self) -> None:
        self._llm.shutdown()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if self._num_in_flight == 0:
            self._busy_since_s = time.perf_counter()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._busy_s += time.perf_counter() - self._busy_since_s
