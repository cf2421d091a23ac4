"""From a profile to the file of a prediction: what is refused, what is simulated, what can be read again."""

import json
from pathlib import Path

import pytest

from forgeasync.config import RunConfig, load_config
from forgeasync.prediction import (
    PredictionRecord,
    SampledLengths,
    check_prediction,
    prediction_words,
    predictions,
    read_prediction,
    with_lengths,
    write_prediction,
)
from forgeasync.profile import Profile, Setup, write_profile
from forgeasync.schema import ConfigError
from forgeasync.simulation import of_config, simulate, what_if
from tests.support.config_samples import FACTS, MINIMAL
from tests.support.profiles import NO_SETUP, simple_profile

GPU_BYTES = 2**36


def profile_with(**setup: object) -> Profile:
    """A profile of ``MINIMAL`` whose setup differs in some fields."""
    own = NO_SETUP.model_dump() | {"model": "models/none"} | setup
    return simple_profile(lengths=(10.0, 30.0), token_s=1e-6, setup=Setup.model_validate(own))


def config_of(folder: Path, profile: Profile, *overrides: str) -> RunConfig:
    """``MINIMAL`` with a profile."""
    file = folder / "run.yaml"
    file.write_text(MINIMAL)
    write_profile(profile, folder / "profile.json")
    more = ("max_steps=100", "generator.max_num_seqs=4", f"prediction.profile={folder / 'profile.json'}")
    return load_config(file, [*more, *overrides])


def test_the_profile_of_the_config_is_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path, profile_with(), "generator.num_replicas=3")
    assert check_prediction(config, FACTS) == [], "the number of replicas may be another one"
    assert check_prediction(config.model_copy(update={"prediction": None}), FACTS) == []


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"model": "models/other"}, "model.path = models/other, and the config has models/none"),
        ({"num_trainer_procs": 2}, "trainer.parallel.num_procs = 2, and the config has 1"),
        ({"num_data_ranks": 4}, "trainer data ranks = 4, and the config has 1"),
        ({"trainer_dtype": "bfloat16"}, "trainer.dtype = bfloat16, and the config has float32"),
        ({"tensor_parallel": 8}, "generator.tensor_parallel = 8, and the config has 1"),
        ({"generator_dtype": "bfloat16"}, "generator.dtype = bfloat16, and the config has float32"),
    ],
)
def test_a_profile_of_something_else_is_refused_with_both_values(
    tmp_path: Path, setup: dict[str, object], words: str
) -> None:
    (problem,) = check_prediction(config_of(tmp_path, profile_with(**setup)), FACTS)
    assert str(problem).startswith("prediction.profile: was taken with ") and words in str(problem)


def test_a_profile_without_the_lengths_of_a_source_is_refused(tmp_path: Path) -> None:
    profile = profile_with()
    other = profile.model_copy(update={"lengths": {"sums": profile.lengths["chain_sum"]}})
    (problem,) = check_prediction(config_of(tmp_path, other), FACTS)
    assert str(problem).startswith("prediction.profile: lengths = ['sums']") and "'chain_sum'" in str(problem)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, profile_with())
    (tmp_path / "profile.json").write_text("{}")
    (problem,) = check_prediction(config, FACTS)
    assert "has no format_version" in str(problem)
    (tmp_path / "profile.json").unlink()
    (problem,) = check_prediction(config, FACTS)
    assert "cannot be read: No such file" in str(problem)


def test_predictions_get_fuller_and_are_what_the_simulator_says(tmp_path: Path) -> None:
    profile = profile_with()
    config = config_of(tmp_path, profile, "max_off_policy_steps=4")
    run, changes, whole = predictions(config, FACTS, profile, after_step=7, gpu_bytes=GPU_BYTES)
    simulated = simulate(of_config(config, FACTS, profile, num_steps=30), profile)
    assert run.run.step_s == simulated.step_s and run.changes is run.split is None
    assert run.run.trained_tokens_per_s == simulated.trained_tokens_per_s
    found = what_if(of_config(config, FACTS, profile, num_steps=30), profile)
    assert changes.changes is not None and changes.changes.verdict == found.verdict
    assert [one.after_s for one in changes.changes.changes] == [gain.after_s for gain in found.gains]
    assert whole.run == run.run and whole.changes == changes.changes and whole.after_step == 7
    assert whole.split is not None and whole.split.tokens_per_s >= whole.split.own_tokens_per_s


def test_a_run_with_the_wrong_split_has_a_faster_one(tmp_path: Path) -> None:
    """Two procs that train where training takes no time: one of them would generate."""
    profile = profile_with(num_trainer_procs=2, num_data_ranks=2)
    config = config_of(tmp_path, profile, "max_off_policy_steps=4", "trainer.parallel.num_procs=2")
    *_, whole = predictions(config, FACTS, profile, after_step=0, gpu_bytes=GPU_BYTES)
    assert whole.split is not None
    assert whole.split.overrides.startswith("trainer.parallel.num_procs=1 generator.num_replicas=2")
    assert whole.split.tokens_per_s > 1.5 * whole.split.own_tokens_per_s
    assert whole.split.own_tokens_per_s == pytest.approx(whole.run.trained_tokens_per_s)


def test_lengths_are_fitted_to_enough_groups_alone() -> None:
    profile = profile_with()
    few = SampledLengths(prompts=(5,) * 7, responses=((50, 50),) * 7)
    assert with_lengths(profile, {"chain_sum": few}) == profile
    groups = tuple((length, length) for length in range(0, 80, 10))
    many = SampledLengths(prompts=(5,) * 8, responses=groups)
    fitted = with_lengths(profile, {"chain_sum": many}).lengths["chain_sum"]
    assert fitted.prompt.mean.mean == 5.0 and fitted.response.mean.mean == pytest.approx(281 / 8)
    assert fitted.response.quantiles[0] == 1.0, "a response without a token counts as one of one"
    assert fitted.prompt_share == 1.0


def test_longer_responses_take_longer(tmp_path: Path) -> None:
    profile = profile_with()
    config = config_of(tmp_path, profile)
    longer = SampledLengths(prompts=(10,) * 8, responses=((30, 31, 32, 32),) * 8)
    first = next(predictions(config, FACTS, profile, after_step=0, gpu_bytes=GPU_BYTES))
    second = next(
        predictions(
            config, FACTS, with_lengths(profile, {"chain_sum": longer}), after_step=9, gpu_bytes=GPU_BYTES
        )
    )
    assert second.run.step_s > 1.2 * first.run.step_s


def test_before_a_run_its_times_are_said_or_how_to_get_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, profile_with())
    words, *notes = prediction_words(config, FACTS)
    assert words.startswith("predicted: ") and "s a step" in words and "trainer waits" in words
    assert "stated, not measured: a test" in words and not notes
    (how,) = prediction_words(config.model_copy(update={"prediction": None}), FACTS)
    assert "python -m apps.profile" in how


def test_the_file_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prediction.json"
    assert read_prediction(file) is None
    config = config_of(tmp_path, profile_with())
    *_, whole = predictions(config, FACTS, profile_with(), after_step=0, gpu_bytes=GPU_BYTES)
    record = PredictionRecord(profile="p", profile_of="a test", start=whole, newest=whole)
    write_prediction(record, file)
    assert read_prediction(file) == record
    values = json.loads(file.read_text())
    for path, value in ((("newest", "run", "step_s"), "x"), (("format_version",), 3), (("more",), 1)):
        damaged = json.loads(json.dumps(values))
        place = damaged
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        file.write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=rf"prediction.json: .*{path[-1]}"):
            read_prediction(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no prediction of this version"):
        read_prediction(file)
