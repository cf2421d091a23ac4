"""Whether a profile can say anything of a run: the facts that both have must be the same."""

from collections.abc import Iterator
from pathlib import Path

from forgeasync.config import ModelFacts, RunConfig
from forgeasync.profile import Origin, Profile, read_profile
from forgeasync.schema import ConfigError, Problem, raise_if_any
from forgeasync.simulation import of_config

FIELD = "prediction.profile"


def profile_of(config: RunConfig, facts: ModelFacts) -> Profile:
    """Read the profile of a config that has a ``prediction`` section.

    Raises:
        ConfigError: it cannot be read, or was taken of something else than this config.
    """
    assert config.prediction is not None
    profile = read_profile(Path(config.prediction.profile))
    raise_if_any(_contradictions(config, profile))
    try:
        of_config(config, facts, profile)
    except ConfigError as error:
        raise ConfigError(
            Problem(field=f"{FIELD}: {one.field}", value=one.value, remedy=one.remedy)
            for one in error.problems
        ) from None
    return profile


def check_prediction(config: RunConfig, facts: ModelFacts) -> list[Problem]:
    """Return what is wrong with the profile that a config names; empty without one."""
    if config.prediction is None:
        return []
    if config.teachers:
        remedy = "must be left out of a run with teachers: they are not simulated"
        return [Problem(field="prediction", value=config.prediction.profile, remedy=remedy)]
    try:
        profile_of(config, facts)
    except ConfigError as error:
        return list(error.problems)
    return []


def origin_words(profile: Profile) -> str:
    """Say when and where a profile was measured."""
    if profile.origin is Origin.STATED:
        return f"stated, not measured: {'; '.join(profile.sources)}"
    hardware = profile.hardware
    return f"measured {profile.measured_at} on {hardware.host} ({', '.join(hardware.gpus) or hardware.cpu})"


def _contradictions(config: RunConfig, profile: Profile) -> Iterator[Problem]:
    parallel, setup = config.trainer.parallel, profile.setup
    if Path(config.model.path).resolve() != Path(setup.model).resolve():
        yield _other("model.path", config.model.path, setup.model)
    # The number of replicas may be another one: a profile has the times of one of them.
    for field, own, measured in (
        ("trainer.parallel.num_procs", parallel.num_procs, setup.num_trainer_procs),
        ("trainer data ranks", parallel.data_shard * parallel.data_replicate, setup.num_data_ranks),
        ("trainer.dtype", config.trainer.dtype.value, setup.trainer_dtype),
        ("generator.tensor_parallel", config.generator.tensor_parallel, setup.tensor_parallel),
        ("generator.dtype", config.generator.dtype.value, setup.generator_dtype),
    ):
        if own != measured:
            yield _other(field, own, measured)


def _other(field: str, own: object, measured: object) -> Problem:
    remedy = (
        f"was taken with {field} = {measured}, and the config has {own}; must be a profile of this config"
    )
    return Problem(field=FIELD, remedy=remedy)
