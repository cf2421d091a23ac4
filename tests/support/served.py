"""People and the service for them: real sessions over HTTP, real episodes, a model that says numbers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from forgeasync.config import EpisodesSection, ServingSection
from forgeasync.environments import (
    AgentRole,
    EpisodeAgent,
    Episodes,
    ServingSetup,
    SessionServer,
    TurnLimits,
    TurnRequest,
    UntrainedTurns,
    choose_renderer,
)
from forgeasync.plugins.serve import ServedSessions, WorkerSessions
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, FinishReason, SampledTurn
from forgeasync.testing import HandClock, ScriptedGenerator
from tests.support.buffer_world import make_task
from tests.support.episodes import AGENT, TOKENIZER, make_episodes
from tests.support.sessions import until

TOKEN = "a token that people have been given"
POLICY_AND_JUDGE = (AgentRole(name="policy", is_trainable=True), AgentRole(name="judge", is_trainable=False))


@dataclass
class Answer:
    """What the server said."""

    status: int
    body: Any
    headers: Any


async def _ask(http: aiohttp.ClientSession, method: str, url: str, key: str | None, body: Any) -> Answer:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    more = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with http.request(method, url, headers=headers, **more) as answer:
        return Answer(answer.status, await answer.json(), answer.headers)


@dataclass
class Person:
    """A client of one session."""

    http: aiohttp.ClientSession
    opened: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    async def post(
        self, path: str, body: Any = None, *, key: str | None = None, method: str = "POST"
    ) -> Answer:
        """``path`` is below the session; ``body`` is JSON, or bytes."""
        url, key = self.opened["anthropic_base_url"] + path, self.opened["api_key"] if key is None else key
        return await _ask(self.http, method, url, key, body)

    async def say(self, text: str) -> Answer:
        """Go on with the conversation."""
        self.messages.append({"role": "user", "content": text})
        answer = await self.post("/v1/chat/completions", {"model": "any", "messages": self.messages})
        if answer.status == 200:
            self.messages.append(answer.body["choices"][0]["message"])
        return answer


@dataclass
class ServedWorld:
    """One worker without its process."""

    server: SessionServer
    service: WorkerSessions
    episodes: Episodes
    http: aiohttp.ClientSession
    models: dict[EpisodeId, ScriptedGenerator] = field(default_factory=dict)
    untrained_prompts: list[list[int]] = field(default_factory=list)
    texts: Sequence[str] = ()
    """What the policy says, one after the other, in every session; numbers from 0 if empty."""
    judge_texts: Sequence[str] = ()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is closed no turn ends."""
    clock: HandClock = field(default_factory=HandClock)
    """The clock of all deadlines of episodes and sessions."""
    num_offered: int = 0
    num_asked: int = 0
    """Turns that the policy was asked for, in sessions that are trained on and in others."""

    def offer(self) -> "asyncio.Task[EpisodeOutcome]":
        """Begin an episode."""
        number = self.num_offered
        self.num_offered += 1
        return asyncio.ensure_future(
            self.episodes.run(
                make_task(number),
                EpisodeId(group_id=number, index=0),
                max_turn_tokens=10,
                sample=self.sample,
                keeps_record=True,
            )
        )

    async def until_offered(self, number: int) -> None:
        """Wait until so many episodes are on offer."""
        await self.until(lambda: self.service.report().num_on_offer == number)

    until = staticmethod(until)

    async def sample(self, episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        self.num_asked += 1
        await self.gate.wait()
        texts = (self.judge_texts if episode.agent else self.texts) or [str(one) for one in range(99)]
        model = self.models.setdefault(episode, ScriptedGenerator(TOKENIZER, texts))
        return await model(request)

    async def sample_untrained(
        self, prompt_ids: np.ndarray, max_tokens: int, stop: tuple[str, ...]
    ) -> SampledTurn:
        self.num_asked += 1
        await self.gate.wait()
        self.untrained_prompts.append(prompt_ids.tolist())
        said = ScriptedGenerator(TOKENIZER, ["ok"]).say()
        return SampledTurn(
            turn=0,
            ids_T=said.ids_T,
            text=said.text,
            finish_reason=FinishReason.STOP,
            first_version=3,
            version=3,
        )

    async def open(self, *, token: str | None = TOKEN, body: bytes = b"", method: str = "POST") -> Answer:
        """Ask for a session."""
        return await _ask(self.http, method, self.server.url + "/sessions", token, body)

    async def person(self) -> Person:
        """Somebody who has opened a session."""
        answer = await self.open()
        assert answer.status == 201, answer
        return Person(self.http, answer.body)


@contextlib.asynccontextmanager
async def served_world(
    environment: ServedSessions | None = None,
    *,
    section: ServingSection | None = None,
    episodes: EpisodesSection | None = None,
    limit_s: float = 20.0,
    roles: Sequence[AgentRole] = AGENT,
    **more: Any,
) -> AsyncIterator[ServedWorld]:
    """``more`` are fields of ``ServedWorld``."""
    environment, clock = environment or ServedSessions(), HandClock()
    setup = ServingSetup(section=section or ServingSection(), port=0, token=TOKEN)
    service = environment.open_service(setup, now_s=clock)
    running = make_episodes(
        environment,
        section=episodes,
        limit_s=limit_s,
        max_context_length=2000,
        roles=roles,
        now_s=clock,
        open_session=service.open_for,
    )
    async with service.server as server, aiohttp.ClientSession() as http:
        world = ServedWorld(server, service, running, http, clock=clock, **more)
        world.gate.set()
        limits = TurnLimits(max_turn_tokens=10, max_context_length=2000, max_turns=5)
        renderer = choose_renderer(TOKENIZER, chat_template=False).renderer
        service.connect(lambda: EpisodeAgent(UntrainedTurns(world.sample_untrained), renderer, limits))
        yield world
