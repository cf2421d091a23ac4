"""Groups and their rollouts as the page gets them."""

from collections.abc import Mapping
from typing import Any

from forgeasync.viewer.group_lives import GroupLife
from forgeasync.viewer.rollout_index import RolloutGone, RolloutPlace
from forgeasync.viewer.run_clock import RunClock
from forgeasync.viewer.run_reader import RunReader

MAX_ROLLOUTS = 200
"""Most rollouts of a group or a step that are listed."""


def life_answer(run: RunReader, clock: RunClock, life: GroupLife) -> dict[str, object]:
    """Return one group: what happened to it in order, each with the steps made by then and about when."""
    lives = run.ledger.lives
    started = "restored" if life.is_restored else "started"
    lines = [
        ("submitted", life.submitted_line),
        (started, life.started_line),
        ("sampled", life.sampled_line),
        ("scored", life.scored_line),
        (life.fate.word if life.undone_line is None else "ended", life.ended_line),
        ("undone", life.undone_line),
    ]
    return {
        "group": life.group,
        "prompt": life.prompt,
        "attempt": life.attempt,
        "fate": life.fate.word,
        "reason": None if life.reason is None else life.reason.value,
        "comes_again": life.comes_again,
        "step": life.step,
        "events": [
            {
                "what": what,
                "line": line,
                "num_steps_made": lives.step_before(line),
                "about_s": clock.about_s(line),
            }
            for what, line in lines
            if line is not None
        ],
    }


def rollout_row(run: RunReader, place: RolloutPlace) -> dict[str, object]:
    """Return what a list says of a rollout, or why it cannot be read."""
    where = {"number": place.number, "step": place.step, "group": place.group}
    try:
        record = run.rollouts.read(run.run_dir.rollouts, place.number)
    except RolloutGone as error:
        return {**where, "problem": str(error)}
    keys = ("episode", "agent", "reward", "is_correct", "response_tokens", "finish_reason", "version_spans")
    return {**where, **{key: record.get(key) for key in keys}}


def rollout_answer(run: RunReader, number: int) -> Mapping[str, object]:
    """Return a whole rollout: its line of rollouts.jsonl, and its response in parts.

    Raises:
        RolloutGone: it cannot be read.
    """
    record = run.rollouts.read(run.run_dir.rollouts, number)
    return {**record, "number": number, "response_parts": _response_parts(record)}


def _response_parts(record: Mapping[str, Any]) -> list[dict[str, object]] | None:
    """Cut a response where its steps end, each with its reward; None where it was not scored by steps."""
    response, steps = record.get("response"), record.get("steps")
    if not isinstance(response, str) or not isinstance(steps, list) or not steps:
        return None
    parts: list[dict[str, object]] = []
    start = 0
    for step in steps:
        match step:
            case [int(end), (int() | float() | None) as value] if start <= end <= len(response):
                parts.append({"text": response[start:end], "value": value})
                start = end
            case _:
                return None
    if start < len(response):
        parts.append({"text": response[start:], "value": None})
    return parts
