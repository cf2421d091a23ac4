"""Metrics: what a key means, and how a step's numbers reach metrics.jsonl and TensorBoard."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgeasync.files import read_json_lines
from forgeasync.observability import (
    METRICS,
    REQUIRED_KEYS,
    MetricsWriter,
    ProblemScores,
    batch_metrics,
    definition_of,
    markdown,
    mean_score,
    pass_at_k,
    proportion,
    summarize,
    undefined,
)
from tests.support.disks import Disk, install
from tests.support.step_records import TRAINER, make_groups, make_held_out, make_step

# --- definitions ---


REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_what_the_definitions_say() -> None:
    written = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == markdown(), "docs/metrics.md is out of date: run `make docs`"


def test_every_key_is_defined_once_in_a_sentence_of_its_own() -> None:
    assert len({one.key for one in METRICS}) == len(METRICS)
    for metric in METRICS:
        first = metric.meaning.split()[0]
        assert metric.meaning.endswith(".") and not first.islower(), metric
        assert first not in ("And", "The", "Of", "Likewise"), f"{metric.key} leans on the row above it"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format", "reward/<part>"),
        ("eval/reward/format", "eval/reward/<part>"),
        ("eval/hard/reward/format", "eval/<set>/reward/<part>"),
        ("eval/hard.v2/accuracy", "eval/<set>/accuracy"),
        ("routing/disagreement_share_layer_03", "routing/disagreement_share_layer_<i>"),
        ("correction/weight_max", "correction/weight_max"),
        ("correction/masked_share", "correction/<name>"),
        ("reward/", None),
        ("reward/brief/right", "reward/<part>"),
        ("score/brief/right", "score/<part>"),
        ("eval/reward/brief/right", "eval/reward/<part>"),
        ("eval/hard/reward/brief/right", "eval/<set>/reward/<part>"),
        ("correction/a/b", None),
        ("eval/hard/speed", None),
        ("xloss", None),
        ("buffer/num_of_my_own", None),
    ],
)
def test_keys_find_their_definition(key: str, expected: str | None) -> None:
    found = definition_of(key)
    assert (None if found is None else found.key) == expected
    assert undefined([key]) == ([key] if expected is None else [])


def test_keys_in_the_code_are_defined() -> None:
    """Keys that only some run writes too; whole runs are checked where they are tested."""
    prefixes = {metric.key.partition("/")[0] for metric in METRICS if "/" in metric.key}
    literal = re.compile(rf'"((?:{"|".join(sorted(prefixes))})/[a-z_]+)"')
    found = {
        key
        for room in ("forgeasync", "apps")
        for file in (REPOSITORY / room).rglob("*.py")
        for key in literal.findall(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 100
    # Counted on the way to a mean, and taken out again.
    assert undefined(found - {"mismatch/num_fresh"}) == []


# --- a step ---


def test_step_metrics_by_hand() -> None:
    metrics = make_step()
    assert {key for key in metrics if not key.startswith("dropped/")} == REQUIRED_KEYS
    metrics = make_step(accuracy=0.25)
    assert undefined(metrics) == []

    expected = {
        "eval/score_mean": 0.25 + 0.75 / 4,
        "reward/std": np.sqrt(3) / 4,
        # Trained on version 4: 1 token of version 3, 4 tokens of version 2, 11 of version 4.
        "off_policy/age_mean": (1 * 1 + 4 * 2) / 16,
        "off_policy/age_max": 2,
        "response/length_mean": 4.0,
        "response/length_min": 2,
        "response/length_max": 6,
        "response/truncated_share": 0.25,
        "dropped/too_old": 3,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("version", "max_token_age", "mean", "oldest"),
    [(4, 2, 9 / 16, 2), (4, 1, 1 / 12, 1), (4, 0, 0.0, 0), (9, 1, 89 / 16, 7)],
)
def test_ages_are_those_of_trained_tokens(version: int, max_token_age: int, mean: float, oldest: int) -> None:
    metrics = batch_metrics(make_groups(), trained_version=version, max_token_age=max_token_age)
    assert (metrics["off_policy/age_mean"], metrics["off_policy/age_max"]) == (pytest.approx(mean), oldest)


# --- metrics.jsonl ---


def test_missing_key_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    metrics = make_step()
    del metrics["loss"], metrics["time/elapsed_s"]
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        with pytest.raises(KeyError, match="loss, time/elapsed_s"):
            writer.write(metrics)
    assert read_json_lines(tmp_path / "m.jsonl") == []


def test_nonfinite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    broken = {**TRAINER, "loss": float("nan"), "grad_norm": float("inf")}
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        writer.write(make_step(trainer=broken))
        writer.write(make_step())
    first, second = read_json_lines(tmp_path / "m.jsonl")
    assert first["loss"] is None and first["grad_norm"] is None
    assert first["metrics/num_nonfinite"] == 2
    assert second["loss"] == 0.5 and second["metrics/num_nonfinite"] == 0


def test_lines_that_a_full_disk_refuses_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    disk = Disk(10_000)
    install(monkeypatch, disk)
    with MetricsWriter(path, tensorboard_dir=None) as writer:
        writer.write(make_step(step=1))
        whole = path.read_bytes()
        disk.room = len(whole) + 10
        for step in (2, 3):
            writer.write(make_step(step=step))
            refusal = writer.lines.flush()
            assert refusal is not None and refusal.path == str(path) and "No space" in refusal.reason
            assert path.read_bytes() == whole, "no half of a line"
        disk.room = 100_000
        assert writer.lines.flush() is None
        assert [line["step"] for line in read_json_lines(path)] == [1, 2, 3]
        disk.room = path.stat().st_size
        writer.write(make_step(step=4))
        with pytest.raises(OSError, match=r"m\.jsonl lacks its last \d+ bytes: No space left"):
            writer.close()


# --- TensorBoard ---


def test_tensorboard_gets_every_key(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb") as writer:
        writer.write(make_step(accuracy=0.5))
        # Read before close: a killed run keeps its events as well.
        events = EventAccumulator(str(tmp_path / "tb")).Reload()
        assert set(events.Tags()["scalars"]) == set(read_json_lines(tmp_path / "m.jsonl")[0])
    (event,) = events.Scalars("eval/accuracy")
    assert (event.step, event.value) == (5, 0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_does_not_end_the_run(tmp_path: Path) -> None:
    """Its files are written by a thread of their own, whose error comes with a later value."""
    said: list[str] = []
    folder = tmp_path / "tb"
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=folder, say=said.append) as writer:
        writer.write(make_step(step=1))
        (events,) = folder.iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
        for step in (2, 3, 4):
            writer.write(make_step(step=step))
    lines = read_json_lines(tmp_path / "m.jsonl")
    # The second line could not be written, and was written to another file, with the third.
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [0, 1, 0, 0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    (message,) = said
    assert str(folder) in message and "No space left on device" in message and "written later" in message
    events.unlink()
    written = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in written] == [2, 3, 4]


def test_a_folder_that_tensorboard_cannot_use_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tb").touch()
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb", say=said.append) as writer:
        writer.write_initial_evaluation(make_held_out(accuracy=0.5), eval_s=1.0)
        writer.write(make_step())
    lines = read_json_lines(tmp_path / "m.jsonl")
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [1, 2]
    assert len(said) == 1


# --- pass@k and its intervals ---


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    num_samples, num_correct, k = case
    draws = list(itertools.combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_is_exact() -> None:
    """Binomial coefficients of these numbers are beyond floats."""
    exact = 1 - math.comb(4000 - 7, 1024) / math.comb(4000, 1024)
    assert pass_at_k(4000, 7, 1024) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(4000, 0, 4000) == 0.0 and pass_at_k(4000, 1, 4000) == 1.0


@pytest.mark.parametrize(
    ("num_solved", "low", "high"), [(0, 0.0, 0.2775), (3, 0.1078, 0.6032), (10, 0.7225, 1.0)]
)
def test_with_one_sample_it_is_wilsons_interval(num_solved: int, low: float, high: float) -> None:
    """Of ten problems; the figures are those of R's binom::binom.confint(method = "wilson")."""
    found = proportion([1.0] * num_solved + [0.0] * (10 - num_solved), num_responses=10)
    assert (found.value, found.low, found.high) == pytest.approx((num_solved / 10, low, high), abs=1e-4)


def test_resembling_samples_do_not_count_as_many() -> None:
    """Eight samples of each problem: all alike, or as different as they can be."""
    alike = proportion([1.0, 0.0] * 20, num_responses=320)
    once = proportion([1.0, 0.0] * 20, num_responses=40)
    assert (alike.low, alike.high) == (once.low, once.high)
    different = proportion([0.5] * 40, num_responses=320)
    each = proportion([1.0, 0.0] * 160, num_responses=320)
    assert (different.low, different.high) == pytest.approx((each.low, each.high))


@pytest.mark.parametrize("num_samples", [1, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(num_samples: int) -> None:
    """Problems' chances are from a Beta distribution with mean 0.3."""
    rng = np.random.default_rng(0)
    num_runs = 600
    held_proportion = held_mean = 0
    for run in range(num_runs):
        chances = rng.beta(0.6, 1.4, 60)
        shares = rng.binomial(num_samples, chances) / num_samples
        found = proportion(shares.tolist(), num_responses=60 * num_samples)
        held_proportion += found.low <= 0.3 <= found.high
        if run < 20:
            score = mean_score((10.0 * shares).tolist())
            held_mean += score.low <= 3.0 <= score.high
    assert 0.91 < held_proportion / num_runs < 0.985
    assert held_mean >= 16


def test_scores_of_any_scale_have_an_interval() -> None:
    found = mean_score([100.0, -50.0, 25.0, 25.0])
    assert found.value == 25.0 and -50.0 <= found.low < 25.0 < found.high <= 100.0
    assert mean_score([100.0, -50.0, 25.0, 25.0]) == found, "the same in every process"
    alone = mean_score([3.0])
    assert (alone.value, alone.low, alone.high) == (3.0, None, None) and str(alone) == "3.000"


def test_what_was_not_scored_counts_for_nothing() -> None:
    """Four samples were asked for; the second problem has two scores, the third none."""
    problems = [
        ProblemScores(num_correct=1, values=(2.0, 0.0, 0.0, 0.0)),
        ProblemScores(num_correct=1, values=(4.0, 0.0)),
        ProblemScores(num_correct=0, values=()),
    ]
    summary = summarize(problems, num_samples=4)
    assert (summary.num_problems, summary.num_unscored) == (3, 6)
    assert summary.accuracy.value == pytest.approx((0.25 + 0.5) / 2)
    assert summary.score.value == pytest.approx((0.5 + 2.0) / 2)
    found = {k: (one.value, one.num_problems) for k, one in summary.pass_at.items()}
    assert found == {1: (pytest.approx(0.375), 2), 2: (pytest.approx((0.5 + 1.0) / 2), 2), 4: (1.0, 1)}
    assert summary.record["pass_at"]["4"]["num_problems"] == 1
    nothing = summarize([ProblemScores(num_correct=0, values=())] * 2, num_samples=2)
    assert nothing.accuracy is None and nothing.pass_at == {} and nothing.num_unscored == 4
