"""A run's predictions as it goes on: the process that simulates, the file, the metrics, and what is told."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgeasync.config import RunConfig, load_config
from forgeasync.controller import PredictionWatch, Simulating, prediction_watch
from forgeasync.observability import RunDir, undefined
from forgeasync.prediction import PredictionRequest, growth, read_prediction
from forgeasync.profile import Setup, write_profile
from forgeasync.rollouts import Group
from tests.support.config_samples import HF_CONFIG, MINIMAL
from tests.support.profiles import NO_SETUP, simple_profile
from tests.support.rollouts import make_stored_rollout
from tests.support.step_records import make_groups

LONG_S = 3600.0


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return RunDir(path=tmp_path / "run")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    """Six steps with a trainer of two procs that has nothing to do: one of them should generate."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    file = folder / "run.yaml"
    file.write_text(MINIMAL)
    setup = NO_SETUP.model_dump() | {"model": str(folder / "model"), "num_trainer_procs": 2}
    profile = simple_profile(
        lengths=(4.0, 8.0), token_s=1e-6, setup=Setup.model_validate(setup | {"num_data_ranks": 2})
    )
    write_profile(profile, folder / "profile.json")
    more = ("max_steps=6", "max_off_policy_steps=1", "generator.max_num_seqs=4", f"model.path={folder}/model")
    procs = ("trainer.parallel.num_procs=2", f"prediction.profile={folder}/profile.json")
    return load_config(file, [*more, *procs, *overrides])


def request_of(config: RunConfig) -> PredictionRequest:
    assert config.prediction is not None
    return PredictionRequest(
        config_json=config.model_dump_json(),
        profile=config.prediction.profile,
        after_step=0,
        recent={},
        gpu_bytes=2**36,
    )


def groups_of(num_tokens: int) -> list[Group]:
    """Four groups of the config's source with two responses of so many tokens each."""
    (group, _) = make_groups()
    rollouts = tuple(make_stored_rollout((0, 0, num_tokens), num_prompt_tokens=5, text="") for _ in range(2))
    task = dataclasses.replace(group.task, source="chain_sum")
    return [dataclasses.replace(group, task=task, rollouts=rollouts)] * 4


def line(step: int) -> dict[str, float]:
    """A step of 4 s that trained on 40 tokens."""
    return {
        "step": step,
        "time/elapsed_s": 4.0 * step,
        "time/step_s": 4.0,
        "time/eval_s": 0.0,
        "time/wait_for_batch_s": 3.0,
        "time/train_s": 1.0,
        "time/publish_weights_s": 0.0,
        "throughput/train_tokens_per_s": 10.0,
        "generator/busy_s": 4.0 * step,
    }


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.05)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def watch(tmp_path: Path, run_dir: RunDir, told: list[str]) -> Iterator[PredictionWatch]:
    run_dir.prediction.write_text("of an earlier start")
    watch = PredictionWatch(config_of(tmp_path, "prediction.refit_every_steps=4"), run_dir, told.append)
    yield watch
    watch.close()


def test_a_run_is_predicted_measured_and_predicted_anew(
    watch: PredictionWatch, run_dir: RunDir, told: list[str]
) -> None:
    first = watch.step(1, line(1), groups_of(4))
    assert not run_dir.prediction.exists() or "earlier" not in run_dir.prediction.read_text()

    def has_all() -> bool:
        record = read_prediction(run_dir.prediction)
        return record is not None and record.newest.split is not None

    until(has_all)
    second = watch.step(2, line(2), groups_of(30))
    third = watch.step(3, line(3), groups_of(30))
    record = read_prediction(run_dir.prediction)
    assert record is not None and record.start == record.newest
    run = record.start.run
    assert (second["prediction/step_s"], second["prediction/tokens_per_s"]) == (
        run.step_s,
        run.trained_tokens_per_s,
    )
    assert "prediction/step_ratio" not in second, "the first third of six steps is left out"
    assert third["prediction/step_ratio"] == pytest.approx(4.0 / run.step_s)
    assert third["prediction/tokens_ratio"] == pytest.approx(10.0 / run.trained_tokens_per_s)
    assert told[0].startswith("predicted: ") and "p.json" not in told[0] and len(told) == 2
    assert "another split of the same GPUs would be faster: trainer.parallel.num_procs=1" in told[1]
    assert third["prediction/num_faster_splits"] == 1 and third["prediction/num_failures"] == 0

    # The groups of steps 1 to 4 have longer responses than the profile, and again want the same split.
    steps = itertools.count(4)

    def next_step() -> dict[str, float | int]:
        step = next(steps)
        return watch.step(step, line(step), groups_of(30))

    until(lambda: "prediction/refitted_at_step" in next_step())
    last = next_step()
    # Later, where the process before had not quite ended at step 4.
    assert (refitted := last["prediction/refitted_at_step"]) >= 4
    assert last["prediction/refitted_step_s"] > 2.0 * last["prediction/step_s"]
    assert len(told) == 2, "the faster split is told once"
    lines = watch.closing_lines()
    assert f"{run.step_s:.3g} / 4 s a step" in lines[1]
    assert f"lengths of the groups up to step {refitted}" in lines[2]
    assert any("one more scorer" in one for one in lines[3:])
    assert not undefined(first.keys() | third.keys() | last.keys())


class RecordingDesk:
    """A desk that has room for three generators."""

    def __init__(self) -> None:
        self.num_wanted = 1
        self.asked: list[int] = []

    def want(self, num: int) -> str:
        self.asked.append(num)
        if num > 3:
            raise ValueError("there is no room")
        self.num_wanted = num
        return "starting"


def test_a_run_grows_while_one_more_generator_is_predicted_to_help(
    tmp_path: Path, run_dir: RunDir, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever one more brings: with six steps of a few groups the second one brings the most.
    monkeypatch.setattr(growth, "LEAST_SAVING", -1.0)
    config = config_of(tmp_path, "prediction.max_replicas=64", "prediction.refit_every_steps=null")
    desk, watch, steps = RecordingDesk(), PredictionWatch(config, run_dir, told.append), itertools.count(1)
    watch.let_grow(desk)
    last: dict[str, float | int] = {}

    def next_step() -> None:
        step = next(steps)
        last.update(watch.step(step, line(step), groups_of(30)))

    def is_refused() -> bool:
        next_step()
        return desk.asked[-1:] == [4]

    until(is_refused)
    assert desk.asked == [2, 3, 4], "one after the other, each after a prediction that has the one before"
    record = read_prediction(run_dir.prediction)
    assert record is not None and record.start.num_replicas == 1 and record.newest.num_replicas == 3
    assert record.newest.run.step_s < record.start.run.step_s
    grown = [words for words in told if "generators from now on" in words]
    assert len(grown) == 2 and grown[0].startswith("2 generators from now on: starting (one more replica: ")
    refused = [words for words in told if words.startswith("no generator is added, although it would help")]
    assert len(refused) == 1 and refused[0].endswith("there is no room")
    next_step()
    assert desk.asked == [2, 3, 4], "what was refused is not asked again"
    assert last["prediction/num_added_replicas"] == 2 and not undefined(last.keys())
    watch.close()


def test_a_number_that_apps_control_has_set_is_predicted(
    tmp_path: Path, run_dir: RunDir, told: list[str]
) -> None:
    config = config_of(tmp_path, "prediction.refit_every_steps=1")
    desk, watch, steps = RecordingDesk(), PredictionWatch(config, run_dir, told.append), itertools.count(1)
    watch.let_grow(desk)
    desk.num_wanted = 2

    def is_predicted() -> bool:
        step = next(steps)
        watch.step(step, line(step), groups_of(4))
        record = read_prediction(run_dir.prediction)
        return record is not None and record.newest.num_replicas == 2

    until(is_predicted)
    assert not desk.asked, "without max_replicas none is added"
    watch.close()


def test_without_a_profile_it_only_measures(tmp_path: Path, run_dir: RunDir, told: list[str]) -> None:
    config = config_of(tmp_path).model_copy(update={"prediction": None})
    watch = PredictionWatch(config, run_dir, told.append)
    assert [watch.step(step, line(step), groups_of(4)) for step in (1, 2, 3)] == [{}, {}, {}]
    bound, how = watch.closing_lines()
    assert bound.startswith("generation bounds the run: training waited for batches 75%")
    assert "apps.profile" in how and not told and not run_dir.prediction.exists()
    watch.close()


def test_a_simulation_that_fails_is_told_counted_and_ends_nothing(
    tmp_path: Path, run_dir: RunDir, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    # The process cannot read the model, which is checked before a run begins.
    (tmp_path / "model" / "config.json").unlink()
    monkeypatch.setattr(prediction_watch, "END_S", LONG_S)
    watch = PredictionWatch(config, run_dir, told.append)
    bound, nothing = watch.closing_lines()
    assert bound.startswith("what bounds the run is not known")
    assert nothing == "nothing was predicted in time"
    (words,) = told
    assert words.startswith("the run's times are not predicted: its process ended with exit code 1 (see ")
    assert watch.step(1, line(1), groups_of(4))["prediction/num_failures"] == 1 and len(told) == 1
    watch.close()


def test_problems_of_the_process_have_their_reason(tmp_path: Path, run_dir: RunDir) -> None:
    config = config_of(tmp_path)
    file, log = run_dir.prediction, run_dir.log("prediction")
    late = Simulating(file, log, profile="p", profile_of="a test", limit_s=0.05)
    late.begin(request_of(config))
    late.wait(LONG_S)
    assert late.problems == ["it was not ready within 0.05 s"] and late.record is None
    gone = Simulating(file, log, profile="p", profile_of="a test")
    gone.begin(request_of(config_missing(config)))
    gone.wait(LONG_S)
    (problem,) = gone.problems
    assert "exit code 1" in problem and "none.json: cannot be read" in log.read_text()


def config_missing(config: RunConfig) -> RunConfig:
    """The config with a profile that is not there."""
    assert config.prediction is not None
    section = config.prediction.model_copy(update={"profile": "none.json"})
    return config.model_copy(update={"prediction": section})


def test_a_disk_that_refuses_the_file_leaves_the_prediction_in_the_run(
    tmp_path: Path, run_dir: RunDir
) -> None:
    (run_dir.path / ".prediction.json.partial").symlink_to("/dev/full")
    simulating = Simulating(run_dir.prediction, run_dir.log("prediction"), profile="p", profile_of="a test")
    simulating.begin(request_of(config_of(tmp_path)))
    simulating.wait(LONG_S)
    assert simulating.record is not None and simulating.record.newest.split is not None
    assert len(simulating.problems) == 3 and "No space left on device" in simulating.problems[0]
    assert not run_dir.prediction.exists()


def test_closing_ends_the_process_and_is_no_failure(tmp_path: Path, run_dir: RunDir) -> None:
    simulating = Simulating(run_dir.prediction, run_dir.log("prediction"), profile="p", profile_of="a test")
    simulating.begin(request_of(config_of(tmp_path, "max_steps=1000", "algorithm.groups_per_step=64")))
    simulating.close()
    simulating.close()
    assert not simulating.is_busy and not simulating.problems
