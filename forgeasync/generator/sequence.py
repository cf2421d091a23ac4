"""Turns vLLM's outputs for a request into the tokens that extend a trajectory, and into text.

A turn that runs from end to end is one request. One that was ended at a swap and resumed has several: each
later one has the prompt and all tokens before it as its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from forgeasync.rollouts.kept_tokens import KeptTokens
from forgeasync.rollouts.rollout import FinishReason, Rollout, VersionSpan
from forgeasync.rollouts.trajectory import SampledTokens, Trajectory

ABORTED = "abort"
"""vLLM's finish reason of a request that was ended from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a turn ended."""

    finish_reason: FinishReason
    has_end_token: bool
    """Whether it ended with a token made for that, not with a text of ``stop`` or at a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReader:
    """Reads the outputs of one engine."""

    tokenizer: TokenizerLike
    vocab_size: int
    num_experts: int
    num_dense_layers: int

    def new_trajectory(self) -> Trajectory:
        """A trajectory of this engine's model, without tokens."""
        return Trajectory(num_experts=self.num_experts)

    def sampled(self, output: CompletionOutput) -> SampledTokens:
        """Convert what a request has sampled; at least one token."""
        assert output.logprobs is not None and output.weight_versions is not None
        experts, mask = output.routed_experts, output.sampling_mask
        return SampledTokens(
            ids_T=np.asarray(output.token_ids, np.int32),
            logprobs_T=np.asarray(
                [
                    candidates[token].logprob
                    for token, candidates in zip(output.token_ids, output.logprobs, strict=True)
                ],
                np.float32,
            ),
            version_spans=tuple(
                VersionSpan(version=int(span.version), start=span.start, end=span.end)
                for span in output.weight_versions
            ),
            # vLLM has zeros for layers without experts.
            expert_ids_RMK=None if experts is None else experts[:, self.num_dense_layers :],
            kept_tokens=None
            if mask is None
            else KeptTokens.from_rows(mask.token_ids, vocab_size=self.vocab_size),
        )

    def grow(
        self, trajectory: Trajectory, part: CompletionOutput, *, turn_start: int, stop: Sequence[str]
    ) -> TurnEnd | None:
        """Append what a request has sampled of the turn that began at token ``turn_start``.

        Returns how the turn ended; None if the request was ended from outside and the turn goes on.
        """
        # vLLM gives the text as the reason where one of ``stop`` has ended the part.
        has_end_token = part.finish_reason == FinishReason.STOP.value and not isinstance(
            part.stop_reason, str
        )
        num_new = len(part.token_ids)
        if stop and num_new:
            before = trajectory.token_ids
            ids = [*before[turn_start:], *part.token_ids]
            _, num_tokens = self.text(before[:turn_start], ids, has_end_token=has_end_token, stop=stop)
            num_new = num_tokens - (len(before) - turn_start)
        if num_new:
            trajectory.sample(self.sampled(part).first(num_new))
        if num_new < len(part.token_ids):
            return TurnEnd(finish_reason=FinishReason.STOP, has_end_token=False)
        if part.finish_reason == ABORTED:
            return None
        return TurnEnd(finish_reason=FinishReason(part.finish_reason), has_end_token=has_end_token)

    def rollout(
        self, trajectory: Trajectory, finish_reason: FinishReason, *, has_end_token: bool, stop: Sequence[str]
    ) -> Rollout:
        """The trajectory with its text: that of its whole response, given tokens included.

        Only a response of one turn ends where a text of ``stop`` begins: of several turns, all text is shown.
        """
        stop = stop if trajectory.has_one_turn else ()
        text, _ = self.text(
            trajectory.prompt_ids, trajectory.response_ids, has_end_token=has_end_token, stop=stop
        )
        return trajectory.rollout(text=text, finish_reason=finish_reason)

    def text(
        self, before: Sequence[int], ids: Sequence[int], *, has_end_token: bool, stop: Sequence[str]
    ) -> tuple[str, int]:
        """The text of ``ids`` after ``before``, and the number of tokens up to its end.

        As vLLM decodes a response that it made in one part: the text ends where the first of the texts in
        ``stop`` begins, the tokens with the one that completes it. vLLM looks for them in every part of a
        turn by itself, not where one part ends and the next begins.
        """
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=list(before),
            mm_features=None,
            sampling_params=SamplingParams(stop=list(stop)),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        detokenizer.update(list(ids), has_end_token)
        text = detokenizer.get_next_output_text(finished=True, delta=False)
        return text, detokenizer.num_output_tokens()


def part_seed(seed: int | None, *, sample: int, part: int) -> int | None:
    """A seed of its own for every part of every sample: the same one again would draw the same noise."""
    if seed is None:
        return None
    return int(np.random.SeedSequence((seed, sample, part)).generate_state(1)[0])
