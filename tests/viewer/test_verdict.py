"""What the viewer says of what bounds a run, from its metrics and its prediction alone."""

import json
import os
from pathlib import Path

import pytest

from apps.view import main
from forgeasync.prediction import (
    PredictedChange,
    PredictedChanges,
    PredictedRun,
    Prediction,
    PredictionRecord,
    write_prediction,
)
from forgeasync.viewer import RunReader, status_lines, status_of
from tests.support.viewer_runs import STEP_S, metrics_of, write_run

NUM_STEPS = 30

PREDICTED = PredictedRun(
    step_s=1.5,
    trained_tokens_per_s=30.0,
    trainer_idle_share=0.6,
    generators_idle_share=0.1,
    mean_age=1.0,
)

CHANGES = PredictedChanges(
    verdict="generators bound; one more replica: 1.5 -> 1 s a step",
    changes=(PredictedChange(name="one more replica", before_s=1.5, after_s=1.0),),
)


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


def predict(folder: Path, changes: PredictedChanges | None = CHANGES) -> None:
    found = Prediction(after_step=0, num_replicas=1, run=PREDICTED, changes=changes)
    record = PredictionRecord(profile="p.json", profile_of="a test", start=found, newest=found)
    write_prediction(record, folder / "prediction.json")


def read(folder: Path) -> RunReader:
    reader = RunReader(folder)
    reader.read_all()
    return reader


def test_a_run_without_a_profile_says_what_bounds_it_and_how_to_learn_more(folder: Path) -> None:
    bound, how = status_of(read(folder))["verdict"]
    assert bound == (
        "generators bound the run: training waited for batches 75% of the time (last 20 steps), and they "
        "were busy for 100%; add generators (generator.num_replicas), or sample shorter responses"
    )
    assert "apps.profile" in how


def test_a_run_that_waited_for_its_disk_says_so(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    waited = [line | {"time/wait_for_batch_s": 0.1, "time/wait_for_disk_s": 1.3} for line in lines[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [lines[0], *waited]))
    bound, _ = status_of(read(folder))["verdict"]
    assert bound.startswith(
        "the disk bounds the run: training waited for it 65% of the time (last 20 steps);"
    )


def test_a_run_with_a_prediction_says_what_changes_would_bring(folder: Path) -> None:
    predict(folder)
    reader = read(folder)
    assert reader.problems == []
    lines = status_of(reader)["verdict"]
    assert lines[1:] == [
        "predicted / measured (last 20 steps): 1.5 / 2 s a step, 30 / 25 tokens/s trained, trainer waits 60% "
        "/ 75%",
        "predicted: generators bound; one more replica: 1.5 -> 1 s a step",
    ]
    assert set(lines) <= {line.removeprefix("  ") for line in status_lines(status_of(reader))}


def test_the_last_steps_of_a_run_that_samples_ahead_are_left_out(folder: Path) -> None:
    with (folder / "config.yaml").open("a") as file:
        file.write("max_off_policy_steps: 8\nbuffer: {max_groups: 72}\nalgorithm: {groups_per_step: 24}\n")
    assert "(last 17 steps)" in status_of(read(folder))["verdict"][0]


def test_what_is_predicted_while_it_looks_is_shown(folder: Path) -> None:
    with (folder / "config.yaml").open("a") as file:
        file.write("prediction:\n  profile: p.json\n")
    reader = read(folder)
    assert status_of(reader)["verdict"][1:] == ["nothing has been predicted yet"]
    predict(folder, changes=None)
    reader.read_all()
    assert status_of(reader)["verdict"][-1] == "what changes would bring has not been simulated yet"
    predict(folder)
    os.utime(folder / "prediction.json", ns=(1, 1))
    reader.read_all()
    assert "one more replica" in status_of(reader)["verdict"][-1]
    (folder / "prediction.json").write_text("{")
    reader.read_all()
    assert any("is no prediction of this version" in words for words in reader.problems)
    (folder / "prediction.json").unlink()
    reader.read_all()
    assert reader.problems == [] and reader.prediction is None


def test_traces_are_left_unread_where_nobody_asks_for_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "x.trace.jsonl").write_text("no trace\n")

    def problems(*more: str) -> list[str]:
        assert main([str(folder), "--status", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["problems"]

    assert len(problems()) == 1 and problems("--no-traces") == []
    with pytest.raises(SystemExit):
        main([str(folder), "--no-traces"])
