"""One sampled sequence, from the parts in which the engine made it.

A sequence that runs from end to end is one part. One that was ended at a swap and resumed has several: each
later part had the prompt and all tokens before it as its prompt. Whatever was recorded of a token stays as it
was when the token was first computed; a later part adds only what lies beyond.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from forgeasync.data.kept_tokens import KeptTokens
from forgeasync.data.rollout import FinishReason, Rollout, VersionSpan
from forgeasync.data.routing import RoutedExperts

ABORTED = "abort"
"""vLLM's finish reason of a request that was ended from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceJoiner:
    """Turns the parts of a sequence into its rollout."""

    tokenizer: TokenizerLike
    vocab_size: int
    num_experts: int
    num_dense_layers: int

    def join(
        self, prompt_ids_P: np.ndarray, parts: Sequence[CompletionOutput], *, stop: Sequence[str] = ()
    ) -> Rollout:
        """The rollout of a sequence; every part has tokens and only the last ended by itself.

        It ends with the token that completes one of the texts in ``stop``: vLLM has looked for them in every
        part by itself, not where one part ends and the next begins.
        """
        assert all(part.token_ids for part in parts) and parts[-1].finish_reason != ABORTED
        response_ids = [token for part in parts for token in part.token_ids]
        finish_reason = FinishReason(parts[-1].finish_reason)
        # vLLM gives the text as the reason where one has ended the part.
        has_end_token = finish_reason is FinishReason.STOP and not isinstance(parts[-1].stop_reason, str)
        text, num_tokens = self._text(prompt_ids_P.tolist(), response_ids, has_end_token, stop)
        if num_tokens < len(response_ids):
            finish_reason = FinishReason.STOP
        return Rollout(
            prompt_ids_P=prompt_ids_P.astype(np.int32),
            response_ids_T=np.asarray(response_ids[:num_tokens], np.int32),
            logprobs_T=np.concatenate([_logprobs(part) for part in parts])[:num_tokens],
            version_spans=_spans(parts, num_tokens),
            text=text,
            finish_reason=finish_reason,
            routed_experts=self._routing(parts, num_tokens=len(prompt_ids_P) + num_tokens),
            kept_tokens=self._kept_tokens(parts, num_tokens),
        )

    def _text(
        self, prompt_ids: list[int], response_ids: list[int], has_end_token: bool, stop: Sequence[str]
    ) -> tuple[str, int]:
        """As vLLM decodes a response that it made in one part, and how many tokens there are to its end."""
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=SamplingParams(stop=list(stop)),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        # Of several texts in ``stop`` the one that is completed first counts; what comes after it is dropped.
        detokenizer.update(response_ids, has_end_token)
        text = detokenizer.get_next_output_text(finished=True, delta=False)
        return text, detokenizer.num_output_tokens()

    def _routing(self, parts: Sequence[CompletionOutput], *, num_tokens: int) -> RoutedExperts | None:
        """Each part has rows of all its inputs, which are all its tokens but the last."""
        if any(part.routed_experts is None for part in parts):
            return None
        rows: list[np.ndarray] = []
        num_rows = 0
        for part in parts:
            # vLLM has zeros for layers without experts.
            rows.append(part.routed_experts[num_rows:, self.num_dense_layers :])
            num_rows += len(rows[-1])
        return RoutedExperts.from_rows(
            np.concatenate(rows)[: num_tokens - 1], num_tokens=num_tokens, num_experts=self.num_experts
        )

    def _kept_tokens(self, parts: Sequence[CompletionOutput], num_tokens: int) -> KeptTokens | None:
        if any(part.sampling_mask is None for part in parts):
            return None
        rows = [row for part in parts for row in part.sampling_mask.token_ids]
        return KeptTokens.from_rows(rows[:num_tokens], vocab_size=self.vocab_size)


def _logprobs(part: CompletionOutput) -> np.ndarray:
    assert part.logprobs is not None
    return np.asarray(
        [candidates[token].logprob for token, candidates in zip(part.token_ids, part.logprobs, strict=True)],
        np.float32,
    )


def _spans(parts: Sequence[CompletionOutput], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Of the first ``num_tokens`` tokens."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        assert part.weight_versions is not None
        for span in part.weight_versions:
            version, start = int(span.version), offset + span.start
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version=version, start=start, end=offset + span.end))
        offset += len(part.token_ids)
    return tuple(
        VersionSpan(version=span.version, start=span.start, end=min(span.end, num_tokens))
        for span in spans
        if span.start < num_tokens
    )


def part_seed(seed: int | None, *, sample: int, part: int) -> int | None:
    """A seed of its own for every part of every sample: the same one again would draw the same noise."""
    if seed is None:
        return None
    return int(np.random.SeedSequence((seed, sample, part)).generate_state(1)[0])
