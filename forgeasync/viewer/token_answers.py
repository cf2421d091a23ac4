"""Values of single tokens as the page gets them."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgeasync.rollouts import RolloutKey
from forgeasync.viewer.run_reader import RunReader
from forgeasync.viewer.token_index import TokensGone

MAX_TOKENS = 2000
"""Most tokens of an answer."""

VALUES = ("mismatch", "ratio", "advantage", "entropy", "version", "kept", "logprob", "behavior")
"""Columns of a branch's line with a value for each trained token."""

Answer = dict[str, object]


def tokens_answer(run: RunReader, number: int, *, branch: int, skip: int) -> Answer:
    """Return ``MAX_TOKENS`` tokens of a rollout's branch from ``skip`` on, with a value or null for each.

    Raises:
        RolloutGone: there is no such rollout.
        TokensGone: its tokens have no values that can be read.
    """
    record = run.rollouts.read(run.run_dir.rollouts, number)
    step, key = record["step"], _key_of(record)
    branches = run.tokens.read_rollout(run.run_dir.tokens, step, key)["branches"]
    if not branch < len(branches):
        raise TokensGone(f"branch = {branch}; must be 0 to {len(branches) - 1}")
    try:
        page = _page(branches[branch], skip)
        worst = _worst_places(run, step, key, branches[branch]["branch"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TokensGone(f"the values of this rollout's tokens are damaged ({error!r})") from None
    return {
        "num_branches": len(branches),
        "branch": branch,
        "page_size": MAX_TOKENS,
        **page,
        "worst": [[place, rank] for place, rank in worst if skip <= place < skip + MAX_TOKENS],
    }


def _key_of(record: Mapping[str, Any]) -> RolloutKey:
    # Runs of earlier versions have neither episodes nor agents.
    return RolloutKey(
        group_id=record["group_id"], episode=record.get("episode", 0), agent=record.get("agent", 0)
    )


def _page(branch: Mapping[str, Any], skip: int) -> Answer:
    num_tokens = branch["num_tokens"]
    end = min(num_tokens, skip + MAX_TOKENS)
    places = [
        (index, position) for index, position in enumerate(branch["positions"]) if skip <= position < end
    ]
    layers = branch["disagreement"]

    def spread(column: Sequence[object]) -> list[object]:
        found: list[object] = [None] * max(0, end - skip)
        for index, position in places:
            found[position - skip] = column[index]
        return found

    numbers: list[object] = [None] * max(0, end - skip)
    if layers is not None:
        for index, position in places:
            numbers[position - skip] = "".join(layer[index] for layer in layers)
    pieces = branch["pieces"]
    return {
        "num_tokens": num_tokens,
        "skip": skip,
        "pieces": None if pieces is None else pieces[skip:end],
        "is_trained": spread([True] * len(branch["positions"])),
        "values": {name: spread(branch[name]) for name in VALUES},
        "num_layers": 0 if layers is None else len(layers),
        "disagreement": numbers,
    }


def _worst_places(run: RunReader, step: int, key: RolloutKey, branch: int) -> list[tuple[int, int]]:
    """Return which tokens of a branch are among the worst of the step, each with its rank from 1."""
    try:
        worst = run.tokens.read_worst(run.run_dir.tokens, step)
    except TokensGone:
        # The step's last line may not be written yet.
        return []
    return [
        (token["position"], rank)
        for rank, token in enumerate(worst, start=1)
        if _key_of(token) == key and token["branch"] == branch
    ]


def worst_answer(run: RunReader, step: int) -> Answer:
    """Return the worst tokens of a step, each with the number of its rollout if that was written."""
    try:
        worst = run.tokens.read_worst(run.run_dir.tokens, step)
    except TokensGone as error:
        return {"problem": str(error), "worst": []}
    wanted = {one.get("group_id") for one in worst}
    numbers = {
        (place.group, record.get("episode", 0), record.get("agent", 0)): place.number
        for place in run.rollouts.of_step(step)
        if place.group in wanted
        for record in [run.rollouts.read(run.run_dir.rollouts, place.number)]
    }
    return {
        "problem": None,
        "worst": [
            {**one, "rollout": numbers.get((one.get("group_id"), one.get("episode"), one.get("agent")))}
            for one in worst
        ],
    }
