"""What a rehearsal says was exercised: only what the files of its run show."""

import json
from pathlib import Path

import pytest

from forgeasync.config import RunConfig
from forgeasync.observability import RunDir
from forgeasync.planning import Verdict, findings
from forgeasync.testing import tiny_config
from tests.support.config_samples import FACTS

RIGHT: dict[str, float] = {
    "metrics/num_nonfinite": 0,
    "trainer/num_skipped_steps": 0,
    "grad_norm": 0.7,
    "off_policy/age_max": 0,
    "mismatch/logprob_abs_mean": 1e-6,
    "weights/num_swaps": 1,
    "weights/num_bytes_moved": 4096,
    "weights/num_bad_blocks": 0,
    "weights/num_expired_leases": 0,
    "weights/num_skipped_versions": 0,
    "generator/num_crossing": 2,
    "generator/num_resumed": 0,
    "routing/recorded_share": 1.0,
    "routing/disagreement_share": 0.0,
    "payload/num_read_shared": 8,
    "payload/num_read_remote": 0,
    "payload/bytes_per_token": 40.0,
    "dropped/stale": 1,
    "dropped/bad_record": 0,
    "scoring/num_timeouts": 0,
    "reward/mean": 0.5,
    "memory/trainer_gib": 0.6,
    "time/step_s": 1.0,
}
CHECKPOINT_FILES = ("step-00000002/run.json", "final/config.json")
EVALUATED: dict[str, float] = {"eval/accuracy": 0.0, "eval/num_unscored": 0}


def _config(**sections: object) -> RunConfig:
    config = tiny_config(Path("model"))
    evaluation = config.evaluation.model_copy(update={"every_steps": 2})
    checkpoint = config.checkpoint.model_copy(update={"every_steps": 2})
    return config.model_copy(update={"evaluation": evaluation, "checkpoint": checkpoint, **sections})


def _write(folder: Path, changes: dict[int, dict[str, float]], *, num_steps: int = 3) -> RunDir:
    lines = [{"step": 0, **EVALUATED, "metrics/num_nonfinite": 0}]
    for step in range(1, num_steps + 1):
        evaluated = EVALUATED if step in (2, 3) else {}
        lines.append({"step": step, **RIGHT, **evaluated, **changes.get(step, {})})
    folder.mkdir(parents=True)
    run_dir = RunDir(path=folder)
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("trainer-0", "trainer-1", "generator-0", "scorer-0", "buffer-0", "controller"):
        run_dir.log(name).parent.mkdir(exist_ok=True)
        run_dir.log(name).touch()
    for file in CHECKPOINT_FILES:
        (run_dir.checkpoints / file).parent.mkdir(parents=True)
        (run_dir.checkpoints / file).touch()
    return run_dir


def _verdicts(config: RunConfig, run_dir: RunDir) -> dict[str, Verdict]:
    found = findings(config, FACTS, run_dir)
    assert len({finding.part for finding in found}) == len(found)
    return {finding.part: finding.verdict for finding in found}


def test_a_run_that_went_well(tmp_path: Path) -> None:
    verdicts = _verdicts(_config(), _write(tmp_path / "run", {}))
    assert Verdict.FAILED not in verdicts.values()
    untried = {part for part, verdict in verdicts.items() if verdict is Verdict.NOT_EXERCISED}
    assert untried == {"replay of kept tokens", "resuming", "memory and speed of the run", "GPUs"}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("steps", {"trainer/num_skipped_steps": 1}),
        ("steps", {"metrics/num_nonfinite": 1}),
        ("age of tokens", {"off_policy/age_max": 1}),
        ("publish, fetch, swap", {"weights/num_bad_blocks": 1}),
        ("publish, fetch, swap", {"weights/num_expired_leases": 1}),
        ("replay of routed experts", {"routing/recorded_share": 0.99}),
        ("groups", {"dropped/bad_record": 1}),
        ("scores", {"scoring/num_timeouts": 1}),
        ("evaluation", {"eval/num_unscored": 1}),
    ],
)
def test_what_went_wrong_in_the_last_step_has_failed(
    tmp_path: Path, part: str, change: dict[str, float]
) -> None:
    verdicts = _verdicts(_config(), _write(tmp_path / "run", {3: change}))
    assert [name for name, verdict in verdicts.items() if verdict is Verdict.FAILED] == [part]


def test_what_is_missing_has_failed(tmp_path: Path) -> None:
    run_dir = _write(tmp_path / "run", {step: {"weights/num_swaps": 0} for step in (1, 2, 3)}, num_steps=2)
    for name in ("trainer-1", "generator-0", "scorer-0"):
        run_dir.log(name).unlink()
    for file in CHECKPOINT_FILES:
        (run_dir.checkpoints / file).unlink()
    verdicts = _verdicts(_config(), run_dir)
    failed = {part for part, verdict in verdicts.items() if verdict is Verdict.FAILED}
    processes = {"trainer processes", "generators", "other roles"}
    assert failed == processes | {"steps", "publish, fetch, swap", "evaluation", "checkpoint", "export"}


def test_what_a_run_had_no_use_for_is_not_exercised(tmp_path: Path) -> None:
    equal_rewards = {step: {"grad_norm": 0.0} for step in (1, 2, 3)}
    assert _verdicts(_config(), _write(tmp_path / "a", equal_rewards))["gradient"] is Verdict.NOT_EXERCISED
    config = _config(checkpoint=tiny_config(Path("m")).checkpoint.model_copy(update={"every_steps": None}))
    assert _verdicts(config, _write(tmp_path / "b", {}))["checkpoint"] is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(
    ("roles", "verdict"), [(("trainer", "generator"), Verdict.EXERCISED), (("trainer",), Verdict.FAILED)]
)
def test_gpus_count_where_processes_have_reserved_memory_of_them(
    tmp_path: Path, roles: tuple[str, ...], verdict: Verdict
) -> None:
    memory = {f"memory/{role}_gpu_gib": 1.0 for role in roles}
    assert _verdicts(_config(), _write(tmp_path / "run", {1: memory}))["GPUs"] is verdict
