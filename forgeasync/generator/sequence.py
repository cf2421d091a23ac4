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

from forgeasync.generator.turns import EngineTurn
from forgeasync.rollouts import (
    Branch,
    FinishReason,
    KeptTokens,
    LoggedTurn,
    Rollout,
    SampledTokens,
    SampledTurn,
    Trajectory,
    VersionSpan,
    branches,
)

ABORTED = "abort"
"""vLLM's finish reason of a request that was ended from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a turn ended."""

    finish_reason: FinishReason
    has_end_token: bool
    """Whether it ended with a token made for that, not with a text of ``stop`` or at a bound."""
    stop_text: str | None = None
    """The text of ``stop`` that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTokens:
    """The text of sampled tokens, up to the first of the texts that end a turn."""

    text: str
    num_tokens: int
    """Number of tokens up to the one that completes that text; all if there is none."""
    stop_text: str | None
    """The text that was found."""


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
                    # vLLM declares None too, which a position of a prompt can have.
                    candidates[token].logprob  # type: ignore[index]
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

    def grow(self, trajectory: Trajectory, part: CompletionOutput, *, stop: Sequence[str]) -> TurnEnd | None:
        """Append what a request has sampled of the trajectory's last turn.

        Returns how the turn ended; None if the request was ended from outside and the turn goes on.
        """
        assert part.finish_reason is not None, "a request that has ended"
        # vLLM gives the text as the reason where one of ``stop`` has ended the part.
        return self._append(
            trajectory,
            self.sampled(part) if part.token_ids else None,
            finish_reason=None if part.finish_reason == ABORTED else FinishReason(part.finish_reason),
            stop_text=part.stop_reason if isinstance(part.stop_reason, str) else None,
            stop=stop,
        )

    def resume(self, trajectory: Trajectory, turn: LoggedTurn, *, stop: Sequence[str]) -> TurnEnd | None:
        """Append what another engine has sampled of the trajectory's last turn, at least one token.

        Returns how the turn ended there, also where that engine died before it noted so; None if it goes on.
        """
        ended = turn.ended
        if ended is None:
            return self._append(
                trajectory, turn.tokens(), finish_reason=turn.finish_reason, stop_text=None, stop=stop
            )
        trajectory.sample(turn.tokens())
        return TurnEnd(
            finish_reason=ended.finish_reason, has_end_token=ended.has_end_token, stop_text=ended.stop_text
        )

    def _append(
        self,
        trajectory: Trajectory,
        sampled: SampledTokens | None,
        *,
        finish_reason: FinishReason | None,
        stop_text: str | None,
        stop: Sequence[str],
    ) -> TurnEnd | None:
        has_end_token = finish_reason is FinishReason.STOP and stop_text is None
        num_new = 0 if sampled is None else len(sampled.ids_T)
        if stop and sampled is not None:
            before = trajectory.token_ids
            start = len(before) - trajectory.num_sampled
            ids = [*before[start:], *sampled.ids_T.tolist()]
            decoded = self.decode(before[:start], ids, has_end_token=has_end_token, stop=stop)
            num_new = decoded.num_tokens - trajectory.num_sampled
            # One that began in an earlier part comes first.
            stop_text = decoded.stop_text or stop_text
        if sampled is not None and num_new:
            trajectory.sample(sampled.first(num_new))
        if stop_text is not None:
            return TurnEnd(finish_reason=FinishReason.STOP, has_end_token=False, stop_text=stop_text)
        if finish_reason is None:
            return None
        return TurnEnd(finish_reason=finish_reason, has_end_token=has_end_token)

    def facts(self, turn: EngineTurn) -> SampledTurn:
        """Facts of a turn that has just ended."""
        assert turn.finish_reason is not None
        ids = turn.trajectory.token_ids
        start = len(ids) - turn.trajectory.num_sampled
        decoded = self.decode(ids[:start], ids[start:], has_end_token=turn.has_end_token, stop=turn.stop)
        return SampledTurn(
            turn=turn.number,
            ids_T=turn.trajectory.sampled_ids,
            text=decoded.text,
            finish_reason=turn.finish_reason,
            stop_text=turn.stop_text,
            first_version=turn.trajectory.first_version,
            version=turn.trajectory.last_version,
        )

    def rollouts(self, turns: Sequence[EngineTurn]) -> tuple[Rollout, ...]:
        """Return what was sampled in a tree of turns, a rollout for each branch."""
        by_trajectory = {id(turn.trajectory): turn for turn in turns}
        rollouts = []
        for branch in branches([turn.trajectory for turn in turns]):
            last = by_trajectory[id(branch.turns[-1])]
            assert last.finish_reason is not None
            rollouts.append(
                self.rollout(branch, last.finish_reason, has_end_token=last.has_end_token, stop=last.stop)
            )
        return tuple(rollouts)

    def rollout(
        self, branch: Branch, finish_reason: FinishReason, *, has_end_token: bool, stop: Sequence[str]
    ) -> Rollout:
        """The branch with its text: that of its whole response, given tokens included.

        Only a response of one turn ends where a text of ``stop`` begins: of several turns, all text is shown.
        """
        stop = stop if branch.has_one_turn else ()
        decoded = self.decode(branch.prompt_ids, branch.response_ids, has_end_token=has_end_token, stop=stop)
        return branch.rollout(text=decoded.text, finish_reason=finish_reason)

    def decode(
        self, before: Sequence[int], ids: Sequence[int], *, has_end_token: bool, stop: Sequence[str]
    ) -> DecodedTokens:
        """Decode ``ids`` after ``before`` up to the end of the text.

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
        stop_text = detokenizer.update(list(ids), has_end_token)
        return DecodedTokens(
            text=detokenizer.get_next_output_text(finished=True, delta=False),
            num_tokens=detokenizer.num_output_tokens(),
            stop_text=stop_text,
        )


def part_seed(seed: int | None, *, sample: int, part: int, agent: int = 0) -> int | None:
    """A seed of its own for every part of every sample: the same one again would draw the same noise."""
    if seed is None:
        return None
    entropy = (seed, sample, part) if agent == 0 else (seed, sample, part, agent)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
