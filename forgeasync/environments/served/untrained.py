"""Turns of sessions that are not trained on: sampled by the same engines, under the newest weights."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from forgeasync.environments.agent import TurnRequest
from forgeasync.rollouts import FinishReason, SampledTurn, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedSample:
    """What a generator has sampled after a prompt, and kept nothing of."""

    ids_T: np.ndarray
    """The sampled tokens, int32."""
    text: str
    finish_reason: FinishReason
    versions: VersionRange


SampleAfter = Callable[[np.ndarray, int, tuple[str, ...]], Awaitable[UntrainedSample]]
"""Samples after a prompt (token ids, int32) at most so many tokens, up to one of the given texts."""


class UntrainedTurns:
    """Samples the turns of one agent (``SampleTurn``). For one event loop.

    Generators keep nothing between turns: every request has the whole path to its turn as the prompt, of
    which their prefix caches hold what they can. So a session that is not trained on reserves no payload, and
    a worker that dies leaves nothing behind. The ids of paths are kept here until the session ends.
    """

    def __init__(self, sample: SampleAfter) -> None:
        self._sample = sample
        self._paths: list[np.ndarray] = []

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        """Sample a turn."""
        before = np.zeros(0, np.int32) if request.after is None else self._paths[request.after]
        prompt_ids = np.concatenate([before, request.given_ids])
        turn = await self._sample(prompt_ids, request.max_tokens, request.stop)
        self._paths.append(np.concatenate([prompt_ids, turn.ids_T]))
        return SampledTurn(
            turn=len(self._paths) - 1,
            ids_T=turn.ids_T,
            text=turn.text,
            finish_reason=turn.finish_reason,
            first_version=turn.versions.first,
            version=turn.versions.last,
        )
