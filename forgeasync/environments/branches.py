"""Conversations of an agent as people read them: a branch is a path to a turn that no other follows."""

from collections.abc import Callable, Mapping
from typing import Any

from forgeasync.environments.conversation import AnsweredMessages, ConversationTree, KeptT
from forgeasync.rollouts import FinishReason, VersionRange

RecordedBranch = list[dict[str, Any]]
"""Messages as JSON values; those that the model said have the facts of their turn besides."""


def turn_facts(
    *, versions: VersionRange | None, num_tokens: int, finish_reason: FinishReason
) -> dict[str, Any]:
    """Return what a recorded message says of its turn; ``versions`` is None for models of others."""
    facts: dict[str, Any] = {}
    if versions is not None:
        facts |= {"first_version": versions.first, "version": versions.last}
    return facts | {"num_tokens": num_tokens, "finish_reason": finish_reason.value}


def recorded_branches(
    tree: ConversationTree[KeptT], facts: Callable[[KeptT], Mapping[str, Any]]
) -> list[RecordedBranch]:
    """Return all branches of an agent; ``facts`` says what a message tells of its turn."""
    return [_branch(leaf, facts) for leaf in tree.leaves]


def _branch(leaf: AnsweredMessages[KeptT], facts: Callable[[KeptT], Mapping[str, Any]]) -> RecordedBranch:
    branch = [dict(message) for message in leaf.messages]
    turn: AnsweredMessages[KeptT] | None = leaf
    while turn is not None:
        branch[len(turn.messages) - 1] |= facts(turn.kept)
        turn = turn.after
    return branch
