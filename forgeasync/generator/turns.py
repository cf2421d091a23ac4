"""Turns that an engine samples: converts vLLM's outputs to tokens of a trajectory and to text.

An uninterrupted turn is one request, also called a part. A turn that is ended at a swap and resumed has
several parts; the prompt of each later one has the original prompt and all tokens so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from forgeasync.config import SamplingSection
from forgeasync.rollouts import (
    BegunTurn,
    EndedTurn,
    EpisodeId,
    FinishReason,
    KeptTokens,
    LoggedTurn,
    RequestSpan,
    Rollout,
    SampledTokens,
    SampledTurn,
    Trajectory,
    VersionSpan,
    branches,
)

ABORTED = "abort"
"""vLLM's finish reason of an aborted request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a turn ended."""

    finish_reason: FinishReason
    has_end_token: bool
    """Whether an end token ended the turn, rather than a stop text or a length limit."""
    stop_text: str | None = None
    """The text of ``stop`` that ended the turn, if any."""


@dataclass(slots=True, kw_only=True)
class EngineEpisode:
    """State that the turns of one response or episode share."""

    number: int
    """Number of the episode in the engine; each attempt at an episode has its own."""
    sample: int
    """Index of the response or episode within its group."""
    agent: int = 0
    attempt: int = 0
    num_requests: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class EngineTurn:
    """A turn that the engine samples, with the tokens before it."""

    episode: EngineEpisode
    trajectory: Trajectory
    number: int = 0
    """Index of the turn within its episode."""
    after: int | None = None
    """Index of the previous turn; None for the first turn of a trajectory."""
    restored: LoggedTurn | None = None
    """Tokens that another engine has sampled of the turn; None once this engine has appended them."""
    is_claimable: bool = False
    """Whether the turn was restored and its caller has not requested it again."""
    log_key: int | None = None
    """Key of the turn in the log of tokens in flight; None if it is not logged."""
    end: TurnEnd | None = None
    """How the turn ended; None while it continues."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn."""

    def continued(self) -> "EngineTurn":
        """Return a new turn after this one."""
        return EngineTurn(episode=self.episode, trajectory=self.trajectory.continued(), after=self.number)

    def begun(self, group_id: int) -> BegunTurn:
        """Return the record of the turn's beginning for the log of tokens in flight."""
        episode = self.episode
        return BegunTurn(
            # The log assigns the key.
            key=0,
            episode=EpisodeId(
                group_id=group_id, index=episode.sample, attempt=episode.attempt, agent=episode.agent
            ),
            number=self.number,
            after=self.after,
            num_tokens_before=self.trajectory.num_tokens_before,
            given_ids=self.trajectory.given_ids,
        )

    def ended(self, key: int) -> EndedTurn:
        """Return the record of the turn's end for the log of tokens in flight."""
        assert self.end is not None
        return EndedTurn(
            key=key,
            num_tokens=self.trajectory.num_sampled,
            finish_reason=self.end.finish_reason,
            has_end_token=self.end.has_end_token,
            stop_text=self.end.stop_text,
        )


def check_continued(
    continued: Sequence[LoggedTurn], prompt_ids_P: np.ndarray, num_samples: int, sampling: SamplingSection
) -> None:
    """Check that turns sampled by another engine belong to the responses of this group.

    Raises:
        ValueError: They do not; the message has the field, the value and what would be right.
    """
    seen: set[int] = set()
    for turn in continued:
        index = turn.begun.episode.index
        if index >= num_samples or index in seen or turn.begun.number:
            raise ValueError(
                f"continued: turn {turn.begun.number} of response {index}; a group of {num_samples} "
                f"responses has one turn of each, numbered from 0 to {num_samples - 1}"
            )
        seen.add(index)
        if not np.array_equal(turn.begun.given_ids, prompt_ids_P):
            raise ValueError(
                f"continued: response {index} has another prompt, of {len(turn.begun.given_ids)} tokens; it "
                f"must be the group's, of {len(prompt_ids_P)}"
            )
        if turn.num_tokens > sampling.max_response_tokens:
            raise ValueError(
                f"continued: {turn.num_tokens} tokens of response {index}; must be at most "
                f"max_response_tokens = {sampling.max_response_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTokens:
    """Text of sampled tokens, up to the first stop text."""

    text: str
    num_tokens: int
    """Number of tokens up to the one that completes the stop text; all tokens if none was found."""
    stop_text: str | None
    """Stop text that was found, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReader:
    """Converts the outputs of one engine to trajectories and text."""

    tokenizer: TokenizerLike
    vocab_size: int
    num_experts: int
    num_dense_layers: int

    def new_trajectory(self) -> Trajectory:
        """Return a trajectory of this engine's model without tokens."""
        return Trajectory(num_experts=self.num_experts)

    def sampled(self, output: CompletionOutput, *, request: int) -> SampledTokens:
        """Convert the tokens that a request has sampled, at least one; ``request`` is its index."""
        assert isinstance(output.logprobs, FlatLogprobs) and output.weight_versions is not None
        assert len(output.logprobs) == len(output.token_ids)
        experts, mask = output.routed_experts, output.sampling_mask
        return SampledTokens(
            ids_T=np.asarray(output.token_ids, np.int32),
            # The first entry of each position is the sampled token's.
            logprobs_T=np.asarray(output.logprobs.logprobs, np.float32)[output.logprobs.start_indices],
            version_spans=tuple(
                VersionSpan(version=int(span.version), start=span.start, end=span.end)
                for span in output.weight_versions
            ),
            request_spans=(RequestSpan(request=request, start=0, end=len(output.token_ids)),),
            # vLLM fills layers without experts with zeros.
            expert_ids_RMK=None if experts is None else experts[:, self.num_dense_layers :],
            kept_tokens=None
            if mask is None
            else KeptTokens.from_rows(mask.token_ids, vocab_size=self.vocab_size),
        )

    def grow(
        self, trajectory: Trajectory, part: CompletionOutput, *, request: int = 0, stop: Sequence[str]
    ) -> TurnEnd | None:
        """Append the tokens of a request to the trajectory's last turn.

        Returns how the turn ended; None if the request was aborted and the turn continues.
        """
        assert part.finish_reason is not None, "a request that has ended"
        # If a stop text ended the request, vLLM's reason is that text.
        return self._append(
            trajectory,
            self.sampled(part, request=request) if part.token_ids else None,
            finish_reason=None if part.finish_reason == ABORTED else FinishReason(part.finish_reason),
            stop_text=part.stop_reason if isinstance(part.stop_reason, str) else None,
            stop=stop,
        )

    def resume(self, trajectory: Trajectory, turn: LoggedTurn, *, stop: Sequence[str]) -> TurnEnd | None:
        """Append the tokens, at least one, that another engine has sampled of the trajectory's last turn.

        Returns how the turn ended there, even if that engine died before it logged the end; None if the turn
        continues.
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
            # A stop text that began in an earlier part comes first.
            stop_text = decoded.stop_text or stop_text
        if sampled is not None and num_new:
            trajectory.sample(sampled.first(num_new))
        if stop_text is not None:
            return TurnEnd(finish_reason=FinishReason.STOP, has_end_token=False, stop_text=stop_text)
        if finish_reason is None:
            return None
        return TurnEnd(finish_reason=finish_reason, has_end_token=has_end_token)

    def facts(self, turn: EngineTurn) -> SampledTurn:
        """Return the result of a turn that has just ended."""
        assert turn.end is not None
        ids = turn.trajectory.token_ids
        start = len(ids) - turn.trajectory.num_sampled
        decoded = self.decode(ids[:start], ids[start:], has_end_token=turn.end.has_end_token, stop=turn.stop)
        return SampledTurn(
            turn=turn.number,
            ids_T=turn.trajectory.sampled_ids,
            text=decoded.text,
            finish_reason=turn.end.finish_reason,
            stop_text=turn.end.stop_text,
            first_version=turn.trajectory.first_version,
            version=turn.trajectory.last_version,
        )

    def rollouts(self, turns: Sequence[EngineTurn]) -> tuple[Rollout, ...]:
        """Return one rollout, with its text, for each branch of a tree of turns.

        The text is that of the whole response, including given tokens. It is cut at a stop text only if the
        response is one turn.
        """
        by_trajectory = {id(turn.trajectory): turn for turn in turns}
        rollouts = []
        for branch in branches([turn.trajectory for turn in turns]):
            last = by_trajectory[id(branch.turns[-1])]
            assert last.end is not None
            decoded = self.decode(
                branch.prompt_ids,
                branch.response_ids,
                has_end_token=last.end.has_end_token,
                stop=last.stop if branch.has_one_turn else (),
            )
            rollouts.append(branch.rollout(text=decoded.text, finish_reason=last.end.finish_reason))
        return tuple(rollouts)

    def decode(
        self, before: Sequence[int], ids: Sequence[int], *, has_end_token: bool, stop: Sequence[str]
    ) -> DecodedTokens:
        """Decode ``ids`` after ``before`` up to the end of the text.

        The result is the same as if vLLM had sampled the response in one part: the text ends where the first
        stop text begins, and the tokens end with the one that completes it. vLLM itself searches each part
        separately and misses a stop text that spans two parts.
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


def sampling_params(
    sampling: SamplingSection,
    *,
    all_kept: int,
    max_tokens: int,
    seed: int | None,
    arguments: Mapping[str, object],
) -> SamplingParams:
    """Return vLLM's parameters of one request.

    Args:
        all_kept: ``top_k`` of requests whose sampling section does not set it.
        seed: Seed of the request, see ``part_seed``.
        arguments: ``extra_args`` of the request.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or all_kept,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        seed=seed,
        # Text is decoded once, from all requests; here only to detect stop texts.
        detokenize=bool(sampling.stop),
        stop=list(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=dict(arguments),
    )


def part_seed(seed: int | None, *, sample: int, part: int, agent: int = 0) -> int | None:
    """Return a separate seed for every part of every sample, because equal seeds draw equal noise."""
    if seed is None:
        return None
    entropy = (seed, sample, part) if agent == 0 else (seed, sample, part, agent)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
