"""benchmarks/learning.py: its runs, and its report on them."""

import json
from pathlib import Path

import learning
import pytest

from forgeasync.config import load_config

NUM_STEPS = 30
VARIANT = learning.Variant(name="age 1", overrides=("max_off_policy_steps=1",))


def write_metrics(run_dir: Path, *, accuracy: float, step_s: float = 2.0, num_steps: int = NUM_STEPS) -> Path:
    """A run that evaluates before and after training, for a second more."""
    lines: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.25, "time/elapsed_s": 0.0}]
    for step in range(1, num_steps + 1):
        line = {
            "step": step,
            "time/elapsed_s": step * step_s + (step == NUM_STEPS),
            "time/step_s": step_s + (step == NUM_STEPS),
            "throughput/train_tokens_per_s": 50.0,
            "time/eval_s": float(step == NUM_STEPS),
            "off_policy/age_mean": 0.5,
            "off_policy/age_max": step % 3,
        }
        lines.append(line)
    if num_steps == NUM_STEPS:
        lines[-1]["eval/accuracy"] = accuracy
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def variants(folder: Path, **accuracies: list[float]) -> dict[str, list[learning.RunResult]]:
    """Runs of variants, by their name, with these accuracies."""

    def run(name: str, seed: int, accuracy: float) -> learning.RunResult:
        return learning.run_result(write_metrics(folder / f"{name}{seed}", accuracy=accuracy), seed)

    return {name: [run(name, *one) for one in enumerate(found)] for name, found in accuracies.items()}


def test_a_run_is_summed_up_by_hand(tmp_path: Path) -> None:
    run = learning.run_result(write_metrics(tmp_path / "run", accuracy=0.5), 7)
    assert run.accuracy_by_step == {0: 0.25, NUM_STEPS: 0.5}
    assert run.minutes[NUM_STEPS] == pytest.approx((2.0 * NUM_STEPS + 1.0) / 60)
    assert run.tokens[0] == 0.0 and run.tokens[2] == pytest.approx(200.0)
    assert run.tokens[NUM_STEPS] == pytest.approx(50.0 * (2.0 * NUM_STEPS + 1.0))
    assert (run.age_mean, run.age_max) == (0.5, 2)


def test_accuracies_come_with_the_tokens_that_were_sampled_by_then(tmp_path: Path) -> None:
    header, *rows = learning.accuracy_table(variants(tmp_path, a=[0.4, 0.5], b=[0.3]))
    assert header[3:] == ["0 steps", f"{NUM_STEPS} steps"]
    before = "25.0% (25.0-25.0) 0k"
    assert rows == [
        ["a", "2", "0.50 / 2", before, "45.0% (40.0-50.0) 3k"],
        ["b", "1", "0.50 / 2", before, "30.0% (30.0-30.0) 3k"],
    ]


@pytest.mark.parametrize("name", list(learning.COMPARISONS))
def test_a_comparison_names_configs_that_are_there_and_variants_that_differ(name: str) -> None:
    compared, _ = learning.COMPARISONS[name]
    assert len({one.name for one in compared}) == len(compared)
    for one in compared:
        load_config(str(one.config), one.overrides)


def test_plot_of_runs_of_unequal_speed_is_a_png(tmp_path: Path) -> None:
    runs = [
        learning.run_result(write_metrics(tmp_path / f"seed{seed}", accuracy=0.5, step_s=step_s), seed)
        for seed, step_s in enumerate([1.0, 3.0])
    ]
    out = tmp_path / "learning.png"
    for _, against in learning.COMPARISONS.values():
        out.unlink(missing_ok=True)
        learning.plot_variants({"a": runs}, out, against)
    assert out.read_bytes().startswith(b"\x89PNG")


def prepared(folder: Path, *, num_steps: int = NUM_STEPS, extra: tuple[str, ...] = ()) -> Path:
    run_dir = write_metrics(folder / "age_1-seed3", accuracy=0.5, num_steps=num_steps)
    started_with = [*VARIANT.overrides, "seed=3", f"max_steps={NUM_STEPS}", *extra]
    (run_dir / learning.OVERRIDES_FILE).write_text("\n".join(started_with))
    return run_dir


def test_a_complete_run_is_not_run_again_and_refused_with_other_overrides(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path)
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert learning.ensure_run(VARIANT, 3, NUM_STEPS, tmp_path, ()) == run_dir
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="delete it or choose another --folder"):
        learning.ensure_run(VARIANT, 3, NUM_STEPS + 1, tmp_path, ())


@pytest.mark.processes
def test_a_run_that_was_cut_short_starts_afresh(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path, num_steps=NUM_STEPS - 1, extra=("no_such_key=1",))
    # The app refuses the unknown key before it starts anything: what is left shows what the driver did.
    with pytest.raises(RuntimeError, match="no_such_key"):
        learning.ensure_run(VARIANT, 3, NUM_STEPS, tmp_path, ("no_such_key=1",))
    assert [path.name for path in run_dir.iterdir()] == [learning.OVERRIDES_FILE]
