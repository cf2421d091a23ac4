"""Agents of an episode, the files that they keep, and ``EpisodeAgent``, whose turns a generator samples."""

import contextlib
import dataclasses
import logging
import re
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgeasync.environments.conversation import (
    AnsweredMessages,
    ConversationTree,
    RecordedBranch,
    recorded_branches,
    turn_facts,
)
from forgeasync.environments.environment import (
    Agent,
    ContextFull,
    EpisodeCancelled,
    EpisodeOver,
    TooManyTurns,
    Turn,
)
from forgeasync.environments.messages import (
    Message,
    ToolSpec,
    checked_message,
    checked_messages,
    checked_tools,
)
from forgeasync.environments.rendering import (
    BridgeRefused,
    Conversation,
    MessageRenderer,
    call_opening,
    rendered_anew,
    without_reserved,
)
from forgeasync.environments.sessions.session import Session
from forgeasync.files import is_refusal
from forgeasync.rollouts import EpisodeId, SampledTurn, ToolStatus, VersionRange, spanned

MAX_FILES = 32
"""Maximum number of files that one attempt at an episode keeps."""

MAX_BYTES = 8 * 2**20
"""Maximum total bytes of the files that one attempt at an episode keeps."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


def artifact_folder_name(episode: EpisodeId) -> str:
    """Return the name of the folder of one attempt: ``<group>-<episode>-<attempt>``.

    Groups of evaluations have negative ids: group -1 is written as ``evaluation_1``.
    """
    group = str(episode.group_id) if episode.group_id >= 0 else f"evaluation_{-episode.group_id}"
    return f"{group}-{episode.index}-{episode.attempt}"


@dataclass(slots=True)
class EpisodeArtifacts:
    """The files of one attempt at an episode; all its agents share them."""

    folder: Path | None
    """Folder of the files; None if the episode is not recorded."""
    num_refused: int = 0
    """Number of files that were not written: too many, too large, or refused by the disk."""
    _sizes: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Write a file, or replace the file with this name; see ``Agent.keep``."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"name of an artifact = {name!r:.80}; must be 1 to 100 letters, digits, '_', '-' or '.', and "
                "not begin with '-' or '.'"
            )
        if not isinstance(data, bytes | str):
            raise ValueError(f"data of artifact {name!r} is {type(data).__name__}; must be bytes or a string")
        if self.folder is None:
            return None
        content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
        with self._lock:
            others = {other: size for other, size in self._sizes.items() if other != name}
            if len(others) >= MAX_FILES or sum(others.values()) + len(content) > MAX_BYTES:
                self.num_refused += 1
                return None
            file = self.folder / name
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            except OSError as error:
                if not is_refusal(error):
                    raise
                # A full disk is not a fault of the episode. Remove the incomplete file.
                with contextlib.suppress(OSError):
                    file.unlink()
                self._sizes.pop(name, None)
                self.num_refused += 1
                return None
            self._sizes[name] = len(content)
        return file

    @property
    def num_files(self) -> int:
        """Number of files written."""
        return len(self._sizes)

    @property
    def paths(self) -> list[str]:
        """Paths of the files, relative to the folder of the run."""
        if self.folder is None:
            return []
        return [f"{self.folder.parent.name}/{self.folder.name}/{name}" for name in self._sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """An agent of the environment, as the config describes it."""

    name: str
    is_trainable: bool


class Participant(Agent):
    """Base class of an episode's agents, with their counts for the outcome. Subclasses sample the turns."""

    def __init__(
        self,
        *,
        name: str,
        artifacts: EpisodeArtifacts | None,
        waiting: Callable[[], AbstractContextManager[None]],
        max_turns: int,
        tool_s: float,
    ) -> None:
        """Without ``artifacts`` no files are kept. ``waiting`` returns a context that stops all deadlines."""
        self.name = name
        self._artifacts = EpisodeArtifacts(folder=None) if artifacts is None else artifacts
        self._waiting = waiting
        self._max_turns = max_turns
        self._tool_s = tool_s
        self._num_begun = 0
        self._is_closed = False
        self.counts: Counter[str] = Counter()
        """Counts of turns and tool calls, by their names in metrics.jsonl."""
        self.tool_calls_s: list[float] = []
        """Durations of tool calls in seconds, except calls that ran no tool."""
        self.has_given_url = False
        """Whether the environment has the URL of an endpoint, which may sample turns that are not counted."""
        self.has_hit_length = False
        """Whether the context had no room for another turn."""
        self.has_hit_max_turns = False
        self.failure: Exception | None = None
        """Exception that prevented the sampling of a turn, even if the environment caught it.

        ``EpisodeInterrupted`` and ``EpisodeCancelled`` end the episode, any other exception ends the run.
        """

    @property
    def tool_limit_s(self) -> float:
        """See ``Agent``."""
        return self._tool_s

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        """See ``Agent``."""
        self.counts[f"episode/num_tool_calls_{status}"] += 1
        if took_s is not None:
            self.tool_calls_s.append(took_s)

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """See ``Agent``."""
        return self._artifacts.keep(name, data)

    def waiting_for_person(self) -> AbstractContextManager[None]:
        """See ``Agent``."""
        return self._waiting()

    @property
    @abstractmethod
    def num_turns(self) -> int:
        """Number of turns of the model so far."""

    @property
    def session_counts(self) -> Mapping[str, int]:
        """Counts of the agent's session; empty if it had none."""
        return {}

    @property
    def versions(self) -> VersionRange | None:
        """Policy versions that sampled the turns; None without turns, or if an endpoint samples them."""
        return None

    @abstractmethod
    def branches(self) -> list[RecordedBranch]:
        """Return all conversations of the agent, for the record of the episode."""

    def close(self) -> None:
        """Refuse further turns."""
        self._is_closed = True

    async def leave(self) -> None:
        """Release resources of the episode's event loop; called on that loop."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise EpisodeOver("the agent was called after the episode had ended; call it within rollout only")

    def _checked(
        self, messages: str | Sequence[Message], tools: Sequence[ToolSpec] | None, max_tokens: int | None
    ) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
        """Check the arguments of ``respond``; return the messages and the tools."""
        self._check_open()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}; must be at least 1")
        return checked_messages(messages), checked_tools(tools)

    def _check_turns(self) -> None:
        if self._num_begun >= self._max_turns:
            self.has_hit_max_turns = True
            raise TooManyTurns(f"the model has taken {self._num_begun} turns, which is episodes.max_turns")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for the next turn of an episode."""

    after: int | None
    """Number of the turn that is continued; None if this turn starts a path."""
    given_ids: np.ndarray
    """Token ids to append before the turn, int32."""
    max_tokens: int
    stop: tuple[str, ...]
    """Texts that end the turn, in addition to those of the run."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context to enter while no generator is available; it stops the episode's deadlines."""


SampleTurn = Callable[[TurnRequest], Awaitable[SampledTurn | None]]
"""Samples a turn. Returns None if the episode or its group was abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits on the turns of an agent and on its tool calls."""

    max_turn_tokens: int
    max_context_length: int
    max_turns: int
    tool_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPath:
    """A turn as its generator stores it, and the conversation up to and including it."""

    turn: SampledTurn
    """The turn without the tokens that were given to force a call."""
    conversation: Conversation
    """The conversation. Its last turn includes the tokens that were given to force a call."""

    @property
    def said(self) -> SampledTurn:
        """The turn with all tokens of its message, including those that were given to force a call."""
        return self.conversation.turns[len(self.conversation.messages) - 1]


_NO_PATH = Conversation(turns={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """The tokens before a turn: the path that it continues, and the tokens that are appended to it."""

    after: AnsweredMessages[SampledPath] | None
    added_ids: np.ndarray
    """int32."""
    opening_ids: np.ndarray
    """The beginning of a forced call, int32."""
    num_reserved: int
    num_rewritten: int = 0
    num_from_text: int = 0

    @property
    def before(self) -> Conversation:
        return _NO_PATH if self.after is None else self.after.kept.conversation

    @property
    def num_tokens(self) -> int:
        return len(self.before.token_ids) + len(self.added_ids) + len(self.opening_ids)


class EpisodeAgent(Participant):
    """An ``Agent`` whose turns a generator samples. Calls may overlap and come from any event loop."""

    def __init__(
        self,
        sample: SampleTurn,
        renderer: MessageRenderer,
        limits: TurnLimits,
        *,
        name: str = "agent",
        open_session: "Callable[[EpisodeAgent], Session] | None" = None,
        artifacts: EpisodeArtifacts | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``open_session`` opens the session when its URL or key is first used. See ``Participant``."""
        super().__init__(
            name=name,
            artifacts=artifacts,
            waiting=waiting,
            max_turns=limits.max_turns,
            tool_s=limits.tool_s,
        )
        self._sample = sample
        self._renderer = renderer
        self._limits = limits
        self._open_session = open_session
        self._session: Session | None = None
        self._tree: ConversationTree[SampledPath] = ConversationTree()

    @property
    def num_turns(self) -> int:
        """See ``Participant``."""
        return self._tree.num_turns

    @property
    def turns(self) -> Sequence[AnsweredMessages[SampledPath]]:
        """All turns with the messages before them, in the order in which they ended."""
        return self._tree.turns

    @property
    def base_url(self) -> str:
        """See ``Agent``."""
        return self._opened().base_url

    @property
    def anthropic_base_url(self) -> str:
        """See ``Agent``."""
        return self._opened().anthropic_base_url

    @property
    def api_key(self) -> str:
        """See ``Agent``."""
        return self._opened().api_key

    @property
    def session_counts(self) -> Mapping[str, int]:
        """See ``Participant``."""
        return {} if self._session is None else dataclasses.asdict(self._session.counts)

    def _opened(self) -> Session:
        self._check_open()
        if self._session is None:
            assert self._open_session is not None, "workers have a server of sessions"
            self._session = self._open_session(self)
        return self._session

    @property
    def versions(self) -> VersionRange | None:
        """See ``Participant``."""
        return spanned(one.kept.turn.versions for one in self._tree.turns)

    def branches(self) -> list[RecordedBranch]:
        """See ``Participant``."""
        return recorded_branches(self._tree, _facts)

    def close(self) -> None:
        """See ``Participant``."""
        super().close()
        if self._session is not None:
            self._session.close()

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        must_call: Sequence[ToolSpec] = (),
    ) -> Turn:
        """See ``Agent``.

        With ``must_call``, the turn begins with a call of one of these tools: the first tokens of such a call
        are part of the prompt, and the model samples the rest.

        Raises:
            EpisodeOver: The episode has ended.
            TooManyTurns: The agent has had ``episodes.max_turns`` turns.
            NoCallOpening: The model's format does not let a turn begin with such a call.
        """
        checked, specs = self._checked(messages, tools, max_tokens)
        prompt = self._prompt(checked, specs, must_call)
        self.counts["episode/num_reserved_texts"] += prompt.num_reserved
        self.counts["episode/num_rewritten_histories"] += prompt.num_rewritten
        self.counts["episode/num_turns_from_text"] += prompt.num_from_text
        num_before = prompt.num_tokens
        if not num_before:
            raise ValueError(f"messages[{len(checked) - 1}] has no tokens; a prompt must have at least one")
        limits = self._limits
        self._check_turns()
        if num_before >= limits.max_context_length:
            self.has_hit_length = True
            raise ContextFull(
                f"the conversation has {num_before} tokens before turn {self.num_turns + 1} of the model; "
                f"model.max_context_length = {limits.max_context_length} leaves no room for it"
            )
        bounds = [limits.max_turn_tokens, limits.max_context_length - num_before]
        if max_tokens is not None:
            bounds.append(max_tokens)
        self._num_begun += 1
        request = TurnRequest(
            after=None if prompt.after is None else prompt.after.kept.turn.turn,
            given_ids=np.concatenate([prompt.added_ids, prompt.opening_ids]),
            max_tokens=min(bounds),
            stop=tuple(stop),
            waiting=self._waiting,
        )
        turn = await self._sampled(request)
        said = turn
        if len(prompt.opening_ids):
            said = dataclasses.replace(
                turn,
                ids_T=np.concatenate([prompt.opening_ids, turn.ids_T]),
                text=self._renderer.text_of(prompt.opening_ids.tolist()) + turn.text,
            )
        path_ids = [*prompt.before.token_ids, *prompt.added_ids.tolist()]
        # Tokens that were given to force a call are part of the prompt.
        answer = dataclasses.replace(
            self._renderer.parse(path_ids, said, specs),
            num_prompt_tokens=num_before,
            num_tokens=turn.num_tokens,
        )
        conversation = Conversation(
            messages=(*checked, checked_message("turn", answer.message)),
            turns={**prompt.before.turns, len(checked): said},
            token_ids=[*path_ids, *said.ids_T.tolist()],
        )
        self.counts["episode/num_faulty_tool_calls"] += len(answer.broken_tool_calls)
        kept = SampledPath(turn=turn, conversation=conversation)
        self._tree.add(conversation.messages, specs, kept, after=prompt.after)
        return answer

    def num_prompt_tokens(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        must_call: Sequence[ToolSpec] = (),
    ) -> int:
        """Return the number of prompt tokens that ``respond`` would have, without sampling.

        Raises:
            EpisodeOver: The episode has ended.
            NoCallOpening: See ``respond``.
        """
        return self._prompt(*self._checked(messages, tools, None), must_call).num_tokens

    def _prompt(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], must_call: Sequence[ToolSpec]
    ) -> _Prompt:
        opening_ids = call_opening(self._renderer, must_call) if must_call else np.zeros(0, np.int32)
        found = self._tree.find(messages, tools)
        reserved = self._renderer.reserved
        # Reserved texts in earlier messages are counted already.
        earlier, _ = without_reserved(messages[: found.num_known], reserved)
        new, num_reserved = without_reserved(messages[found.num_known :], reserved)
        messages = earlier + new
        before = _NO_PATH if found.after is None else found.after.kept.conversation
        if not found.is_rewritten:
            try:
                added_ids = self._renderer.added_ids(before, messages, tools)
                return _Prompt(
                    after=found.after,
                    added_ids=added_ids,
                    opening_ids=opening_ids,
                    num_reserved=num_reserved,
                )
            except BridgeRefused as error:
                logger.info("a conversation is rendered again from the start: %s", error)
        own_turns = {index: kept.said for index, kept in self._tree.own_turns(messages).items()}
        anew = rendered_anew(self._renderer, messages, own_turns, tools)
        path = np.asarray(before.token_ids, np.int32)
        # If the new tokens begin with the tokens of the path, the turns before the change are shared.
        is_shared = len(path) > 0 and np.array_equal(anew.ids_S[: len(path)], path)
        return _Prompt(
            after=found.after if is_shared else None,
            added_ids=anew.ids_S[len(path) :] if is_shared else anew.ids_S,
            opening_ids=opening_ids,
            num_reserved=num_reserved,
            num_rewritten=1,
            num_from_text=anew.num_from_text,
        )

    async def _sampled(self, request: TurnRequest) -> SampledTurn:
        try:
            turn = await self._sample(request)
        except Exception as error:
            self.failure = error
            self.close()
            raise
        if turn is None:
            self.failure = EpisodeCancelled()
            self.close()
            raise EpisodeOver("the group of the episode was given up")
        return turn


def _facts(kept: SampledPath) -> dict[str, Any]:
    turn = kept.turn
    return turn_facts(versions=turn.versions, num_tokens=turn.num_tokens, finish_reason=turn.finish_reason)
