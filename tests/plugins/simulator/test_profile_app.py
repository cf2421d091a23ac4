"""``python -m apps.profile`` on a tiny run, and what the simulator makes of its file."""

import json
from pathlib import Path
from typing import NoReturn

import pytest

from forgeasync.config import dump_config
from forgeasync.models import read_model_facts
from forgeasync.plugins.simulator import Origin, of_config, profile_config, read_profile, simulate
from forgeasync.schema import ConfigError, Problem
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.app_runs import finish, start


def no_loops(*_: object) -> NoReturn:
    raise AssertionError("nothing starts")


@pytest.mark.parametrize(
    ("out", "remedy"),
    [
        (".", "is a folder; must be a file"),
        ("missing/profile.json", "its folder does not exist; must be a file in a folder that does"),
        (
            "n" * 300 + ".json",
            "cannot be written: File name too long; must be a file in a folder that can be written",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, out: str, remedy: str
) -> None:
    config = tiny_config(tmp_path / "model")
    with pytest.raises(ConfigError) as refused:
        profile_config(config, tmp_path / out, no_loops)
    (problem,) = refused.value.problems
    assert problem == Problem(field="--out", value=str(tmp_path / out), remedy=remedy)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_config_is_profiled_and_simulated(tmp_path: Path) -> None:
    config = tiny_config(write_tiny_model(tmp_path / "model", scale=8.0))
    file, out = tmp_path / "run.yaml", tmp_path / "profile.json"
    file.write_text(dump_config(config))
    code, said, err = finish(start(file, "--out", str(out), app="apps.profile"))
    assert code == 0, err
    *_, verdict, last = said.splitlines()
    assert last == f"wrote {out}" and "decode steps on" in said
    assert verdict.endswith("s a step") and "one more replica" in said and "predicted: " in said
    profile = read_profile(out)
    assert profile.origin is Origin.MEASURED and profile.measured_at
    assert {one.num_running for one in profile.decode} == {1, 2, 4, 8, 16, 32}
    assert {one.num_context_tokens for one in profile.decode} == {16 + 8, 160 - 17 + 8}
    assert all(one.step_s.num_samples == 4 for one in profile.decode), "a round at each of four moments"
    assert all(one.step_s.num_samples in (3, 9) for one in profile.train), "the run's own more often"
    assert len({one.num_tokens for one in profile.train}) >= 3
    (lengths,) = profile.lengths.values()
    assert 1 <= lengths.response.quantiles[0] and lengths.response.quantiles[-1] <= 24
    assert profile.setup.num_data_ranks == 2 and profile.hardware.packages["torch"]
    # vLLM's CPU attention has such blocks; what an engine does not say would be 1.
    assert profile.setup.kv_block_tokens % 16 == 0 and 0.0 < profile.response_s.mean < 1.0
    assert "steps of this run took" in said and "simulated with this" in said
    # Responses of whole steps cost more than those that are sampled and scored and nothing else.
    assert profile.loops_s.mean > 0 and profile.between_steps_s.mean.mean > 0
    assert profile.environment is None and profile.cores.trainer > 0 and profile.cores.generator > 0
    assert profile.weights.swap_s.mean.mean < profile.start_s.mean
    prediction = simulate(of_config(config, read_model_facts(config.model.path), profile), profile)
    assert len(prediction.steps) == config.max_steps
    assert json.loads(out.read_text())["format_version"] == 10
