"""The environment of a run that serves people: every session is an episode."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from forgeasync.config import ScoreSource, ServingSection
from forgeasync.environments.agent import EpisodeAgent
from forgeasync.environments.branches import RecordedBranch
from forgeasync.environments.environment import Agent, Agents, Environment, NoScore
from forgeasync.environments.served.counts import Untrained
from forgeasync.environments.served.desk import ServingDesk
from forgeasync.environments.served.judge import judge_session
from forgeasync.environments.sessions.session import Feedback, SessionEnd
from forgeasync.rollouts import Score, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """A session that has ended, with at least one turn."""

    end: SessionEnd
    feedback: tuple[Feedback, ...]
    """What the client has said of it, in that order."""
    branches: tuple[RecordedBranch, ...]
    """All its conversations as messages; a path to a turn that no other follows is a branch."""

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation that ended last."""
        return list(self.branches[-1])


class ServedSessions(Environment):
    """People talk to the policy; what they say of it, or a judge, or your own ``verdict``, is the score.

    Derive from it to score sessions yourself, with ``environment`` in ``serving.score_from``:

        import forgeasync as fa


        class Tickets(fa.ServedSessions):
            async def verdict(self, session: fa.EndedSession) -> fa.Score | None:
                solved = await look_up(session.messages)
                return None if solved is None else fa.Score(float(solved), solved)

        environment: {kind: python, factory: my_package.tickets.Tickets}
    """

    serves_people: ClassVar[bool] = True

    _desk: ServingDesk | None = None
    _section: ServingSection | None = None

    def attach(self, desk: ServingDesk, section: ServingSection) -> None:
        """Serve at this desk; called once, before the first episode."""
        self._desk, self._section = desk, section

    async def verdict(self, session: EndedSession) -> Score | None:
        """Return the score of a session that has ended; None if you do not know it.

        ``episodes.step_s`` bounds it.
        """
        return None

    async def rollout(self, task: Task, agent: Agent) -> Score:
        """Wait for a client, serve it until its session has ended, and return the session's score.

        Raises:
            NoScore: there was no turn, or nothing in ``serving.score_from`` gives a score.
        """
        assert self._desk is not None and self._section is not None, "attached"
        policy, judge = _agents(agent)
        # Two waits: the first one takes no time of the episode, in which nothing has grown old.
        with policy.waiting_for_person():
            served = await self._desk.offered(policy)
        with policy.waiting_for_person():
            end = await served.ended()
        if not policy.num_turns:
            self._desk.counts.add(f"num_untrained_{Untrained.NO_TURN}")
            raise NoScore("the session ended before its first turn")
        session = EndedSession(end=end, feedback=served.feedback, branches=tuple(policy.branches()))
        if session.feedback:
            comments = [{"score": one.score, "comment": one.comment} for one in session.feedback]
            policy.keep("feedback.json", json.dumps(comments))
        for source in self._section.score_from:
            if (score := await self._score(source, session, judge)) is not None:
                self._desk.counts.add(f"num_scored_by_{source}")
                return score
        self._desk.counts.add(f"num_untrained_{Untrained.NO_SCORE}")
        raise NoScore(f"the session ended ({end}), and nothing in serving.score_from gave a score")

    async def _score(self, source: ScoreSource, session: EndedSession, judge: Agent | None) -> Score | None:
        match source:
            case ScoreSource.FEEDBACK:
                if not session.feedback:
                    return None
                value = session.feedback[-1].score
                return Score(value, value > 0)
            case ScoreSource.ENVIRONMENT:
                return await self.verdict(session)
            case ScoreSource.JUDGE:
                assert judge is not None and self._desk is not None, "checked by the rules on served runs"
                judgement = await judge_session(judge, session.branches)
                self._desk.counts.add("num_judged", judgement.num_judged)
                self._desk.counts.add("num_unreadable_judgements", judgement.num_unreadable)
                return None if judgement.value is None else Score(judgement.value, judgement.value > 0.5)


def _agents(agent: Agent | Agents) -> tuple[EpisodeAgent, Agent | None]:
    """Return the policy and the judge, if there is one."""
    policy, judge = (agent.policy, agent.judge) if isinstance(agent, Agents) else (agent, None)
    assert isinstance(policy, EpisodeAgent), "people are served by our own generators"
    return policy, judge
