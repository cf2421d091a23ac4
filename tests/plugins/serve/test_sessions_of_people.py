"""People open sessions by themselves; each is an episode, or is served without being trained on."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from forgeasync.config import Ending, EpisodesSection, ScoreSource, ServingSection
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
from forgeasync.plugins.serve import EndedSession, ServedSessions, WorkerSessions
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, FinishReason, SampledTurn, Score
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


Episode = asyncio.Task[EpisodeOutcome]
ENDED_BY_FEEDBACK = {"num_opened": 1, "num_ended_feedback": 1, "num_feedback": 1}
HURRIED = EpisodesSection(setup_s=0.1, step_s=0.1)


def counts(world: ServedWorld) -> dict[str, float]:
    """All that is not 0."""
    return {name: number for name, number in world.service.report().counts.items() if number}


async def begun(world: ServedWorld, number: int = 1) -> tuple[list[Episode], list[Person]]:
    """Episodes on offer, and somebody in the session of each."""
    episodes = [world.offer() for _ in range(number)]
    await world.until_offered(number)
    return episodes, [await world.person() for _ in range(number)]


def check_over(answer: Answer, why: str) -> None:
    assert answer.status == 410 and why in answer.body["error"]["message"]


async def test_a_session_is_an_episode_and_its_feedback_the_score() -> None:
    """With the unmodified SDK. No deadline runs while a person is waited for."""
    async with served_world(episodes=HURRIED, limit_s=0.2) as world:
        episode = world.offer()
        await world.until_offered(1)
        world.clock.advance(50.0)
        person = await world.person()
        assert person.opened["trains"]
        given = {name: person.opened[name] for name in ("base_url", "api_key")}
        async with openai.AsyncOpenAI(**given) as client:
            messages = [{"role": "user", "content": "1 + 2 ="}]
            first = await client.chat.completions.create(model="any", messages=messages)
            messages.append({"role": "assistant", "content": first.choices[0].message.content})
            messages.append({"role": "user", "content": "sure?"})
            world.clock.advance(7.0)
            second = await client.chat.completions.create(model="any", messages=messages)
            assert [one.choices[0].message.content for one in (first, second)] == ["0", "1"]
        assert not episode.done()
        answer = await person.post("/feedback", {"score": 0.75, "comment": "fine"})
        assert (answer.status, answer.body["finished"]) == (200, True)
        outcome = await episode
        assert (outcome.ending, outcome.num_turns) == (Ending.COMPLETED, 2)
        assert outcome.agents[0].score == Score(0.75, True)
        assert outcome.counts["episode/num_rewritten_histories"] == 0
        assert outcome.counts["session/num_requests"] == 2
        assert outcome.episode_s == 7.0, "an offer takes no time of the episode"
        expected = ENDED_BY_FEEDBACK | {"feedback_sum": 0.75, "num_scored_by_feedback": 1}
        assert counts(world) == expected
        report = world.service.report()
        assert (report.num_open, report.num_on_offer) == (0, 0)
        assert report.turn_p50_s == report.turn_p99_s == 0.0


async def test_deadlines_go_on_when_nobody_is_waited_for() -> None:
    judging = threading.Event()

    class Slow(ServedSessions):
        async def verdict(self, session: EndedSession) -> Score | None:
            judging.set()
            await asyncio.Event().wait()
            raise AssertionError("nothing ends the wait")

    section = ServingSection(score_from=(ScoreSource.ENVIRONMENT,))
    async with served_world(Slow(), section=section, episodes=HURRIED) as world:
        (episode,), (person,) = await begun(world)
        await person.say("1 + 2 =")
        await person.post("", method="DELETE")
        await world.until(judging.is_set)
        world.clock.advance(0.2)
        outcome = await episode
        assert outcome.ending is Ending.TIMEOUT and "step_s" in outcome.problem


async def test_without_an_episode_on_offer_a_session_is_served_all_the_same() -> None:
    async with served_world() as world:
        person = await world.person()
        assert not person.opened["trains"]
        for text in ("one", "two"):
            assert (await person.say(text)).body["choices"][0]["message"]["content"] == "ok"
        first, second = world.untrained_prompts
        assert second[: len(first)] == first and len(second) > len(first) + 3, "the whole path"
        assert (await person.post("/feedback", {"score": -1})).status == 200
        assert (await person.say("three")).status == 410
        await world.until(lambda: not world.service.report().num_open)
        assert counts(world) == ENDED_BY_FEEDBACK | {"feedback_sum": -1, "num_untrained_no_ticket": 1}


async def test_offers_are_taken_in_order_and_those_given_up_are_left_out() -> None:
    async with served_world() as world:
        episodes = []
        for number in range(3):
            episodes.append(world.offer())
            await world.until_offered(number + 1)
        episodes[0].cancel()
        await world.until_offered(2)
        people = [await world.person() for _ in range(3)]
        assert [one.opened["trains"] for one in people] == [True, True, False]
        for score, person in enumerate(people[:2]):
            await person.say("hello")
            await person.post("/feedback", {"score": score})
        outcomes = await asyncio.gather(*episodes[1:])
        assert [one.agents[0].score.value for one in outcomes] == [0.0, 1.0]


async def test_who_may_open_and_who_may_ask() -> None:
    async with served_world() as world:
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\u00e9"):
            answer = await world.open(token=token)
            assert (answer.status, answer.body["error"]["code"]) == (401, "invalid_token")
            assert TOKEN not in json.dumps(answer.body)
        assert (await world.open(method="GET")).status == 405
        assert (await world.open(body=b'{"model": "x"}')).status == 400
        assert (await world.open(body=b"{")).status == 400
        assert not counts(world), "nothing was opened"
        first, second = await world.person(), await world.person()
        assert (await world.open(body=b"{}")).status == 201
        for key in (second.opened["api_key"], TOKEN, ""):
            assert (await first.post("/v1/models", key=key, method="GET")).status == 401
            assert (await first.post("/feedback", {"score": 1}, key=key)).status == 401
            assert (await first.post("", key=key, method="DELETE")).status == 401
        # A session's key opens no session.
        assert (await world.open(token=first.opened["api_key"])).status == 401
        first.opened["anthropic_base_url"] = world.server.url + "/sessions/unknown"
        assert (await first.say("hi")).status == 404


async def test_bad_feedback_changes_nothing_and_a_second_one_comes_too_late() -> None:
    async with served_world() as world:
        (episode,), (person,) = await begun(world)
        await person.say("1 + 2 =")
        scores = (b"NaN", b"1e9", b'"1"', b"true")
        for body in (*(b'{"score": ' + score + b"}" for score in scores), b"{}", b"x"):
            assert (await person.post("/feedback", body)).status == 400
        assert not episode.done() and (await person.say("again")).status == 200
        answer = await person.post("/feedback", {"score": -2.5, "finished": False})
        assert answer.body == {"num_feedback": 1, "finished": False}
        assert (await person.post("/feedback", {"score": 0.5})).status == 200
        check_over(await person.post("/feedback", {"score": 1}), "feedback has ended it")
        assert (await episode).agents[0].score == Score(0.5, True)
        assert counts(world)["feedback_sum"] == -2.0


async def test_one_session_too_many_is_told_to_come_again() -> None:
    async with served_world(section=ServingSection(max_open_sessions=2)) as world:
        first, _ = await world.person(), await world.person()
        refused = await world.open()
        assert (refused.status, refused.body["error"]["code"]) == (429, "too_many_sessions")
        assert int(refused.headers["retry-after"]) > 0
        closed = await first.post("", method="DELETE")
        assert closed.body == {"id": first.opened["id"], "end": "closed"}
        while (again := await world.open()).status == 429:
            pass
        assert again.status == 201 and counts(world)["num_opened"] == 3
        assert counts(world)["num_refused"] >= 1


@pytest.mark.parametrize(
    ("section", "end", "words"),
    [
        (ServingSection(idle_session_s=0.2), "idle", "serving.idle_session_s"),
        (ServingSection(idle_session_s=0.4, session_s=0.4), "time", "serving.session_s"),
    ],
)
async def test_sessions_do_not_stay_open_for_ever(section: ServingSection, end: str, words: str) -> None:
    """What was said before they ended counts."""
    async with served_world(section=section) as world:
        episodes, (silent, person) = await begun(world, 2)
        world.clock.advance(0.1)
        await silent.say("hello")
        await person.say("hello")
        await person.post("/feedback", {"score": 2, "finished": False})
        if end == "time":
            # A session in use is not idle.
            world.gate.clear()
            num_asked = world.num_asked
            asking = asyncio.ensure_future(person.say("still here"))
            await world.until(lambda: world.num_asked > num_asked)
        world.clock.advance(0.5)
        if end == "time":
            check_over(await asking, words)
            world.gate.set()
        outcomes = await asyncio.gather(*episodes)
        check_over(await person.say("are you there?"), words)
        scores = {one.ending: one.agents[0].score for one in outcomes}
        assert scores == {Ending.NO_SCORE: None, Ending.COMPLETED: Score(2.0, True)}
        assert counts(world)[f"num_ended_{end}"] == 2
        assert counts(world)["num_untrained_no_score"] == 1


async def test_a_session_that_nobody_has_judged_has_no_score() -> None:
    async with served_world() as world:
        episodes, (silent, absent) = await begun(world, 2)
        await silent.say("hello")
        for person in (silent, absent):
            await person.post("", method="DELETE")
        for outcome in await asyncio.gather(*episodes):
            assert outcome.ending is Ending.NO_SCORE and outcome.agents[0].score is None
        untrained = {name: number for name, number in counts(world).items() if "untrained" in name}
        assert untrained == {"num_untrained_no_score": 1, "num_untrained_no_turn": 1}


async def test_an_episode_ends_after_its_last_turn() -> None:
    """A turn that is under way when feedback comes belongs to the trajectory."""
    async with served_world() as world:
        (episode,), (person,) = await begun(world)
        await person.say("hello")
        world.gate.clear()
        asking = asyncio.ensure_future(person.say("and?"))
        await world.until(lambda: world.num_asked == 2)
        await person.post("/feedback", {"score": 1})
        check_over(await asking, "feedback has ended it")
        assert not episode.done()
        world.gate.set()
        outcome = await episode
        assert (outcome.ending, outcome.num_turns) == (Ending.COMPLETED, 2)


class Counting(ServedSessions):
    """The score is the number of messages; one word says that it is not known."""

    async def verdict(self, session: EndedSession) -> Score | None:
        said = [one["content"] for one in session.messages]
        return None if "no idea" in said else Score(float(len(said)), True)


async def test_a_verdict_of_your_own_and_the_order_of_scores() -> None:
    order = (ScoreSource.ENVIRONMENT, ScoreSource.FEEDBACK)
    async with served_world(Counting(), section=ServingSection(score_from=order)) as world:
        episodes, people = await begun(world, 3)
        for person, text in zip(people, ("hello", "no idea", "no idea"), strict=True):
            await person.say(text)
        for person in people[:2]:
            await person.post("/feedback", {"score": -3})
        await people[2].post("", method="DELETE")
        outcomes = await asyncio.gather(*episodes)
        scores = [one.agents[0].score for one in outcomes]
        assert {None if score is None else score.value for score in scores} == {2.0, -3.0, None}
        scored_by = [counts(world)[f"num_scored_by_{one}"] for one in ("environment", "feedback")]
        assert scored_by == [1, 1]


async def test_a_judge_rates_replies_by_what_came_next() -> None:
    section = ServingSection(score_from=(ScoreSource.JUDGE,))
    judged = ["good", " BAD.\n", "good enough"]
    async with served_world(section=section, roles=POLICY_AND_JUDGE, judge_texts=judged) as world:
        (episode,), (person,) = await begun(world)
        for text in ("1 + 2 =", "no, again", "thanks", "bye"):
            await person.say(text)
        await person.post("", method="DELETE")
        outcome = await episode
        assert outcome.ending is Ending.COMPLETED
        assert outcome.agents[0].score == Score(0.5, False)
        assert [one.num_turns for one in outcome.agents] == [4, 3], "nobody answered the last reply"
        assert counts(world)["num_judged"] == 2 and counts(world)["num_unreadable_judgements"] == 1
        assert counts(world)["num_scored_by_judge"] == 1


async def test_when_the_run_is_over_everybody_is_told() -> None:
    async with served_world() as world:
        episode = world.offer()
        await world.until_offered(1)
        trained, untrained = await world.person(), await world.person()
        await trained.say("hello")
        world.gate.clear()
        asking = asyncio.ensure_future(untrained.say("hello"))
        await world.until(lambda: world.num_asked == 2)
        world.service.end()
        for answer in (await asking, await trained.say("more")):
            check_over(answer, "the run that served it has ended")
        refused = await world.open()
        assert (refused.status, refused.body["error"]["code"]) == (503, "run_over")
        world.gate.set()
        assert (await episode).ending is Ending.NO_SCORE
        assert counts(world)["num_ended_run_over"] >= 1
