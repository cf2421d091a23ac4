"""What is kept of rollouts for people: rollouts.jsonl with whole episodes, tokens.jsonl, artifacts."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import Ending
from forgeasync.files import read_json_lines
from forgeasync.models import character_tokenizer
from forgeasync.observability import NUM_NONFINITE, EndedEpisodes, EpisodeRecords, RolloutWriter, TokenLines
from forgeasync.rollouts import (
    AgentOutcome,
    BranchKey,
    BranchValues,
    EpisodeOutcome,
    Group,
    RolloutKey,
    Score,
    TokenPieces,
    TokenReport,
    TokenValues,
    WorstToken,
    failed_outcome,
    record_of,
)
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout
from tests.support.step_records import make_groups

# --- rollouts.jsonl ---


def test_rollouts_are_recorded_with_text_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with RolloutWriter(path, per_step=100) as writer:
        writer.write(5, make_groups())
        lines = read_json_lines(path)
    assert len(lines) == 4
    assert lines[1] == {
        "step": 5,
        "group_id": 7,
        "episode": 0,
        "agent": 0,
        "task_id": "t0",
        "prompt": "0 + 1 =",
        "response": "response of 4 tokens\nzwölf",
        "answer": "1",
        "reward": 0.0,
        "version_spans": [[3, 0, 1], [4, 1, 4]],
        "prompt_tokens": 5,
        "response_tokens": 4,
        "finish_reason": "stop",
    }
    assert lines[3]["finish_reason"] == "length"


def test_picked_rollouts_depend_on_the_step_alone(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        with RolloutWriter(tmp_path / name, per_step=2) as writer:
            for step in range(8):
                writer.write(step, make_groups())
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    lines = read_json_lines(tmp_path / "a")
    assert [line["step"] for line in lines] == [step for step in range(8) for _ in range(2)]
    assert len({(line["group_id"], line["response"]) for line in lines}) > 2


def test_an_unscored_group_is_refused(tmp_path: Path) -> None:
    group = make_groups()[0]
    unscored = Group(group_id=9, draw_id=9, task=group.task, rollouts=group.rollouts)
    with RolloutWriter(tmp_path / "rollouts.jsonl", per_step=1) as writer:
        with pytest.raises(ValueError, match="group 9"):
            writer.picks(1, [unscored])


# --- whole episodes ---


def outcome(episode: int, *, attempt: int = 0, ending: Ending = Ending.COMPLETED) -> EpisodeOutcome:
    return EpisodeOutcome(
        ending=ending,
        agents=(AgentOutcome(score=Score(1.0, True), num_turns=1),),
        episode_s=1.0,
        sampling_s=0.5,
        record={"said": f"episode {episode}", "ending": ending.value},
        attempt=attempt,
        episode=episode,
        counts=Counter(
            {
                "episode/num_artifacts": 2,
                "episode/num_refused_artifacts": 1,
                "episode/num_cut_record_bytes": 30,
                "session/num_ours": 5,
            }
        ),
    )


def make_group(*episodes: int) -> Group:
    one = make_stored_rollout((0, 0, 4))
    rollouts = tuple(dataclasses.replace(one, episode=episode) for episode in episodes)
    rewards = tuple(map(float, episodes))
    return Group(group_id=7, draw_id=0, task=make_task(0), rollouts=rollouts, rewards=rewards)


def test_a_record_has_all_attempts() -> None:
    lost = failed_outcome("worker 3 is gone", num_agents=1, attempt=0, episode=4)
    crashed = outcome(4, attempt=1, ending=Ending.ENVIRONMENT_CRASH)
    record = record_of([lost, crashed, outcome(4, attempt=2)])
    assert record is not None and record["said"] == "episode 4"
    endings = [one["ending"] for one in record["attempts"]]
    assert endings == ["infrastructure", "environment_crash", "completed"]
    assert record["attempts"][0]["problem"] == "worker 3 is gone"
    assert record_of([outcome(4), lost]) is None, "the last attempt was lost with all that it has said"


def test_what_is_written_has_its_episode_and_keeps_its_files(tmp_path: Path) -> None:
    """The second of three episodes did not train: places in the group are not those of episodes."""
    artifacts = tmp_path / "artifacts"
    records = EpisodeRecords(artifacts)
    others = {"70-0-0", "evaluation_7-0-0", "notes"}
    for name in ("7-0-0", "7-1-0", "7-2-0", "7-2-1", *others):
        (artifacts / name).mkdir(parents=True)
        (artifacts / name / "patch.diff").write_text("x")
    records.add(7, [outcome(0), outcome(1), outcome(2), outcome(2, attempt=1)])
    records.add(70, [outcome(0)])
    with RolloutWriter(tmp_path / "rollouts.jsonl", per_step=1, episodes=records) as writer:
        written = writer.write(1, [make_group(0, 2)])
    (line,) = read_json_lines(tmp_path / "rollouts.jsonl")
    ((group_id, episode),) = written
    assert (line["group_id"], line["episode"], line["reward"]) == (7, episode, float(episode))
    assert group_id == 7 and line["episode_record"]["said"] == f"episode {episode}"
    assert records.metrics()["episode/num_held_records"] == 4
    records.forget([7], written=written)
    records.close()
    assert records.metrics() == {"episode/num_held_records": 1, "episode/num_dropped_records": 0}
    assert records.of(7, episode) is None and records.of(70, 0) is not None
    kept = {"7-0-0"} if episode == 0 else {"7-2-0", "7-2-1"}
    assert {one.name for one in artifacts.iterdir()} == kept | others


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
            is_held = [records.of(group_id, episode) is not None for episode in range(size)]
            assert is_held == [episode < fits for episode in range(size)]
        elif not is_added:
            records.forget([group_id])
            held.pop(group_id, None)
        assert records.metrics()["episode/num_held_records"] == sum(held.values())
        assert records.metrics()["episode/num_dropped_records"] == num_dropped
    records.close()


def test_what_is_kept_and_what_is_not_are_counted_over_the_run() -> None:
    ended = EndedEpisodes()
    for _ in range(2):
        ended.add([outcome(0), outcome(1)])
        ended.end_step()
    metrics = ended.metrics()
    assert (metrics["episode/num_artifacts"], metrics["episode/num_refused_artifacts"]) == (8, 4)
    assert metrics["episode/num_cut_record_bytes"] == 120
    assert "session/num_ours" not in metrics, "it is no metric"


# --- tokens.jsonl ---


TOKENIZER = character_tokenizer(chat_template=False).backend_tokenizer


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text).ids, np.int32)


def values(text: str, decisions: list[list[int]] | None) -> TokenValues:
    """Of the first and the third of three tokens; the third has a log-probability that is no number."""
    return TokenValues(
        positions_N=np.array([0, 2], np.int32),
        token_ids_N=ids(text)[[0, 2]],
        logprobs_N=np.array([-1.0, np.nan], np.float32),
        behavior_logprobs_N=np.array([-1.25, -2.0], np.float32),
        ratios_N=np.array([1.23456789, np.inf], np.float32),
        advantages_N=np.array([0.1, 0.1], np.float32),
        entropies_N=np.array([0.0001234567, 2.0], np.float32),
        versions_N=np.array([3, 4], np.int32),
        num_kept_N=np.array([0, 7], np.int32),
        decisions_MN=None if decisions is None else np.array(decisions, np.uint8),
    )


def key(episode: int, branch: int) -> BranchKey:
    return BranchKey(rollout=RolloutKey(group_id=5, episode=episode, agent=0), branch=branch)


def branch(episode: int, number: int, text: str) -> BranchValues:
    made = values(text, [[0, 1], [2, 2]] if number == 0 else None)
    return BranchValues(
        key=key(episode, number), prompt_ids_P=ids("?"), response_ids_T=ids(text), values=made
    )


REPORT = TokenReport(
    branches=(branch(0, 0, "abc"), branch(0, 1, "xyz"), branch(2, 0, "<b>")),
    worst=(WorstToken(key=key(1, 0), values=values("def", [[2, 0]]).take(np.array([0]))),),
)


def lines_of(folder: Path, pieces: TokenPieces | None) -> list[dict[str, Any]]:
    writer = TokenLines(folder / "tokens.jsonl", pieces)
    assert writer.prepare(7, REPORT) == {NUM_NONFINITE: 9}
    writer.write()
    writer.write()
    writer.close()
    return read_json_lines(folder / "tokens.jsonl")


def test_a_line_for_each_rollout_and_one_for_the_worst(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, TokenPieces(TOKENIZER))
    assert [(one["step"], one.get("episode")) for one in lines] == [(7, 0), (7, 2), (7, None)]
    first, second, worst = lines
    columns = {
        "logprob": [-1.0, None],
        "behavior": [-1.25, -2.0],
        "mismatch": [0.25, None],
        "ratio": [1.2346, None],
        "advantage": [0.1, 0.1],
        "entropy": [0.00012346, 2.0],
        "version": [3, 4],
        "kept": [0, 7],
    }
    all_tokens = {"num_tokens": 3, "positions": [0, 2], **columns}
    assert first["branches"] == [
        {"branch": 0, "pieces": ["a", "b", "c"], "disagreement": ["-0", "11"], **all_tokens},
        {"branch": 1, "pieces": ["x", "y", "z"], "disagreement": None, **all_tokens},
    ]
    assert [one["pieces"] for one in second["branches"]] == [["<", "b", ">"]]
    place = {"group_id": 5, "episode": 1, "agent": 0, "branch": 0, "position": 0}
    of_first = {name: column[0] for name, column in columns.items()}
    assert worst["worst"] == [{**place, "piece": "d", **of_first, "disagreement": ["1"]}]


def test_without_texts_nothing_that_was_said_is_there(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, None)
    assert not any(text in json.dumps(lines) for text in ("abc", "xyz", "token_ids"))
    assert lines[0]["branches"][0]["pieces"] is lines[2]["worst"][0]["piece"] is None
