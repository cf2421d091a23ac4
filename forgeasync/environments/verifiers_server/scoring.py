"""What the report of a Verifiers server says about an episode: its score, or why it has none."""

import math
from collections.abc import Iterable, Iterator

from forgeasync.config import is_part_name
from forgeasync.environments.environment import ContextFull, TooManyTurns
from forgeasync.environments.verifiers_server.wire import EpisodeReport, RecordedError, Trace, one_line
from forgeasync.rollouts import LARGEST, MAX_PARTS, Score

LEFT_OUT = "num_parts_left_out"
"""Part of a score: how many rewards and metrics of the server are not among its parts."""

_MAX_TOLD_ERRORS = 3


class EpisodeFailed(RuntimeError):
    """The server reports that its episode has failed; says how."""


def score_of(report: EpisodeReport, *, base_url: str, correct_at: float) -> Score:
    """Return the score of an episode whose turns were sampled at ``base_url``.

    The value is the sum of the rewards of its one trace that trains, each times its weight, as Verifiers
    computes it (``Trace.reward`` in verifiers/v1/trace.py). Rewards with their weights and metrics are parts.

    Raises:
        TooManyTurns, ContextFull: the session has refused another turn, and the episode failed of that.
        EpisodeFailed: it failed otherwise.
        ValueError: there is not one trace that trains, another agent's turns were sampled at ``base_url``,
            or the rewards are missing or make no finite number.
    """
    errors = [*report.errors, *(error for trace in report.traces for error in trace.errors)]
    if not report.ok:
        _raise_refused(errors)
        raise EpisodeFailed(f"the server's episode has failed: {_told(errors, report)}")
    trace = _trained_trace(report, base_url)
    rewards = {name: one.score * one.weight for name, one in trace.rewards.items() if one is not None}
    if not rewards:
        raise ValueError(
            "the server has given no reward: its task has no function marked as reward, or was not scored "
            f"(stop condition {trace.stop_condition!r})"
        )
    value = math.fsum(rewards.values()) if all(map(math.isfinite, rewards.values())) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"the server's rewards are {rewards}; must be finite"[:300])
    metrics = {name: one for name, one in trace.metrics.items() if one is not None}
    return Score(value, value >= correct_at, parts=_parts([*rewards.items(), *metrics.items()]))


def _raise_refused(errors: Iterable[RecordedError]) -> None:
    """Whatever raised in the end, an episode that our session stopped has ended because of that.

    The codes are those of our own session's answers, which the server's client quotes.
    """
    for error in errors:
        if '"too_many_turns"' in error.message:
            raise TooManyTurns("the session of the server has no turns left")
        if '"context_length_exceeded"' in error.message:
            raise ContextFull("the session of the server has no room for another turn")


def _trained_trace(report: EpisodeReport, base_url: str) -> Trace:
    trained = [trace for trace in report.traces if trace.is_trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent_name for trace in trained) or "none"
        raise ValueError(
            f"the episode has {len(trained)} traces that train ({names}); must have one, whose reward is the "
            "score"
        )
    for trace in report.traces:
        if not trace.is_trainable and trace.base_url == base_url and trace.num_calls:
            raise ValueError(
                f"agent {trace.agent_name!r}, which does not train, was sampled by the policy; give it a "
                "client of its own in the config of the server"
            )
    return trained[0]


def _parts(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Those that a score can have; the others are counted."""
    parts: dict[str, float] = {}
    num_left_out = 0
    for name, value in numbers:
        is_good = is_part_name(name) and name != LEFT_OUT and abs(value) <= LARGEST
        if not is_good or name in parts or len(parts) >= MAX_PARTS - 1:
            num_left_out += 1
            continue
        parts[name] = value
    return parts | ({LEFT_OUT: float(num_left_out)} if num_left_out else {})


def _told(errors: list[RecordedError], report: EpisodeReport) -> str:
    return "; ".join(_words(errors, report))


def _words(errors: list[RecordedError], report: EpisodeReport) -> Iterator[str]:
    for error in errors[-_MAX_TOLD_ERRORS:]:
        yield f"{error.type}: {one_line(error.message)}"
    if report.is_timeout:
        yield "a deadline of its own has passed"
    if not errors and not report.is_timeout:
        yield "it does not say why"
