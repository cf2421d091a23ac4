"""The tree of conversations with a model: which turns do messages hand back, and which one do they continue?

Messages come as whole conversations, from an environment or from a client that keeps its own history. They
continue the turn with the most messages that they begin with. Where they continue no turn, or not the last
turn of theirs, they begin another branch:

    the same messages again                     another answer to them; shares the turns before it
    a history with changed or removed messages  rewritten; shares the turns before the first change
    a conversation that nobody has had          a new root

The tree knows messages only. What an agent keeps of its turns (tokens, or facts for people) is a parameter.

Messages are found in a trie with an edge for every message. A client that drops the reasoning of its turns
can be at several places of the trie at once, so that a search follows all of them. It visits no place twice,
so that no history makes more work than the tree is large.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, is_same_message, lookup_key
from forgeasync.rollouts import FinishReason, VersionRange

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

    above: "_Place[KeptT] | None" = None
    """None at the root."""
    forms: list[Message] = field(default_factory=list)
    """The message, and then the other forms in which clients were shown it."""
    following: "dict[Hashable, list[_Place[KeptT]]]" = field(default_factory=dict)
    """By the ``lookup_key`` of each form; those in one list differ in what clients may drop."""
    first_turns: dict[Hashable, AnsweredMessages[KeptT]] = field(default_factory=dict)
    """The earliest turn that ends here, for each set of tools."""
    num_turns: int = 0
    """Number of turns that end here."""
    num_continued: int = 0
    """How often messages have continued a turn that ends here."""

    def show_as(self, form: Message) -> None:
        """Recognize the message in this form too."""
        if form not in self.forms:
            self.forms.append(form)
            assert self.above is not None, "the root has no message"
            alike = self.above.following.setdefault(lookup_key(form), [])
            if self not in alike:
                alike.append(self)


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
            places = _after(places, message)
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

    def turns_handed_back(
        self, messages: Sequence[Message], *, is_continued: bool = True
    ) -> dict[int, AnsweredMessages[KeptT]]:
        """Return the turns that stand in checked ``messages`` behind what they answered, by their indices.

        A message can be any of several turns where a client drops what sets them apart. Then what follows
        decides, and after that which of them has been continued least: parallel sub-agents that were told
        the same each get their own. ``is_continued`` says whether a turn
        will follow the last of them.
        """
        places = last = [self._root]
        for message in messages:
            places = _after(places, message)
            last = [one for one in places if one.num_turns] or last
        place: _Place[KeptT] | None = min(last, key=lambda one: one.num_continued)
        assert place is not None
        place.num_continued += is_continued
        path: list[_Place[KeptT]] = []
        while place is not None and place.above is not None:
            path.append(place)
            place = place.above
        return {
            index: next(iter(one.first_turns.values()))
            for index, one in enumerate(reversed(path))
            if one.num_turns
        }

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
        shown: Message | None = None,
    ) -> None:
        """Add a turn that has ended, given the checked messages up to and including its own.

        ``shown`` is its message in another form that a client was given.
        """
        number = self._turns[-1].number + 1 if self._turns else 0
        turn = AnsweredMessages(messages=messages, tools=tools, after=after, kept=kept, number=number)
        self._turns.append(turn)
        place = self._place_of(messages)
        place.first_turns.setdefault(_toolset(tools), turn)
        place.num_turns += 1
        if shown is not None:
            place.show_as(shown)
        self._by_answer.setdefault(lookup_key(messages[-1]), []).append(turn)

    def forget_oldest(self) -> None:
        """Forget the turn that ended first, and all messages that are in no other turn's conversation."""
        turn = self._turns.pop(0)
        self._by_answer[lookup_key(turn.messages[-1])].remove(turn)
        place = self._place_of(turn.messages)
        place.num_turns -= 1
        if not place.num_turns:
            place.first_turns.clear()
        while place.above is not None and not place.num_turns and not place.following:
            for key in set(map(lookup_key, place.forms)):
                place.above.following[key].remove(place)
                if not place.above.following[key]:
                    del place.above.following[key]
            place = place.above

    def _place_of(self, messages: Sequence[Message]) -> _Place[KeptT]:
        """The place to which exactly these messages lead; new ones are added."""
        place = self._root
        for message in messages:
            alike = place.following.get(lookup_key(message), ())
            known = next((one for one in alike if one.forms[0] == message), None)
            if known is None:
                known = _Place(above=place)
                known.show_as(message)
            place = known
        return place


def _after(places: Sequence[_Place[KeptT]], message: Message) -> list[_Place[KeptT]]:
    """The places after these to which a message leads."""
    key = lookup_key(message)
    return [
        one
        for place in places
        for one in place.following.get(key, ())
        if any(is_same_message(form, message) for form in one.forms)
    ]


def _toolset(tools: Sequence[ToolSpec]) -> Hashable:
    return tuple(tool.lookup_key for tool in tools)


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
    branches = []
    for leaf in tree.leaves:
        branch = [dict(message) for message in leaf.messages]
        turn: AnsweredMessages[KeptT] | None = leaf
        while turn is not None:
            branch[len(turn.messages) - 1] |= facts(turn.kept)
            turn = turn.after
        branches.append(branch)
    return branches
