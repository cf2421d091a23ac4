"""What an environment of your own is made of: one async method, and an agent in its hand."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forgeasync.rollouts.rollout import FinishReason
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task

Message = Mapping[str, str]
"""``{"role": "user", "content": "2 + 2 ="}``, as chat endpoints take it."""


class ContextFull(RuntimeError):
    """The conversation leaves no room for another turn in ``model.max_context_length``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model answered."""

    text: str
    """Without special tokens."""
    num_tokens: int
    finish_reason: FinishReason
    """``stop``: the model ended its turn; ``length``: it was cut at ``sampling.max_response_tokens`` or at
    the end of the context."""

    @property
    def message(self) -> dict[str, str]:
        """The turn as a message, to go on with."""
        return {"role": "assistant", "content": self.text}


class Agent(Protocol):
    """The model that is trained, as an environment sees it."""

    async def respond(self, messages: str | Sequence[Message]) -> Turn:
        """The model's next turn.

        ``messages`` are the whole conversation so far: what was given before, each turn of the model
        unchanged, and at the end at least one new message. A string is short for one user message, which
        begins a conversation.

        Raises:
            ContextFull: there is no room for another turn.
            ValueError: the messages do not continue the conversation; names the message.
        """
        ...


class Environment(ABC):
    """Has the model work on a task, and scores how it went. Derive from it and write ``rollout``.

    A complete one of two turns. It tells a model whose answer is wrong to try again:

        from forgeasync.environments.environment import Agent, Environment
        from forgeasync.rollouts.score import Score

        class TryAgain(Environment):
            def __init__(self, second_chance: float = 0.5) -> None:
                self.second_chance = second_chance

            async def rollout(self, task: Task, agent: Agent) -> Score:
                messages = [{"role": "user", "content": task.prompt}]
                turn = await agent.respond(messages)
                if turn.text.strip() == task.answer:
                    return Score(value=1.0, is_correct=True)
                messages += [turn.message, {"role": "user", "content": "Wrong, try again."}]
                turn = await agent.respond(messages)
                is_correct = turn.text.strip() == task.answer
                return Score(value=self.second_chance * is_correct, is_correct=is_correct)

    and its section in the config; ``options`` are the arguments of ``__init__``:

        environment:
          kind: python
          factory: my_package.my_module.TryAgain
          options: {second_chance: 0.25}

    ``rollout`` is called once for every rollout, many times at once on one object: keep what belongs to an
    episode in local variables. All episodes share one event loop, which a call that blocks would stop for
    all of them: await instead, with ``asyncio.to_thread`` where there is nothing to await. Nothing that the
    model wrote may be evaluated here.

    An episode that does not end within ``timeouts.episode_s`` or raises is not scored: its whole group is
    given up (``dropped/episode_failed``) and its task comes again. A ``ContextFull`` that ``rollout`` lets
    through is no failure: the episode counts as truncated, with score 0.
    """

    @abstractmethod
    async def rollout(self, task: Task, agent: Agent) -> Score:
        """One episode: talk to the agent, at least one turn, and return the score of the whole."""

    async def __call__(self, task: Task, agent: Agent) -> Score:
        """The same as ``rollout``."""
        return await self.rollout(task, agent)
