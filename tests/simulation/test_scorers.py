"""Scores that mostly wait, and scores that compute, where cores are short."""

import pytest

from forgeasync.buffer import Start
from forgeasync.config import ScorerSection
from forgeasync.rollouts import Task
from forgeasync.simulation import Clock, DrawnRollout, Scorers, SimulatedGroup


@pytest.mark.parametrize(
    ("cores", "end_s"),
    [
        (0.0, 2.0),
        # Waits for 1.5 s, and computes for 0.5 s with a third of the core.
        (0.25, 3.0),
        (1.0, 6.0),
        # Four cores are wanted, and there is one.
        (2.0, 8.0),
    ],
)
def test_only_what_a_score_computes_takes_longer_where_cores_are_short(cores: float, end_s: float) -> None:
    clock, ends_s = Clock(1), []
    # Two others want the only core all the time.
    clock.begin(2.0)
    scorers = Scorers(
        ScorerSection(num_workers=1), cores, clock, lambda _: ends_s.append(clock.now_s), num_places=1
    )
    task = Task(task_id="0", prompt="", answer="", source_index=0, source="s")
    rollout = DrawnRollout(num_prompt_tokens=1, turns=(1,), latencies_s=(), score_s=2.0)
    group = SimulatedGroup(Start(group_id=0, draw_id=0, task=task), [rollout], 0.0)
    scorers.response_ended(group, 0)
    scorers.group_ended(group)
    while clock.step():
        pass
    assert ends_s == pytest.approx([end_s])
