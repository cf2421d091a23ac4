"""Agents and generators that say what a script says, and an episode that runs on them without a model."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from forgeasync.config import EpisodesSection
from forgeasync.environments import (
    AgentRole,
    BrokenToolCall,
    Environment,
    Episodes,
    Message,
    ToolCall,
    ToolSpec,
    Turn,
    TurnRequest,
    build_renderer,
    checked_messages,
)
from forgeasync.models import character_tokenizer
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, FinishReason, SampledTurn, Task, ToolStatus


class ScriptEnded(LookupError):
    """A turn was asked for after the last turn of the script."""


def scripted_turn(text: str = "", *calls: ToolCall, broken: Sequence[BrokenToolCall] = ()) -> Turn:
    """A turn of one token that says ``text`` and calls tools.

    ``broken`` are attempts at tool calls that cannot be read.
    """
    return Turn(
        text=text,
        num_prompt_tokens=1,
        num_tokens=1,
        finish_reason=FinishReason.STOP,
        tool_calls=calls,
        broken_tool_calls=tuple(broken),
    )


class ScriptedAgent:
    """An ``Agent`` whose turns you write. It keeps everything that your environment tells it.

        agent = ScriptedAgent("5", "4")
        score = asyncio.run(TryAgain().rollout(task, agent))
        assert score.value == 0.5 and len(agent.heard) == 2

    Nothing is tokenized and no deadline runs; ``run_episode`` has both.
    """

    def __init__(self, *turns: Turn | str, tool_limit_s: float = 300.0) -> None:
        """``turns`` are taken in order; ``tool_limit_s`` is what ``episodes.tool_s`` is in a run."""
        self._turns = [scripted_turn(turn) if isinstance(turn, str) else turn for turn in turns]
        self._num_turns = len(turns)
        self.tool_limit_s = tool_limit_s
        self.tool_calls: Counter[ToolStatus] = Counter()
        self.tool_calls_s: list[float] = []
        self.kept: dict[str, bytes | str] = {}
        """Files that the environment kept, by name."""
        self.heard: list[tuple[Message, ...]] = []
        """The messages of each call of ``respond``."""
        self.tools: list[tuple[ToolSpec, ...]] = []
        """The tools of each call of ``respond``."""
        self.stops: list[tuple[str, ...]] = []
        """The stop texts of each call of ``respond``."""

    @property
    def base_url(self) -> str:
        """No session is open: an agent with its own loop needs a run, see ``train_three_steps``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a scripted agent has no URL; test agents with their own loop in a run")

    anthropic_base_url = base_url
    api_key = base_url

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Take the next turn of the script.

        Raises:
            ScriptEnded: the script has no more turns.
            ValueError: a message is malformed, as with the agent of a run.
        """
        self.heard.append(checked_messages(messages))
        self.tools.append(tuple(tools or ()))
        self.stops.append(tuple(stop))
        if not self._turns:
            raise ScriptEnded(f"the script has {self._num_turns} turns, and one more was asked for")
        return self._turns.pop(0)

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Keep a file in ``kept``; nothing is written."""
        self.kept[name] = data
        return None

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        """Count a call of a tool in ``tool_calls`` and its time in ``tool_calls_s``."""
        self.tool_calls[status] += 1
        if took_s is not None:
            self.tool_calls_s.append(took_s)

    def waiting_for_person(self) -> AbstractContextManager[None]:
        """Nothing: no deadline runs."""
        return nullcontext()


class ScriptedGenerator:
    """Samples the texts of a script as the tokens of a tokenizer, and keeps the tokens of each path.

    It is called as a generator is: with the turn that is continued and the tokens to append before the new
    one. ``paths`` then has what a trainer would get.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, cut: bool = False
    ) -> None:
        """With ``cut`` every turn ends at its length limit, otherwise with the end token."""
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._num_texts = len(texts)
        self._cut = cut
        self.paths: list[list[int]] = []
        """All tokens up to and including each turn."""
        self.requests: list[TurnRequest] = []

    @property
    def ids(self) -> list[int]:
        """The tokens of the newest turn's path."""
        return self.paths[-1]

    @property
    def max_tokens(self) -> list[int]:
        """The token limits that the turns were asked for with."""
        return [request.max_tokens for request in self.requests]

    async def __call__(self, request: TurnRequest) -> SampledTurn | None:
        """Sample the next text of the script.

        Raises:
            ScriptEnded: the script has no more texts.
        """
        assert request.given_ids.dtype == np.int32
        self.requests.append(request)
        before = [] if request.after is None else self.paths[request.after]
        return self.say([*before, *request.given_ids.tolist()])

    def say(self, before: Sequence[int] = ()) -> SampledTurn:
        """Sample the next text after the tokens ``before``."""
        if not self._texts:
            raise ScriptEnded(f"the script has {self._num_texts} turns, and one more was asked for")
        text = self._texts.pop(0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self._cut:
            ids.append(self._tokenizer.eos_token_id)
        self.paths.append([*before, *ids])
        return SampledTurn(
            turn=len(self.paths) - 1,
            ids_T=np.asarray(ids, np.int32),
            text=text,
            finish_reason=FinishReason.LENGTH if self._cut else FinishReason.STOP,
            first_version=0,
            version=0,
        )


def run_episode(
    environment: Environment,
    task: Task,
    *texts: str,
    episodes: EpisodesSection | None = None,
    max_context_length: int = 4096,
    limit_s: float = 60.0,
) -> EpisodeOutcome:
    """Run one episode as a run does, on a model that says ``texts``.

    Deadlines, the limit of turns and the context length apply, and an exception of the environment becomes
    an ending. The tokenizer has one token per character and a ChatML template.

        outcome = run_episode(TryAgain(), task, "5", "4")
        assert outcome.ending == "completed" and outcome.agents[0].score.value == 0.5

    Args:
        episodes: The section ``episodes`` of a config; the defaults if None.
        max_context_length: Tokens that the conversation may have.
        limit_s: ``timeouts.episode_s`` in seconds.

    Raises:
        ScriptEnded: the environment asked for more turns than there are texts.
    """
    section = EpisodesSection() if episodes is None else episodes
    tokenizer = character_tokenizer(chat_template=True)
    generator = ScriptedGenerator(tokenizer, texts)
    runner = Episodes(
        environment,
        build_renderer(tokenizer, chat_template=True),
        name=type(environment).__name__,
        roles=[AgentRole(name="agent", is_trainable=True)],
        has_one_agent=True,
        max_context_length=max_context_length,
        section=section,
        limit_s=limit_s,
    )

    async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        return await generator(request)

    return asyncio.run(
        runner.run(
            task,
            EpisodeId(group_id=0, index=0),
            max_turn_tokens=max_context_length,
            sample=sample,
            keeps_record=True,
        )
    )
