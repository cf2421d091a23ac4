"""The command as a user runs it: exit codes, files, deaths, interrupts. Every run has real processes."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forgeasync.checkpoints import checkpoint_name
from forgeasync.observability import Lane, State, named_lanes, shares
from forgeasync.plugins.viewer import RunReader, status_of
from forgeasync.testing import tiny_config
from tests.support.app_runs import (
    NEVER_ENDING,
    check_ledger,
    check_open_ledger,
    controller_of,
    finish,
    finish_well,
    pid_of,
    read_lines,
    run_here,
    session_processes,
    start,
    wait_for_step,
    write_tiny_run,
)
from tests.support.processes import send_signal

IDLE_ENGINE = (State.WAITING_FOR_ROOM, State.FETCHING, State.STARTING)

OUTSIDE_A_STEP = ("record", "begin a checkpoint")


def read_traces(run_dir: Path) -> dict[str, list[Lane]]:
    reader = RunReader(run_dir, with_rollouts=False)
    reader.read_all()
    assert reader.problems == []
    return named_lanes(reader.traces.lanes)


def check_traces(run_dir: Path) -> None:
    """Every proc has left a trace, and what they say is what the metrics say."""
    lanes = read_traces(run_dir)
    listed = json.loads((run_dir / "procs.json").read_text())["procs"]
    traced = {lane.opened.pid for processes in lanes.values() for lane in processes if lane.opened}
    assert {one["pid"] for one in listed} <= traced
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    (controller,) = lanes["controller"]
    recorded = {span.facts["step"]: span.begin_s for span in controller.spans if span.name == "record"}
    for line in steps:
        step, step_s, end_s = line["step"], line["time/step_s"], recorded[line["step"]]
        waited = shares([controller], end_s - step_s, end_s)[State.WAITING_FOR_BATCH]
        assert waited == pytest.approx(line["load/trainer_wait_share"], abs=0.01)
        of_step = [
            span.took_s
            for span in controller.spans
            if span.facts.get("step") == step and span.name not in OUTSIDE_A_STEP
        ]
        assert sum(of_step) == pytest.approx(step_s, rel=0.02)
    first_s, last_s = recorded[steps[0]["step"]], recorded[steps[-1]["step"]]
    busy_s = sum(
        share * (last_s - first_s)
        for name, processes in lanes.items()
        if name.startswith("generator-")
        for state, share in shares(processes, first_s, last_s).items()
        if state not in IDLE_ENGINE
    )
    # The engines are asked for their times a moment before the step is recorded.
    counted_s = steps[-1]["generator/busy_s"] - steps[0]["generator/busy_s"]
    assert busy_s == pytest.approx(counted_s, abs=0.01 * (last_s - first_s) + 0.05)
    for name, processes in lanes.items():
        whole = shares(processes, processes[0].begin_s, processes[-1].end_s)
        assert sum(whole.values()) == pytest.approx(1.0), name
    sampled = {
        span.facts["group"]: span.facts
        for name, processes in lanes.items()
        if name.startswith("generator-")
        for lane in processes
        for span in lane.spans
        if span.name == "sample group" and "response_tokens" in span.facts
    }
    for rollout in read_lines(run_dir / "rollouts.jsonl"):
        facts = sampled[rollout["group_id"]]
        assert facts["prompt_tokens"] == rollout["prompt_tokens"]
        lengths = str(facts["response_tokens"]).split()
        assert int(lengths[rollout["episode"]]) == rollout["response_tokens"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("grpo"))


def check_verdict(run_dir: Path, out: str) -> None:
    """The last lines of a run and ``apps.view`` say the same of what bounds it."""
    record = RunReader(run_dir, with_rollouts=False)
    record.read_all()
    bound, _ = status_of(record)["verdict"]
    assert re.search(r"bounds? the run: |nor does training: ", bound)
    assert out.splitlines()[-4] == bound


@pytest.mark.parametrize("steps_off_policy", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_a_run_writes_what_it_promises(config_file: Path, tmp_path: Path, steps_off_policy: int) -> None:
    run_dir = tmp_path / "run"
    bound = f"max_off_policy_steps={steps_off_policy}"
    out = finish_well(start(config_file, f"run_dir={run_dir}", "max_steps=4", bound))
    check_verdict(run_dir, out)
    assert "\x1b" not in out, "a pipe gets plain lines"
    assert len(re.findall(r"^step +[1-4]/4 ", out, re.MULTILINE)) == 4
    reached, _, _, plot, _ = out.splitlines()[-5:]
    assert re.match(r"held-out accuracy went from \S+% to \S+% in 4 steps", reached)
    assert reached.endswith(f"; weights: {run_dir}/checkpoints/final")
    assert plot.endswith(f"{run_dir} --out {run_dir}/learning.png")
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert initial["step"] == 0 and "eval/accuracy" in initial
    assert [line["step"] for line in steps] == [line["policy_version"] for line in steps] == [1, 2, 3, 4]
    for line in (initial, steps[-1]):
        assert 0.0 <= line["eval/accuracy"] <= line["eval/score_mean"] <= 1.0
        assert line["eval/num_unscored"] == 0
    assert "verifier processes: 2, isolated by " in out
    assert steps[-1]["scoring/num_timeouts"] == steps[-1]["scoring/num_failed_attempts"] == 0
    ages = [line["off_policy/age_max"] for line in steps]
    assert max(ages) <= steps_off_policy
    if steps_off_policy:
        assert max(ages) > 0, "generation never ran ahead"
    for line in steps:
        assert not any(line[f"dropped/{why}"] for why in ("stale", "bad_record", "cancelled", "unscored"))
        assert line["routing/recorded_share"] == 1.0
        if line["off_policy/age_max"] == 0:
            assert line["mismatch/logprob_abs_max"] < 1e-4
    rollouts = read_lines(run_dir / "rollouts.jsonl")
    assert {rollout["step"] for rollout in rollouts} == {1, 2, 3, 4}
    check_tokens(rollouts, steps, read_lines(run_dir / "tokens.jsonl"))
    assert tiny_config(Path("x")).name in (run_dir / "config.yaml").read_text()
    assert steps[-1]["payload/num_bytes_held"] == 0, "every payload was freed with its step"
    assert check_ledger(run_dir)["ends"]["trained"] == 4 * tiny_config(Path("x")).algorithm.groups_per_step
    assert (run_dir / "checkpoints" / "final" / "model.safetensors.index.json").exists()
    assert list((run_dir / "tensorboard").iterdir()) and list((run_dir / "logs").iterdir())
    check_traces(run_dir)


def check_tokens(rollouts: list[dict], steps: list[dict], lines: list[dict]) -> None:
    """Every rollout that was written has its text and values by token, and every step its worst tokens."""
    worst = {line["step"]: line["worst"] for line in lines if "worst" in line}
    places = ("step", "group_id", "episode", "agent")
    of_rollout = {
        tuple(line[name] for name in places): line["branches"] for line in lines if "branches" in line
    }
    assert len(of_rollout) == len(rollouts) and len(lines) == len(rollouts) + len(steps)
    for rollout in rollouts:
        (branch,) = of_rollout[tuple(rollout[name] for name in places)]
        texts = [one if isinstance(one, str) else one.get("text", "") for one in branch["pieces"]]
        assert "".join(texts) == rollout["response"]
        assert branch["positions"] == list(range(rollout["response_tokens"]))
        for version, first, end in rollout["version_spans"]:
            assert branch["version"][first:end] == [version] * (end - first)
        assert all(len(layer) == rollout["response_tokens"] for layer in branch["disagreement"])
    for line in steps:
        sizes = [abs(one["mismatch"]) for one in worst[line["step"]]]
        assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
        assert sizes[0] == pytest.approx(line["mismatch/logprob_abs_max"], rel=1e-3)
        assert line["metrics/num_nonfinite_token_values"] == 0


@pytest.mark.exhaustive
def test_a_run_that_drops_cancels_and_filters_frees_all_it_loses(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        config_file,
        f"run_dir={run_dir}",
        "max_steps=5",
        "max_off_policy_steps=1",
        "buffer={stale_groups: drop, max_in_flight: 6}",
        "weights.interruption=cancel_stale",
        "algorithm.filters=[{kind: dynamic_sampling}]",
        "algorithm.objective={kind: reinforce}",
        "algorithm.corrections=[{kind: truncated_is, cap: 2.0}]",
    )
    finish_well(process)
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(line["off_policy/age_max"] for line in steps) <= 1
    filtered = [line["filtered/num_groups_all_equal"] for line in steps]
    assert filtered == sorted(filtered) and filtered[-1] > 0
    assert sum(line["dropped/filtered"] for line in steps) == filtered[-1]
    assert check_ledger(run_dir)["ends"]["filtered"] >= filtered[-1]
    for line in steps:
        assert line["buffer/num_in_flight"] <= 6
        assert 0 < line["correction/effective_sample_share"] <= 1 + 1e-6
        assert 0 < line["off_policy/effective_sample_share"] <= 1 + 1e-6
        assert 0 <= line["load/trainer_wait_share"] <= 1
    # What the run still had under way when it ended: nothing else is held.
    held = steps[-1]["payload/num_bytes_held"] + steps[-1]["payload/num_bytes_reserved"]
    num_under_way = steps[-1]["buffer/num_in_flight"] + steps[-1]["buffer/num_complete"]
    assert (held == 0) == (num_under_way == 0)


def assert_saved(run_dir: Path, last_line: str) -> None:
    """The newest weights are whole, finite, and where the last line says."""
    last = run_dir / "checkpoints" / "last"
    newest = len(read_lines(run_dir / "metrics.jsonl")) - 1
    found = re.search(r"the weights of step (\d+)(, as published,)? are in (.+)$", last_line)
    assert found is not None and found[3] == str(last.resolve()), last_line
    assert newest - 1 <= int(found[1]) <= newest + 1
    tensors = load_file(last / "model-00001-of-00001.safetensors")
    assert len(tensors) > 20 and all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert (last / "tokenizer.json").exists() and (last / "model.safetensors.index.json").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_steps_that_are_not_finite_end_the_run(config_file: Path, tmp_path: Path, on_nan: str) -> None:
    """A loss of one's own that is nan on one rank, from its second call on."""
    (tmp_path / "bad_losses.py").write_text(BAD_LOSS)
    run_dir = tmp_path / "run"
    process = start(
        config_file,
        f"run_dir={run_dir}",
        "max_steps=9",
        "checkpoint={every_steps: 1, keep: 2}",
        f"trainer.bad_steps.on_nan={on_nan}",
        "algorithm.objective={kind: python, factory: bad_losses.nan_later}",
        search_path=tmp_path,
    )
    code, _, err = finish(process)
    assert code == 1, err
    last = err.splitlines()[-1]
    assert "BadStepsEndRun: 3 steps in a row" in last and "trainer rank 1 is nan" in last
    assert_saved(run_dir, last)
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["trainer/num_skipped_steps"] for line in steps] == [0, 1, 2, 3]
    num_rolled_back = [0, 1, 2, 3] if on_nan == "rollback" else [0] * 4
    assert [line["trainer/num_rolled_back_steps"] for line in steps] == num_rolled_back
    assert [line["trainer/num_optimizer_steps"] for line in steps] == [1, 0, 0, 0]
    ends, num_groups = check_open_ledger(run_dir)["ends"], tiny_config(Path("x")).algorithm.groups_per_step
    assert (ends["trained"], ends["skipped"]) == (num_groups, 3 * num_groups)
    assert [line["loss"] is None for line in steps] == [False, True, True, True]
    assert steps[1]["dropped/bad_record"] == 0
    folders = sorted((run_dir / "bad_steps").iterdir())
    assert [folder.name for folder in folders] == ["step-00000002", "step-00000003", "step-00000004"]
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == ["rank-0.npz", "rank-1.npz", "rollouts.json"]
    batch = json.loads((folders[0] / "rollouts.json").read_text())
    assert "is nan" in batch["reason"] and len(batch["rollouts"]) == 16


BAD_LOSS = """
import torch

CALLS = []


def nan_later(row):
    is_trainer = torch.distributed.is_initialized()
    CALLS.append(is_trainer)
    losses_T = torch.where(row.mask_T, -row.logprobs_T * row.advantages_T, 0.0)
    if is_trainer and sum(CALLS) > 1 and torch.distributed.get_rank() == 1:
        losses_T = losses_T * torch.nan
    return losses_T, {}
"""


@pytest.mark.exhaustive
def test_a_killed_trainer_rank_is_named_with_its_signal(config_file: Path, tmp_path: Path) -> None:
    """Its peer complains of a lost connection seconds before Monarch tells of the death."""
    run_dir = tmp_path / "run"
    process = start(
        config_file,
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "max_off_policy_steps=1",
        "trainer.recovery.snapshot_every_steps=null",
    )
    wait_for_step(run_dir, process)
    os.kill(pid_of(run_dir, "trainer", 1), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("failed: ActorDied: trainer rank 1") and "trainer-1.log" in last
    assert ", as published, are in" in last, "a trainer that lacks a rank cannot be asked"
    assert_saved(run_dir, last)
    text = (run_dir / "run.log").read_text()
    assert last.split("; the weights")[0] in text and "Traceback" in text, "the reason is in the run's folder"
    assert "-m apps.grpo" in text and "torchtitan" in text, "and so is what it was started with"
    assert "step 0: held-out accuracy" in text and not folders_of(controller_of(run_dir))
    check_open_ledger(run_dir)


def folders_of(controller: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"forgeasync_payloads-{controller}-*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly(config_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    process = start(config_file, f"run_dir={run_dir}", NEVER_ENDING)
    wait_for_step(run_dir, process)
    controller = controller_of(run_dir)
    assert folders_of(controller)
    # The terminal sends Ctrl-C to the foreground process group, a scheduler SIGTERM to all of a job.
    if number is signal.SIGTERM:
        send_signal(session_processes(process.pid), number)
    else:
        os.killpg(process.pid, number)
    code, out, err = finish(process)
    assert code == 128 + number, err
    assert "Traceback" not in err and f"stopping on {number.name}" in out
    last = err.splitlines()[-1]
    assert_saved(run_dir, last)
    step = re.search(r"--resume latest continues after step (\d+)", last)
    assert step is not None and checkpoint_name(int(step[1])) in os.listdir(run_dir / "checkpoints")
    assert all(line["policy_version"] == line["step"] for line in read_lines(run_dir / "metrics.jsonl"))
    assert not folders_of(controller)
    check_open_ledger(run_dir)
    assert f"stopping on {number.name}" in (run_dir / "run.log").read_text()


@pytest.mark.exhaustive
def test_a_missed_deadline_is_the_last_thing_printed(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, _, err = finish(start(config_file, f"run_dir={run_dir}", "timeouts.setup_s=0.5"))
    assert code == 1
    last = err.splitlines()[-1]
    assert "TimeoutError" in last and "took longer than 0.5 s; timeouts.setup_s sets this limit" in last


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.group_sise=8", ["algorithm.group_sise", "group_size"]),
        ("model.path=nowhere", ["model.path", "nowhere"]),
        ("data.source.task=chain_sun", ["data.source.task", "chain_sun", "chain_sum"]),
        ("generator.kv_cache_gib=60000", ["generator.kv_cache_gib = 60000", "GiB of memory available"]),
        ("run_dir=/proc/cpuinfo", ["run_dir = '/proc/cpuinfo': is a file; name a folder"]),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    config_file: Path, tmp_path: Path, override: str, expected: list[str]
) -> None:
    run_dir = tmp_path / "run"
    code, out, err = run_here("--config", str(config_file), f"run_dir={run_dir}", override)
    assert code == 2
    assert all(part in err for part in expected), err
    assert not run_dir.exists() and "Traceback" not in err and not out
