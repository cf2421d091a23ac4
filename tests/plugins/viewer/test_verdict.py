"""What the viewer says of what bounds a run, from its metrics alone."""

import json
from pathlib import Path

import pytest

from apps.view import main
from forgeasync.plugins.viewer import status_of
from tests.support.viewer_runs import STEP_S, metrics_of, read, write_run

NUM_STEPS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose steps take 2 s, of which training waits for 1.5 s; each trains on 50 tokens."""
    folder = write_run(tmp_path / "made", num_steps=NUM_STEPS)
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "time/elapsed_s": 0.0, "time/eval_s": 9.0}) + "\n")
        for step in range(1, NUM_STEPS + 1):
            values = {
                "time/step_s": STEP_S,
                "time/eval_s": 0.0,
                "time/wait_for_batch_s": 1.5,
                "time/train_s": 0.4,
                "time/publish_weights_s": 0.0,
                "throughput/train_tokens_per_s": 25.0,
                "generator/busy_s": 2 * STEP_S * step,
                "generator/num_healthy": 2,
            }
            file.write(json.dumps(metrics_of(step) | values) + "\n")
    return folder


def test_a_run_says_what_bounds_it_and_how_to_learn_more(folder: Path) -> None:
    bound, how = status_of(read(folder))["verdict"]
    told = ("generators bound the run", "75%", "last 20 steps", "busy for 100%", "generator.num_replicas")
    assert all(words in bound for words in told), bound
    assert "apps.profile" in how


def test_the_last_steps_of_a_run_that_samples_ahead_are_left_out(folder: Path) -> None:
    with (folder / "config.yaml").open("a") as file:
        file.write("max_off_policy_steps: 8\nbuffer: {max_groups: 72}\nalgorithm: {groups_per_step: 24}\n")
    assert "(last 17 steps)" in status_of(read(folder))["verdict"][0]


def test_traces_are_left_unread_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "x.trace.jsonl").write_text("no trace\n")

    def problems(*more: str) -> list[str]:
        assert main([str(folder), "--status", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["problems"]

    assert len(problems()) == 1 and problems("--no-traces") == []
