"""apps.distill as a user runs it: a real teacher beside real generators and a real trainer."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.support.app_runs import (
    check_ledger,
    finish_well,
    read_lines,
    run_here,
    start,
    wait_for_step,
    write_tiny_run,
)

SAMPLING = ("sampling.temperature=0.7", "sampling.top_p=0.9", "sampling.top_k=12")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher is the model that the run starts with."""
    folder = tmp_path_factory.mktemp("distill")
    terms = "{kind: sampled_reverse_kl}, {kind: topk_kl, divergence: reverse, top_k: 5}"
    engine = "{max_num_seqs: 32, max_num_batched_tokens: 512, kv_cache_gib: 0.05, keep_in_flight: false}"
    return write_tiny_run(
        folder,
        # A teacher reads one token more than it is asked about.
        "model.max_context_length=159",
        f"algorithm={{objective: {{kind: none}}, terms: [{terms}]}}",
        f"teachers={{own: {{model_path: {folder / 'model'}, engine: {engine}}}}}",
        scale=4.0,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("ids", ["teacher", "student"])
def test_a_teacher_that_is_the_student_sees_no_gap(config_file: Path, tmp_path: Path, ids: str) -> None:
    """At temperature 0.7 with kept sets: the first step is made under the teacher's very weights."""
    run_dir = tmp_path / "run"
    topk = f"{{kind: topk_kl, divergence: reverse, top_k: 12, ids: {ids}}}"
    terms = f"algorithm.terms=[{{kind: sampled_reverse_kl}}, {topk}]"
    overrides = (f"run_dir={run_dir}", "max_steps=2", *SAMPLING, terms)
    finish_well(start(config_file, *overrides, app="apps.distill"))
    _, first, second = read_lines(run_dir / "metrics.jsonl")
    assert first["teacher/gap_abs_mean"] < 1e-4 and abs(first["loss"]) < 1e-4
    assert first["teacher/reverse_kl"] < 1e-4
    assert second["teacher/gap_abs_mean"] > 1e-3, "the policy has moved"
    assert second["teacher/reverse_kl"] > 10 * abs(first["teacher/reverse_kl"])
    # top_p leaves some of the twelve likeliest out of the kept sets: 0.65 and 0.72 here.
    assert (first["teacher/student_mass"] < 0.68) == (ids == "student")
    for line in (first, second):
        assert line["teacher/num_failed"] == line["teacher/num_retried"] == line["teacher/version"] == 0
        assert line["dropped/unscored"] == 0 and line["teacher/num_tokens"] > 0
    assert second["payload/num_bytes_held"] == 0, "every payload was freed with its step"
    check_ledger(run_dir)


@pytest.mark.exhaustive
def test_a_reference_in_the_pool_says_what_the_trainers_own_does(config_file: Path, tmp_path: Path) -> None:
    """A penalty towards the first weights, by ``algorithm.kl`` and by ``ref_kl``, in synchronous steps."""
    same = (
        *("max_steps=3", "max_off_policy_steps=0", "algorithm.objective={kind: reinforce}"),
        "data.reward={kind: python, factory: tests.support.own_rewards.odd_length}",
    )
    ways = {
        "trainer": ("algorithm.kl={estimator: k3, coefficient: 0.5}", "algorithm.terms=[]"),
        "pool": ("algorithm.terms=[{kind: ref_kl, weight: 0.5}]",),
    }
    without = tmp_path / "run.yaml"
    without.write_text(yaml.safe_dump(yaml.safe_load(config_file.read_text()) | {"teachers": {}}))
    found = {}
    for name, way in ways.items():
        run_dir, file = tmp_path / name, without if name == "trainer" else config_file
        finish_well(start(file, f"run_dir={run_dir}", *same, *way, app="apps.grpo"))
        found[name] = read_lines(run_dir / "metrics.jsonl")[1:]
    for step, (own, pooled) in enumerate(zip(found["trainer"], found["pool"], strict=True)):
        assert own["reward/mean"] == pooled["reward/mean"]
        assert own["response/length_mean"] == pooled["response/length_mean"]
        assert pooled["teacher/k3"] == pytest.approx(own["kl/k3"], abs=1e-4)
        assert pooled["loss"] == pytest.approx(own["loss"], abs=1e-4)
        assert pooled["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-3)
        assert own["kl/k3"] > 1e-3 or not step, "the policy moves"


@pytest.mark.exhaustive
def test_a_teacher_that_reads_a_hint_sees_the_same_response(config_file: Path, tmp_path: Path) -> None:
    """A template that adds nothing changes nothing; one that does, does."""
    gaps = []
    for template in ("$prompt", "$answer$prompt"):
        run_dir = tmp_path / f"run-{len(gaps)}"
        hint = ("teachers.own.max_context_length=160", f"teachers.own.prompt={template}")
        shorter = "model.max_context_length=150"
        overrides = (f"run_dir={run_dir}", "max_steps=1", shorter, *hint)
        finish_well(start(config_file, *overrides, app="apps.distill"))
        gaps.append(read_lines(run_dir / "metrics.jsonl")[-1]["teacher/gap_abs_mean"])
    assert gaps[0] < 1e-4 < 1e-3 < gaps[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_teacher_that_is_killed_is_replaced_and_no_group_is_lost(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config_file, f"run_dir={run_dir}", "max_steps=30", app="apps.grpo")
    wait_for_step(run_dir, process)
    listed = json.loads((run_dir / "procs.json").read_text())["procs"]
    (teacher,) = [one for one in listed if one["role"].startswith("teacher")]
    os.kill(teacher["pid"], signal.SIGKILL)
    finish_well(process)
    last = read_lines(run_dir / "metrics.jsonl")[-1]
    assert last["faults/detected_teacher"] == last["faults/recovered_teacher"] == 1
    assert last["dropped/unscored"] == 0
    check_ledger(run_dir)


ANSWER = ("teachers.own.prompt=$answer$prompt",)
SIBLING = (
    "teachers.own.prompt=$sibling$prompt",
    "data.reward={kind: python, factory: tests.support.own_rewards.odd_length}",
)
HAS_ENDED = ("checkpoint.every_steps=4", "buffer.keep_groups=false")
NUM_STEPS = 8


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "more"), [("live", ANSWER), ("{every: 2}", SIBLING), ("{ema: 0.5}", ANSWER + HAS_ENDED)]
)
def test_a_teacher_that_moves_follows_the_policy(
    config_file: Path, tmp_path: Path, source: str, more: tuple[str, ...]
) -> None:
    """Self-distillation: the policy's own weights, which read more, teach it as they change."""
    run_dir = tmp_path / "run"
    moving = (f"teachers.own.source={source}", "teachers.own.model_path=null", *more)
    lengths = ("teachers.own.max_context_length=160", "model.max_context_length=150")
    overrides = (f"run_dir={run_dir}", *moving, *lengths, "max_off_policy_steps=1")
    finish_well(start(config_file, *overrides, f"max_steps={NUM_STEPS}", app="apps.distill"))
    _, *lines = read_lines(run_dir / "metrics.jsonl")
    served = [line["teacher/served_version"] for line in lines]
    assert served == sorted(served) and served[-1] >= 4
    assert all(version % 2 == 0 for version in served) or "every" not in source
    for line in lines:
        assert line.get("teacher/version", 0.0) <= line["teacher/served_version"]
        assert line["teacher/num_failed"] == line["dropped/unscored"] == 0
        assert ("teacher/gap_abs_mean" in line) == (line["teacher/taught_share"] > 0)
    assert lines[0]["teacher/version"] == 0 < lines[-1]["teacher/version"]
    assert lines[-1]["teacher/num_updates"] >= 2
    if more == SIBLING:
        shares = [line["teacher/taught_share"] for line in lines]
        assert min(shares) < 1.0 and max(shares) > 0.0, "some had a sibling that was correct, some had not"
        assert lines[-1]["teacher/num_without_sibling"] > 0
    else:
        assert all(line["teacher/taught_share"] == 1.0 for line in lines)
    check_ledger(run_dir)
    if more == ANSWER + HAS_ENDED:
        goes_on_where_it_was(config_file, run_dir, overrides)


def goes_on_where_it_was(config_file: Path, run_dir: Path, overrides: tuple[str, ...]) -> None:
    """A resumed run's teacher has the average of the checkpoint before it is asked anything."""
    longer = (*overrides, f"max_steps={NUM_STEPS + 2}", "--resume", "latest")
    finish_well(start(config_file, *longer, app="apps.distill"))
    lines = read_lines(run_dir / "metrics.jsonl")[NUM_STEPS + 1 :]
    assert len(lines) == 2
    for line in lines:
        assert line["teacher/version"] >= NUM_STEPS, "no group was seen by what a teacher begins with"
        assert line["teacher/num_failed"] == line["dropped/unscored"] == 0
    check_ledger(run_dir)


@pytest.mark.exhaustive
def test_a_fleet_has_teachers_that_follow_what_it_publishes(config_file: Path, tmp_path: Path) -> None:
    """A loop of one's own: the first step is made under the teacher's weights, and the second too."""
    lengths = ("teachers.own.max_context_length=160", "model.max_context_length=150")
    moving = ("teachers.own.source=live", "teachers.own.model_path=null")
    overrides = (f"run_dir={tmp_path / 'run'}", *lengths, *moving, *SAMPLING)
    out = finish_well(start(config_file, *overrides, app="tests.support.taught_fleet"))
    first, second = map(json.loads, out.splitlines()[-2:])
    for step, line in enumerate((first, second)):
        assert line["teacher/gap_abs_mean"] < 1e-4 and line["teacher/taught_share"] == 1.0
        assert line["teacher/version"] == line["teacher/served_version"] == step
        assert line["teacher/num_failed"] == line["num_problems"] == 0
    assert second["teacher/num_updates"] == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("teachers.own.model_path=/nowhere", "teachers.own.model_path"),
        ("model.max_context_length=160", "model.max_context_length + 1 = 161"),
        ("teachers.own.prompt=$hint", "has $hint, which task"),
        ("algorithm.terms=[{kind: topk_kl, top_k: 500}]", "the vocabulary of teacher own"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    config_file: Path, tmp_path: Path, override: str, said: str
) -> None:
    run_dir = tmp_path / "run"
    code, _, err = run_here("--config", str(config_file), f"run_dir={run_dir}", override)
    assert code == 2 and said in err, err
    assert not run_dir.exists()
