"""What a client is shown of a turn, and how what it hands back becomes our turn again.

The APIs have no place for a tool call that cannot be read, so it is shown as text after what the model says.
``Turn.message`` has no such text: a session remembers what it has shown, after which messages, and puts the
turn's own message where a client hands it back unchanged. Reasoning and the ids of calls may be dropped. What
was changed stays as the client has it.
"""

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, Message, ToolCall, checked_message, is_same_message
from forgeasync.environments.sessions.dialect import check_size, parse_json

MAX_READINGS = 1024
"""So many ways to read a history are followed where a client has dropped what sets turns apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A turn in the parts that every API has."""

    text: str
    """With the calls that cannot be read, each on a line of its own."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    num_as_text: int
    """Number of calls in ``text``."""


def shown(turn: Turn) -> Shown:
    """Return what a client is shown of a turn."""
    goes_back = [_can_come_back(call) for call in turn.tool_calls]
    calls = tuple(call for call, goes in zip(turn.tool_calls, goes_back, strict=True) if goes)
    odd = [
        # In ASCII, so that every client can send it back.
        json.dumps({"name": call.name, "arguments": call.arguments})
        for call, goes in zip(turn.tool_calls, goes_back, strict=True)
        if not goes
    ]
    as_text = [broken.text for broken in turn.broken_tool_calls] + odd
    text = "\n".join([turn.text] * bool(turn.text) + as_text)
    return Shown(text=text, reasoning=turn.reasoning, tool_calls=calls, num_as_text=len(as_text))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The messages before a turn, with our own in their places."""

    messages: tuple[Message, ...]
    digest: bytes
    num_ours: int
    """Number of turns that came back unchanged."""
    num_rewritten: int
    """Number of other messages of the model: changed, out of place, or written by someone else."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Remembered:
    shown: Message
    own: Message
    message: Message
    num_continued: int = 0
    """How many turns have been asked for after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Path:
    """One reading of the messages so far; the readings of a history share their beginnings."""

    digest: bytes
    before: "_Path | None" = None
    added: tuple[Message, ...] = ()
    num_ours: int = 0
    num_rewritten: int = 0
    last: _Remembered | None = None
    """The last turn of ours."""

    @property
    def num_continued(self) -> int:
        return self.last.num_continued if self.last is not None else 0

    @property
    def messages(self) -> tuple[Message, ...]:
        parts = []
        path: _Path | None = self
        while path is not None:
            parts.append(path.added)
            path = path.before
        return tuple(message for part in reversed(parts) for message in part)


class ShownTurns:
    """The turns that one session has shown; the oldest are forgotten beyond ``max_turns``.

    A turn that was forgotten is handed on as the client has it, which the agent recognises by itself unless a
    call was shown as text.
    """

    def __init__(self, *, max_turns: int) -> None:
        self._max_turns = max_turns
        self._num_turns = 0
        self._by_history: OrderedDict[bytes, list[_Remembered]] = OrderedDict()

    def history(self, messages: Sequence[Message]) -> History:
        """Put our own messages where the client has handed them back; each must be well formed.

        Where a client drops what sets two turns apart (their reasoning), its message can be either. Then what
        follows decides, and after that which of them has been gone on from the fewest times: parallel
        sub-agents that were told the same each get their own.
        """
        paths = [_Path(digest=b"")]
        # Readings are told apart at turns only. What stands between two of them is added at once, so that a
        # client cannot make work with many messages and many readings.
        between: list[Message] = []
        for message in messages:
            if message["role"] != ASSISTANT:
                between.append(message)
                continue
            paths = _each_with(paths, between)
            between = []
            found = self._ours(paths, message)
            if found:
                paths = sorted(found, key=lambda path: path.num_continued)[:MAX_READINGS]
            else:
                best = min(paths, key=lambda path: path.num_continued)
                (grown,) = _each_with([best], [message])
                paths = [dataclasses.replace(grown, num_rewritten=best.num_rewritten + 1)]
        path = min(_each_with(paths, between), key=lambda path: path.num_continued)
        if path.last is not None:
            path.last.num_continued += 1
        return History(
            messages=path.messages,
            digest=path.digest,
            num_ours=path.num_ours,
            num_rewritten=path.num_rewritten,
        )

    def remember(self, history: History, turn: Turn) -> None:
        """Remember what was shown of a turn that answers ``history``."""
        seen = shown(turn)
        message = {
            "role": ASSISTANT,
            "content": seen.text,
            "reasoning_content": seen.reasoning,
            "tool_calls": [call.message_form for call in seen.tool_calls],
        }
        remembered = _Remembered(
            shown=checked_message("a turn", message),
            own=checked_message("a turn", turn.message),
            message=turn.message,
        )
        self._by_history.setdefault(history.digest, []).append(remembered)
        self._by_history.move_to_end(history.digest)
        self._num_turns += 1
        while self._num_turns > self._max_turns:
            self._num_turns -= len(self._by_history.popitem(last=False)[1])

    def _ours(self, paths: Sequence[_Path], message: Message) -> list[_Path]:
        """The paths on which the message is a turn of ours, each with that turn."""
        theirs = checked_message("an assistant's message", message)
        found = []
        for path in paths:
            for one in self._by_history.get(path.digest, ()):
                if is_same_message(one.shown, theirs) or is_same_message(one.own, theirs):
                    (grown,) = _each_with([path], [one.message])
                    found.append(dataclasses.replace(grown, num_ours=path.num_ours + 1, last=one))
        return found


def _each_with(paths: Sequence[_Path], messages: Sequence[Message]) -> list[_Path]:
    """The paths, each gone on with these messages."""
    if not messages:
        return list(paths)
    encoded = hashlib.blake2b(json.dumps(messages, sort_keys=True).encode()).digest()
    return [
        dataclasses.replace(
            path,
            digest=hashlib.blake2b(path.digest + encoded).digest(),
            before=path,
            added=tuple(messages),
        )
        for path in paths
    ]


def _can_come_back(call: ToolCall) -> bool:
    """Whether a client can be given the call as JSON, and can hand it back.

    A model may write what Python reads and JSON has not (NaN), half of a surrogate pair, or more than a
    request may have.
    """
    try:
        check_size(call.arguments)
        # In UTF-8, which has no half of a surrogate pair.
        parse_json(json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        return False
    return True
