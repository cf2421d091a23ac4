"""Limits of a reward's calls: how many at once, how many a second, how often for one response."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgeasync.config import MathReward, PythonReward, RewardSection, ScoredUnit
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, Task, VerifierCounts
from forgeasync.scoring import Limited, RewardUnavailable, TokenBucket, is_limited
from tests.support.buffer_world import make_task

# A busy machine makes examples slowly.
patient = settings(suppress_health_check=[HealthCheck.too_slow])


@patient
@given(
    per_s=st.floats(0.1, 100.0),
    gaps_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40),
)
def test_no_window_has_more_calls_than_its_share(per_s: float, gaps_s: list[float]) -> None:
    """However the calls come: from the i-th to the j-th at most 1 + per_s * t begin within t seconds."""
    bucket = TokenBucket(per_s)
    begun_s = [now_s + bucket.take(now_s) for now_s in itertools.accumulate(gaps_s)]
    for first, last in itertools.combinations(range(len(begun_s)), 2):
        window_s = begun_s[last] - begun_s[first]
        assert window_s >= -1e-9
        assert last - first + 1 <= 1 + per_s * window_s + 1e-6


@patient
@given(per_s=st.floats(0.1, 100.0), num=st.integers(1, 30))
def test_calls_at_once_are_evenly_spaced(per_s: float, num: int) -> None:
    bucket = TokenBucket(per_s)
    assert [bucket.take(5.0) for _ in range(num)] == pytest.approx([one / per_s for one in range(num)])
    assert bucket.wait_s(5.0) == pytest.approx(num / per_s)
    assert bucket.wait_s(5.0 + num / per_s) == pytest.approx(0.0, abs=1e-9)


class Slow:
    """A reward whose first calls fail; it counts how many run at once."""

    counts = VerifierCounts()
    version = "1"

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.calls: list[tuple[int, int]] = []
        """Place of the first response, and number of responses."""
        self.num_running = self.most = 0

    def start(self) -> str:
        return "slow"

    def close(self) -> None:
        """Nothing to end."""

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        self.calls.append((first, len(responses)))
        fails = len(self.calls) <= self.num_failures
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.num_running -= 1
        if fails:
            raise ConnectionRefusedError("nobody listens")
        return tuple(Score(float(first + index), False) for index in range(len(responses)))


def limited(slow: Slow, section: RewardSection, *, num_replicas: int = 1) -> tuple[Score, ...]:
    responses = [Response("a", 1, FinishReason.STOP)] * 6
    reward = Limited(slow, section, num_replicas=num_replicas, longest_wait_s=1.0)
    return asyncio.run(reward.score(make_task(0), responses, 0))


def test_calls_at_once_are_bounded_and_every_scorer_has_its_share() -> None:
    slow = Slow()
    scores = limited(slow, MathReward(max_concurrent=4), num_replicas=2)
    assert slow.most == 2 and [score.value for score in scores] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_only_the_response_whose_call_has_failed_is_asked_for_again() -> None:
    slow = Slow(num_failures=2)
    assert len(limited(slow, MathReward(max_attempts=3))) == 6
    assert len(slow.calls) == 8
    with pytest.raises(ConnectionRefusedError):
        limited(Slow(num_failures=100), MathReward(max_attempts=3))


def test_a_reward_that_compares_gets_the_whole_group() -> None:
    slow = Slow()
    limited(slow, PythonReward(factory="a.b", scores=ScoredUnit.GROUP, max_concurrent=1))
    assert slow.calls == [(0, 6)]


def test_whose_turn_would_come_too_late_is_sent_away() -> None:
    with pytest.raises(RewardUnavailable, match=r"'math' is at its limit of max_per_s") as raised:
        limited(Slow(), MathReward(max_per_s=0.5))
    assert 1.0 < raised.value.retry_after_s <= 2.0


def test_without_limits_there_is_nothing_around_a_reward() -> None:
    assert not is_limited(MathReward(weight=2.0, name="m"))
    for fields in ({"max_concurrent": 1}, {"max_per_s": 1.0}, {"max_attempts": 2}):
        assert is_limited(MathReward(**fields))
