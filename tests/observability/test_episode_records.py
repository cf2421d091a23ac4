"""Whole episodes wait in the controller until their group trains or is lost; then only what is read stays."""

import dataclasses
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import Ending
from forgeasync.observability import EndedEpisodes, EpisodeRecords, RolloutWriter
from forgeasync.rollouts import AgentOutcome, EpisodeOutcome, Group, Score, lost_outcome, record_of
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


def outcome(episode: int, *, attempt: int = 0, ending: Ending = Ending.COMPLETED) -> EpisodeOutcome:
    agent = AgentOutcome(score=Score(1.0, True), num_turns=1, num_rewritten=0, num_faulty_calls=0)
    return EpisodeOutcome(
        ending=ending,
        agents=(agent,),
        episode_s=1.0,
        sampling_s=0.5,
        record={"said": f"episode {episode}", "ending": ending.value},
        attempt=attempt,
        episode=episode,
        num_artifacts=2,
        num_refused_artifacts=1,
        num_cut_bytes=30,
    )


def make_group(group_id: int, episodes: tuple[int, ...]) -> Group:
    rollouts = tuple(
        dataclasses.replace(make_stored_rollout((0, 0, 4)), episode=episode) for episode in episodes
    )
    return Group(
        group_id=group_id,
        draw_id=0,
        task=make_task(0),
        rollouts=rollouts,
        rewards=tuple(float(episode) for episode in episodes),
    )


def keep_file(artifacts: Path, *names: str) -> None:
    for name in names:
        (artifacts / name).mkdir(parents=True)
        (artifacts / name / "patch.diff").write_text("x")


def test_a_record_has_all_attempts() -> None:
    lost = lost_outcome("worker 3 is gone", num_agents=1, attempt=0, episode=4)
    crashed = outcome(4, attempt=1, ending=Ending.ENVIRONMENT_CRASH)
    record = record_of([lost, crashed, outcome(4, attempt=2)])
    assert record is not None and record["said"] == "episode 4"
    assert [one["ending"] for one in record["attempts"]] == [
        "infrastructure",
        "environment_crash",
        "completed",
    ]
    assert record["attempts"][0]["problem"] == "worker 3 is gone"
    assert record_of([outcome(4), lost]) is None, "the last attempt was lost with all that it has said"


def test_what_is_written_has_its_episode_and_keeps_its_files(tmp_path: Path) -> None:
    """The second of three episodes did not train: places in the group are not those of episodes."""
    artifacts = tmp_path / "artifacts"
    records = EpisodeRecords(artifacts)
    keep_file(artifacts, "7-0-0", "7-1-0", "7-2-0", "7-2-1", "70-0-0", "evaluation_7-0-0", "notes")
    records.add(7, [outcome(0), outcome(1), outcome(2), outcome(2, attempt=1)])
    records.add(70, [outcome(0)])
    group = make_group(7, (0, 2))
    with RolloutWriter(tmp_path / "rollouts.jsonl", per_step=1, episodes=records) as writer:
        written = writer.write(1, [group])
    (line,) = [json.loads(one) for one in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    ((group_id, episode),) = written
    assert (line["group_id"], line["episode"], line["reward"]) == (7, episode, float(episode))
    assert group_id == 7 and line["episode_record"]["said"] == f"episode {episode}"
    assert records.metrics()["episode/num_held_records"] == 4
    records.forget([7], written=written)
    records.close()
    assert records.metrics() == {"episode/num_held_records": 1, "episode/num_dropped_records": 0}
    assert records.of(7, episode) is None and records.of(70, 0) is not None
    kept = {"7-0-0"} if episode == 0 else {"7-2-0", "7-2-1"}
    assert {one.name for one in artifacts.iterdir()} == kept | {"70-0-0", "evaluation_7-0-0", "notes"}


def test_a_rollout_without_a_record_says_so(tmp_path: Path) -> None:
    records = EpisodeRecords(tmp_path / "artifacts")
    with RolloutWriter(tmp_path / "rollouts.jsonl", per_step=1, episodes=records) as writer:
        writer.write(1, [make_group(7, (0, 1))])
    assert json.loads((tmp_path / "rollouts.jsonl").read_text())["episode_record"] is None
    records.forget([7])
    records.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=30))
def test_never_more_are_held_than_may_be(actions: list[tuple[bool, int, int]]) -> None:
    """Groups come and go; what does not fit is counted."""
    records = EpisodeRecords(Path("/nowhere"), max_episodes=8)
    held: dict[int, int] = {}
    num_dropped = 0
    for is_added, group_id, size in actions:
        if is_added and group_id not in held:
            fits = min(size, 8 - sum(held.values()))
            records.add(group_id, [outcome(episode) for episode in range(size)])
            held[group_id] = fits
            num_dropped += size - fits
            assert [records.of(group_id, episode) is not None for episode in range(size)] == [
                episode < fits for episode in range(size)
            ]
        elif not is_added:
            records.forget([group_id])
            held.pop(group_id, None)
        assert records.metrics() == {
            "episode/num_held_records": sum(held.values()),
            "episode/num_dropped_records": num_dropped,
        }
    records.close()


def test_what_is_kept_and_what_is_not_are_counted_over_the_run() -> None:
    ended = EndedEpisodes()
    for _ in range(2):
        ended.add([outcome(0), outcome(1)])
        ended.end_step()
    metrics = ended.metrics()
    assert (metrics["episode/num_artifacts"], metrics["episode/num_refused_artifacts"]) == (8, 4)
    assert metrics["episode/num_cut_record_bytes"] == 120
