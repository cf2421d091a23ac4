"""The base class of environments of your own, and the agent that their one method talks to."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forgeasync.rollouts.rollout import FinishReason
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task

Message = Mapping[str, str]
"""A message in the format of chat endpoints: ``{"role": "user", "content": "2 + 2 ="}``."""


class ContextFull(RuntimeError):
    """The conversation leaves no room for another turn in ``model.max_context_length``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model."""

    text: str
    """The turn's text, without special tokens."""
    num_tokens: int
    finish_reason: FinishReason
    """``stop``: the model ended its turn; ``length``: it was cut at ``sampling.max_response_tokens`` or at
    the end of the context."""

    @property
    def message(self) -> dict[str, str]:
        """The turn as a message, to continue the conversation with."""
        return {"role": "assistant", "content": self.text}


class Agent(Protocol):
    """The model that is trained, as an environment sees it."""

    async def respond(self, messages: str | Sequence[Message]) -> Turn:
        """Sample the model's next turn.

        ``messages`` are the whole conversation so far: all earlier messages, each turn of the model
        unchanged, and at least one new message at the end. A string stands for one user message that begins
        a conversation.

        Raises:
            ContextFull: there is no room for another turn.
            ValueError: the messages do not continue the conversation; names the message.
        """
        ...


class Environment(ABC):
    """Lets the model work on a task and scores the episode. Derive from it and write ``rollout``.

    A complete example with two turns tells a model whose answer is wrong to try again:

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

    Its section in the config follows; ``options`` are the arguments of ``__init__``:

        environment:
          kind: python
          factory: my_package.my_module.TryAgain
          options: {second_chance: 0.25}

    ``rollout`` is called once for every rollout, many times concurrently on one object: keep the state of an
    episode in local variables. All episodes share one event loop, and a blocking call would stop all of them:
    await instead, and run blocking functions by ``asyncio.to_thread``. Never evaluate here what the model
    wrote.

    An episode that raises, or does not end within ``timeouts.episode_s``, is not scored: its whole group is
    given up (``dropped/episode_failed``) and its task is sampled again. A ``ContextFull`` that ``rollout``
    does not catch is no failure: the episode counts as truncated, with score 0.
    """

    @abstractmethod
    async def rollout(self, task: Task, agent: Agent) -> Score:
        """Run one episode: have the agent take at least one turn, and return the score of the episode."""

    async def __call__(self, task: Task, agent: Agent) -> Score:
        """Call ``rollout``."""
        return await self.rollout(task, agent)
