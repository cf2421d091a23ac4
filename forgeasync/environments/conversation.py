"""The tree of conversations with a model. It finds the turn that messages continue, and turns among messages.

An environment, or a client that keeps its own history, passes the whole conversation each time. The messages
continue the turn with the longest history with which they begin. If there is no such turn, or later turns
follow it, the messages start another branch:

    the same messages again                     another answer; shares the turns before it
    a history with changed or removed messages  rewritten; shares the turns before the first change
    an unknown conversation                     a new root

The tree itself needs only messages. The data that an agent keeps with each turn (tokens, or facts for people)
is a type parameter.

Messages are stored in a trie with an edge per message. If a client drops reasoning, its history can match
several nodes of the trie, so a search follows all of them. A search visits each node at most once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, is_same_message, lookup_key
from forgeasync.rollouts import FinishReason, VersionRange

KeptT = TypeVar("KeptT")
"""Data that an agent keeps with a turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredMessages(Generic[KeptT]):
    """A turn of the tree."""

    messages: tuple[Message, ...]
    """The messages up to and including the turn's own message."""
    tools: tuple[ToolSpec, ...]
    after: "AnsweredMessages[KeptT] | None"
    """The turn that this turn follows; None at a root."""
    kept: KeptT
    number: int
    """Index of the turn among all turns, in the order in which they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation(Generic[KeptT]):
    """Where messages continue the tree."""

    after: AnsweredMessages[KeptT] | None
    """The turn that the messages continue; None at a root."""
    is_rewritten: bool
    """Whether the messages are a conversation of this agent whose history was changed."""

    @property
    def num_known(self) -> int:
        """Number of messages at the beginning that the path has already."""
        return 0 if self.after is None else len(self.after.messages)


@dataclass(slots=True, eq=False)
class _Node(Generic[KeptT]):
    """A node of the trie: the message that leads to it, and what comes after it."""

    parent: "_Node[KeptT] | None" = None
    """The parent node; None at the root."""
    forms: list[Message] = field(default_factory=list)
    """The message, followed by the other forms in which it was shown to clients."""
    children: "dict[Hashable, list[_Node[KeptT]]]" = field(default_factory=dict)
    """Child nodes by ``lookup_key`` of each form. Nodes in one list differ only in what clients may drop."""
    first_turns: dict[Hashable, AnsweredMessages[KeptT]] = field(default_factory=dict)
    """The earliest turn that ends here, for each set of tools."""
    num_turns: int = 0
    """Number of turns that end here."""
    num_continued: int = 0
    """Number of times that messages continued a turn that ends here."""

    def show_as(self, form: Message) -> None:
        """Also recognize the message in this form."""
        if form not in self.forms:
            self.forms.append(form)
            assert self.parent is not None, "the root has no message"
            alike = self.parent.children.setdefault(lookup_key(form), [])
            if self not in alike:
                alike.append(self)


@dataclass(slots=True)
class ConversationTree(Generic[KeptT]):
    """All turns of an agent in an episode."""

    _turns: list[AnsweredMessages[KeptT]] = field(default_factory=list)
    _root: _Node[KeptT] = field(default_factory=_Node)
    _by_answer: dict[Hashable, list[AnsweredMessages[KeptT]]] = field(default_factory=dict)
    """The turns by ``lookup_key`` of the message that each one added."""

    @property
    def num_turns(self) -> int:
        """Number of turns in the tree."""
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
        """Find the turn that checked ``messages`` continue: the longest path with which they begin.

        If several turns have the same message after the same messages, the earliest one is used. A
        conversation with other tools is another conversation, because tools are part of its first tokens. The
        time is proportional to the number of messages, and to the number of messages in the tree that differ
        from them only in fields that clients may drop.
        """
        toolset = _toolset(tools)
        longest: AnsweredMessages[KeptT] | None = None
        knows_beginning = False
        nodes = [self._root]
        for index, message in enumerate(messages):
            nodes = _after(nodes, message)
            if not nodes:
                break
            # This holds with any tools. After an unknown beginning, assistant messages are only examples.
            knows_beginning = True
            ended = [node.first_turns[toolset] for node in nodes if toolset in node.first_turns]
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
        """Return the turns among checked ``messages`` that follow the messages they answered, by index.

        If a client drops the fields that distinguish turns, a message can match several turns. Then the
        following messages decide, and after them the turn that was continued least often is used: parallel
        sub-agents with the same answer each continue their own turn. ``is_continued`` says whether a turn
        will follow these messages.
        """
        nodes = last = [self._root]
        for message in messages:
            nodes = _after(nodes, message)
            last = [one for one in nodes if one.num_turns] or last
        node: _Node[KeptT] | None = min(last, key=lambda one: one.num_continued)
        assert node is not None
        node.num_continued += is_continued
        path: list[_Node[KeptT]] = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return {
            index: next(iter(one.first_turns.values()))
            for index, one in enumerate(reversed(path))
            if one.num_turns
        }

    def own_turns(self, messages: Sequence[Message]) -> dict[int, KeptT]:
        """Return the data kept with the turns that are unchanged among ``messages``, by message index.

        Each turn matches only one message. Of several turns with the same message, the earliest is used
        first.
        """
        found: dict[int, KeptT] = {}
        left: dict[Hashable, list[AnsweredMessages[KeptT]]] = {}
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            key = lookup_key(message)
            if key not in left:
                left[key] = list(self._by_answer.get(key, ()))
            for position, one in enumerate(left[key]):
                if is_same_message(one.messages[-1], message):
                    found[index] = one.kept
                    del left[key][position]
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
        """Add a turn that has ended; ``messages`` are checked and include the turn's own message.

        ``shown`` is that message in the form that the client got, if that is different.
        """
        number = self._turns[-1].number + 1 if self._turns else 0
        turn = AnsweredMessages(messages=messages, tools=tools, after=after, kept=kept, number=number)
        self._turns.append(turn)
        node = self._node_of(messages)
        node.first_turns.setdefault(_toolset(tools), turn)
        node.num_turns += 1
        if shown is not None:
            node.show_as(shown)
        self._by_answer.setdefault(lookup_key(messages[-1]), []).append(turn)

    def forget_oldest(self) -> None:
        """Remove the turn that ended first, and all messages that no other turn needs."""
        turn = self._turns.pop(0)
        self._by_answer[lookup_key(turn.messages[-1])].remove(turn)
        node = self._node_of(turn.messages)
        node.num_turns -= 1
        if not node.num_turns:
            node.first_turns.clear()
        while node.parent is not None and not node.num_turns and not node.children:
            for key in set(map(lookup_key, node.forms)):
                node.parent.children[key].remove(node)
                if not node.parent.children[key]:
                    del node.parent.children[key]
            node = node.parent

    def _node_of(self, messages: Sequence[Message]) -> _Node[KeptT]:
        """Return the node of exactly these messages; add it if it is missing."""
        node = self._root
        for message in messages:
            alike = node.children.get(lookup_key(message), ())
            known = next((one for one in alike if one.forms[0] == message), None)
            if known is None:
                known = _Node(parent=node)
                known.show_as(message)
            node = known
        return node


def _after(nodes: Sequence[_Node[KeptT]], message: Message) -> list[_Node[KeptT]]:
    """Return the child nodes that match a message."""
    key = lookup_key(message)
    return [
        one
        for node in nodes
        for one in node.children.get(key, ())
        if any(is_same_message(form, message) for form in one.forms)
    ]


def _toolset(tools: Sequence[ToolSpec]) -> Hashable:
    return tuple(tool.lookup_key for tool in tools)


RecordedBranch = list[dict[str, Any]]
"""Messages as JSON values. Messages of the model also have the facts of their turn."""


def turn_facts(
    *, versions: VersionRange | None, num_tokens: int, finish_reason: FinishReason
) -> dict[str, Any]:
    """Return the facts of a turn for its recorded message; ``versions`` is None if an endpoint sampled it."""
    facts: dict[str, Any] = {}
    if versions is not None:
        facts |= {"first_version": versions.first, "version": versions.last}
    return facts | {"num_tokens": num_tokens, "finish_reason": finish_reason.value}


def recorded_branches(
    tree: ConversationTree[KeptT], facts: Callable[[KeptT], Mapping[str, Any]]
) -> list[RecordedBranch]:
    """Return all branches of an agent; ``facts`` returns the facts of a turn."""
    branches = []
    for leaf in tree.leaves:
        branch = [dict(message) for message in leaf.messages]
        turn: AnsweredMessages[KeptT] | None = leaf
        while turn is not None:
            branch[len(turn.messages) - 1] |= facts(turn.kept)
            turn = turn.after
        branches.append(branch)
    return branches
