"""A vLLM engine that samples groups of rollouts and takes new weights between two decode steps.

Plain asyncio, no Monarch: the generator actor is a thin shell around this class.
"""

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from forgeasync.config.schema import GeneratorSection, SamplingSection
from forgeasync.data.kept_tokens import KeptTokens
from forgeasync.data.records import Records
from forgeasync.data.rollout import FinishReason, Rollout, VersionSpan
from forgeasync.data.routing import RoutedExperts
from forgeasync.sampler.inprocess_client import InProcessAsyncClient
from forgeasync.sampler.stats import EngineStats
from forgeasync.sampler.swap import SwapReport

CPU_WORKER = "forgeasync.sampler.cpu_worker.UpdatableCPUWorker"
GPU_WORKER_EXTENSION = "forgeasync.sampler.reloading_worker.ReloadingWorker"

R = TypeVar("R")


@contextmanager
def _in_process_core() -> Iterator[None]:
    """AsyncLLM builds its core client through this one static method."""
    original = core_client.EngineCoreClient.make_async_mp_client

    def make(
        vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: object
    ) -> InProcessAsyncClient:
        # The rest addresses engine cores in other processes.
        return InProcessAsyncClient(vllm_config, executor_class, log_stats)

    core_client.EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        core_client.EngineCoreClient.make_async_mp_client = original


class SamplerEngine:
    """One engine. Build it with ``await SamplerEngine.start(...)`` inside an event loop."""

    def __init__(
        self, llm: AsyncLLM, client: InProcessAsyncClient, records: Records, model: ModelConfig
    ) -> None:
        self._llm = llm
        self._client = client
        self._records = records
        self._vocab_size = model.get_vocab_size()
        self._num_experts = model.get_num_experts()
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
    ) -> "SamplerEngine":
        """Load a Hugging Face folder as policy version 0."""
        is_cpu = current_platform.is_cpu()
        args = AsyncEngineArgs(
            model=str(model_path),
            dtype=generator.dtype.value,
            max_model_len=max_context_length,
            max_num_seqs=generator.max_num_seqs,
            max_num_batched_tokens=generator.max_num_batched_tokens,
            tensor_parallel_size=generator.tensor_parallel,
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
        )
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if is_cpu:
            # Imports the CPU build's model runner, which other builds need not have.
            from forgeasync.sampler.cpu_capture import request_records

            request_records(vllm_config, routing=records.routing, kept_tokens=records.kept_tokens)
        with _in_process_core():
            llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        engine = cls(llm, llm.engine_core, records, vllm_config.model_config)
        await engine._client.between_steps(lambda core: core.set_weight_version("0"))
        return engine

    async def generate(
        self,
        *,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[Rollout, ...]:
        """Sample ``num_samples`` responses to one prompt; a seed makes them reproducible."""
        params = SamplingParams(
            n=num_samples,
            temperature=sampling.temperature,
            # vLLM records kept sets only where top_k is set; the size of the vocabulary keeps all.
            top_k=sampling.top_k or (self._vocab_size if self._records.kept_tokens else 0),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_response_tokens,
            logprobs=0,
            seed=seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": prompt_ids_P.tolist()}
        self._enter()
        try:
            final: RequestOutput | None = None
            async for output in self._llm.generate(prompt, params, f"r{next(self._request_ids)}"):
                final = output
        finally:
            self._leave()
        assert final is not None and final.finished and len(final.outputs) == num_samples
        rollouts = tuple(self._rollout(prompt_ids_P, completion) for completion in final.outputs)
        self._num_generated_tokens += sum(rollout.num_response_tokens for rollout in rollouts)
        return rollouts

    async def update_weights(
        self,
        version: int,
        *,
        prefetch: Callable[[], Awaitable[None]],
        install: Callable[[EngineCore], None],
    ) -> SwapReport:
        """Replace all weights between two decode steps; running sequences go on under the new ones.

        ``prefetch`` makes them ready while decoding goes on, ``install`` runs on the engine's thread. Tokens
        of every later step carry ``version``.
        """

        def swap(core: EngineCore) -> float:
            start_s = time.perf_counter()
            install(core)
            core.set_weight_version(str(version))
            return time.perf_counter() - start_s

        await prefetch()
        return SwapReport(version=version, pause_s=await self.between_steps(swap))

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

    def _enter(self) -> None:
        if self._num_in_flight == 0:
            self._busy_since_s = time.perf_counter()
        self._num_in_flight += 1

    def _leave(self) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._busy_s += time.perf_counter() - self._busy_since_s

    def _rollout(self, prompt_ids_P: np.ndarray, completion: CompletionOutput) -> Rollout:
        assert completion.logprobs is not None and completion.weight_versions is not None
        response_ids_T = np.asarray(completion.token_ids, np.int32)
        logprobs_T = np.asarray(
            [
                candidates[token].logprob
                for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
            np.float32,
        )
        spans = tuple(
            VersionSpan(version=int(span.version), start=span.start, end=span.end)
            for span in completion.weight_versions
        )
        return Rollout(
            prompt_ids_P=prompt_ids_P.astype(np.int32),
            response_ids_T=response_ids_T,
            logprobs_T=logprobs_T,
            version_spans=spans,
            text=completion.text,
            finish_reason=FinishReason(completion.finish_reason),
            routed_experts=self._routing(completion, num_tokens=len(prompt_ids_P) + len(response_ids_T)),
            kept_tokens=self._kept_tokens(completion),
        )

    def _routing(self, completion: CompletionOutput, *, num_tokens: int) -> RoutedExperts | None:
        if completion.routed_experts is None:
            return None
        return RoutedExperts.from_rows(
            completion.routed_experts, num_tokens=num_tokens, num_experts=self._num_experts
        )

    def _kept_tokens(self, completion: CompletionOutput) -> KeptTokens | None:
        if completion.sampling_mask is None:
            return None
        return KeptTokens.from_rows(completion.sampling_mask.token_ids, vocab_size=self._vocab_size)
