"""The profile of a machine: what is refused of its file, and what lies between its points."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.plugins.simulator import (
    Distribution,
    TrainPoint,
    TrainTable,
    fit_lengths,
    read_profile,
    write_profile,
)
from forgeasync.schema import ConfigError
from tests.plugins.simulator.made_engines import decode_table
from tests.support.profiles import simple_profile


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = simple_profile(score_s=0.1, swap_s=1 / 3)
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format_version",), 12, ["format_version = 12", "must be 13: read the run again"]),
        (("decode", 0, "step_s"), 0.0, ["decode[0].step_s = 0.0", "greater than 0"]),
        (("decode", 1, "num_running"), 1, ["decode: 2 points", "every pair"]),
        (("train", 0, "cost"), "7", ["train[0].cost = '7'", "number"]),
        (("score_s", "quantiles"), [1.0, 0.5], ["score_s", "quantiles[0] = 1", "ascend"]),
        (("score_s", "mean"), float("nan"), ["score_s.mean", "finite"]),
        (("cores",), 1.0, ["cores = 1.0", "not permitted"]),
        (("lengths", "chain_sum", "response", "quantiles"), [0.0, 99.0], ["lengths.chain_sum", "at least 1"]),
    ],
)
def test_an_impossible_number_is_refused_by_its_field(
    tmp_path: Path, path: tuple[str | int, ...], value: object, words: list[str]
) -> None:
    values = json.loads(simple_profile().model_dump_json())
    node = values
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    file = tmp_path / "p.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as refused:
        read_profile(file)
    for word in (str(file), *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "[" * 10_000, None])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"p\.json.*No such file" if text is None else r"p\.json"):
        read_profile(file)


@given(st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=50))
def test_a_distribution_has_the_quantiles_of_its_samples(samples: list[float]) -> None:
    distribution = Distribution.of(samples)
    for probability in (0.0, 0.25, 0.5, 1.0):
        expected = pytest.approx(np.quantile(samples, probability), rel=1e-9, abs=1e-9)
        assert distribution.at(probability) == expected


def test_decode_steps_are_linear_between_points_in_both_directions() -> None:
    """A plane is what bilinear interpolation has exactly."""
    points = itertools.product((1, 4, 16), (0, 100, 500))
    table = decode_table({(running, context): 1.0 + running + context / 100 for running, context in points})
    for running in (1, 2, 4, 10, 16):
        for context in (0, 50, 100, 300, 500):
            assert table.step_s(running, context) == pytest.approx(1.0 + running + context / 100)
    assert table.num_beyond == 0


def test_beyond_the_points_a_step_goes_on_as_a_line_and_is_counted() -> None:
    table = decode_table({(1, 0): 1.0, (4, 0): 4.0})
    assert table.step_s(8, 0) == pytest.approx(8.0)
    assert table.num_beyond == 1
    falling = decode_table({(1, 0): 4.0, (4, 0): 1.0})
    assert falling.step_s(100, 0) == 1.0


def _train(values: dict[tuple[int, int], float]) -> TrainTable:
    """By rows and tokens."""
    points = [
        TrainPoint(num_rows=rows, cost=tokens, step_s=step_s) for (rows, tokens), step_s in values.items()
    ]
    return TrainTable(points)


def test_a_train_step_is_fitted_by_what_it_costs() -> None:
    sizes = ((1, 500), (2, 900), (4, 4_000), (3, 1_000))
    table = _train({(rows, tokens): 0.5 + 0.045 * rows + 1e-4 * tokens for rows, tokens in sizes})
    assert (table.fixed_s, table.row_s, table.cost_s) == pytest.approx((0.5, 0.045, 1e-4))
    assert _train({(2, 1_000): 3.0}).step_s(4, 2_000) == pytest.approx(6.0), "one point is scaled by its cost"


def test_no_part_of_a_train_step_is_negative() -> None:
    """With noise the unconstrained fit has negative terms, and predicts negative times for long steps."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        sizes = [(int(rng.integers(1, 5)), int(rng.integers(100, 5_000))) for _ in range(4)]
        table = _train({size: float(rng.uniform(0.5, 1.5)) for size in sizes})
        assert min(table.fixed_s, table.row_s, table.cost_s) >= 0.0
        assert table.step_s(1, 100) > 0.0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_alikeness_finds_what_lengths_were_drawn_with(share: float) -> None:
    """Against draws whose correlation within a group is known, through a monotone map that ranks undo."""
    rng = random.Random(3)
    groups = []
    for _ in range(3000):
        of_prompt = share**0.5 * rng.gauss(0.0, 1.0)
        groups.append([2.0 ** (of_prompt + (1 - share) ** 0.5 * rng.gauss(0.0, 1.0)) for _ in range(4)])
    assert fit_lengths([1.0], groups).prompt_share == pytest.approx(share, abs=0.03)


def test_alikeness_without_anything_to_compare() -> None:
    for groups in ([[1.0, 2.0]], [[3.0], [4.0]], [[5.0, 5.0]] * 2, [[1.0, 9.0]] * 3):
        assert fit_lengths([1.0], groups).prompt_share == 0.0
    assert fit_lengths([1.0], [[1.0, 1.0], [9.0, 9.0]]).prompt_share == 1.0
    # Equal lengths share their middle rank: the opposite order of lengths changes nothing.
    one, other = (
        fit_lengths([1.0], [[x, x], [x, y], [y, 9.0]]).prompt_share for x, y in ((16.0, 12.0), (2.0, 6.0))
    )
    assert one == pytest.approx(other) and one > 0.0
