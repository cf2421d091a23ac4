"""The tree of conversations that one agent has in an episode: which turn do messages continue?

Messages come as whole conversations, from an environment or from a client that keeps its own history. They
continue the turn with the most messages that they begin with. Where they continue no turn, or not the last
turn of theirs, they begin another branch:

    the same messages again                     another answer to them; shares the turns before it
    a history with changed or removed messages  rewritten; shares the turns before the first change
    a conversation that nobody has had          a new root

The tree knows messages only. What an agent keeps of its turns (tokens, or facts for people) is a parameter.

Messages are found in a trie with an edge for every message. A client that drops the reasoning of its turns
can be at several places of the trie at once, so that a search follows all of them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, is_same_message, lookup_key

KeptT = TypeVar("KeptT")
"""What an agent keeps of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredMessages(Generic[KeptT]):
    """A turn of the tree."""

    messages: tuple[Message, ...]
    """The messages up to and including its own."""
    tools: tuple[ToolSpec, ...]
    after: "AnsweredMessages[KeptT] | None"
    """The turn that it follows; None at a root."""
    kept: KeptT
    number: int
    """Its place among all turns, in the order in which they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation(Generic[KeptT]):
    """Where messages continue the tree."""

    after: AnsweredMessages[KeptT] | None
    """The turn that they continue; None at a root."""
    is_rewritten: bool
    """Whether the messages come back to a conversation of this agent with another history than it had."""

    @property
    def num_known(self) -> int:
        """Number of messages, from the first one, that the path has."""
        return 0 if self.after is None else len(self.after.messages)


@dataclass(slots=True, eq=False)
class _Place(Generic[KeptT]):
    """A node of the trie: the message that leads to it, and what comes after it."""

    message: Message | None = None
    """None at the root."""
    following: "dict[Hashable, list[_Place[KeptT]]]" = field(default_factory=dict)
    """By ``lookup_key`` of their messages; those in one list differ in what clients may drop."""
    first_turns: dict[Hashable, AnsweredMessages[KeptT]] = field(default_factory=dict)
    """The earliest turn that ends here, for each set of tools."""


@dataclass(slots=True)
class ConversationTree(Generic[KeptT]):
    """All turns that an agent has taken in an episode."""

    _turns: list[AnsweredMessages[KeptT]] = field(default_factory=list)
    _root: _Place[KeptT] = field(default_factory=_Place)
    _by_answer: dict[Hashable, list[AnsweredMessages[KeptT]]] = field(default_factory=dict)
    """The turns by ``lookup_key`` of their own messages."""

    @property
    def num_turns(self) -> int:
        """Number of turns that the model has taken."""
        return len(self._turns)

    @property
    def turns(self) -> Sequence[AnsweredMessages[KeptT]]:
        """All turns, in the order in which they ended."""
        return self._turns

    @property
    def leaves(self) -> list[AnsweredMessages[KeptT]]:
        """The turns that no other follows, in the order in which they ended."""
        followed = {one.after.number for one in self._turns if one.after is not None}
        return [one for one in self._turns if one.number not in followed]

    def find(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Continuation[KeptT]:
        """Find the turn that checked ``messages`` continue: the longest path that they begin with.

        The earliest turn counts where several have said the same after the same messages. Tools are told at
        the beginning of a conversation: with others it is another one. Takes time in proportion to the
        messages and to the messages of the tree that differ from them only in what clients may drop.
        """
        toolset = _toolset(tools)
        longest: AnsweredMessages[KeptT] | None = None
        knows_beginning = False
        places = [self._root]
        for index, message in enumerate(messages):
            key = lookup_key(message)
            places = [
                one
                for place in places
                for one in place.following.get(key, ())
                if one.message is not None and is_same_message(one.message, message)
            ]
            if not places:
                break
            # Also with other tools. Examples at the beginning of a conversation are no turns of it.
            knows_beginning = True
            ended = [place.first_turns[toolset] for place in places if toolset in place.first_turns]
            if ended and index + 1 < len(messages):
                longest = min(ended, key=lambda one: one.number)
        num_known = 0 if longest is None else len(longest.messages)
        return Continuation(
            after=longest,
            is_rewritten=knows_beginning
            and any(message["role"] == ASSISTANT for message in messages[num_known:]),
        )

    def own_turns(self, messages: Sequence[Message]) -> dict[int, KeptT]:
        """Return what is kept of the turns that stand unchanged among ``messages``, by their indices.

        Each stands for one message only; where several say the same, the earliest comes first.
        """
        found: dict[int, KeptT] = {}
        left: dict[Hashable, list[AnsweredMessages[KeptT]]] = {}
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            key = lookup_key(message)
            if key not in left:
                left[key] = list(self._by_answer.get(key, ()))
            for place, one in enumerate(left[key]):
                if is_same_message(one.messages[-1], message):
                    found[index] = one.kept
                    del left[key][place]
                    break
        return found

    def add(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        kept: KeptT,
        *,
        after: AnsweredMessages[KeptT] | None,
    ) -> None:
        """Add a turn that has ended, given the messages up to and including its own."""
        turn = AnsweredMessages(
            messages=messages, tools=tools, after=after, kept=kept, number=len(self._turns)
        )
        self._turns.append(turn)
        place = self._root
        for message in messages:
            alike = place.following.setdefault(lookup_key(message), [])
            known = next((one for one in alike if one.message == message), None)
            if known is None:
                known = _Place(message=message)
                alike.append(known)
            place = known
        place.first_turns.setdefault(_toolset(tools), turn)
        self._by_answer.setdefault(lookup_key(messages[-1]), []).append(turn)


def _toolset(tools: Sequence[ToolSpec]) -> Hashable:
    return tuple(tool.lookup_key for tool in tools)
