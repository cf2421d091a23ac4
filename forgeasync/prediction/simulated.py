"""Predictions of one config: the run, what single changes would bring, and the fastest split of its GPUs."""

from collections.abc import Iterator, Mapping

from forgeasync.config import ModelFacts, RunConfig
from forgeasync.planning import plan_splits
from forgeasync.prediction.profile_checks import origin_words, profile_of
from forgeasync.prediction.record import (
    HOW_TO_PREDICT,
    NUM_SIMULATED_STEPS,
    PredictedChange,
    PredictedChanges,
    PredictedRun,
    PredictedSplit,
    Prediction,
)
from forgeasync.profile import Profile, fit_lengths
from forgeasync.schema import Section
from forgeasync.simulation import Prediction as SimulatedRun
from forgeasync.simulation import of_config, simulate, what_if

LEAST_GROUPS = 8
"""A source with fewer recent groups keeps the lengths that it had."""


class SampledLengths(Section):
    """Tokens of the recent groups of one source."""

    prompts: tuple[int, ...]
    """One for each group."""
    responses: tuple[tuple[int, ...], ...]
    """Of each group."""


def with_lengths(profile: Profile, recent: Mapping[str, SampledLengths]) -> Profile:
    """Return a profile with lengths fitted to recent groups, of sources that have enough of them."""
    fitted = {
        source: fit_lengths(
            [float(num) for num in one.prompts],
            [[float(max(1, num)) for num in group] for group in one.responses],
        )
        for source, one in recent.items()
        if len(one.prompts) >= LEAST_GROUPS
    }
    return profile.model_copy(update={"lengths": dict(profile.lengths) | fitted})


def predict_run(config: RunConfig, facts: ModelFacts, profile: Profile) -> PredictedRun:
    """Simulate a run as its config has it."""
    run = of_config(config, facts, profile, num_steps=_num_steps(config))
    return _predicted(simulate(run, profile))


def prediction_words(config: RunConfig, facts: ModelFacts) -> list[str]:
    """Return what is predicted of a checked config before it starts, or how to have it predicted."""
    if config.prediction is None:
        return [f"predicted: nothing, without a profile; {HOW_TO_PREDICT}"]
    profile = profile_of(config, facts)
    run = predict_run(config, facts, profile)
    source = f"{config.prediction.profile}, {origin_words(profile)}"
    return [f"predicted: {run.words} ({source})", *(f"note: {note}" for note in run.notes)]


def predictions(
    config: RunConfig, facts: ModelFacts, profile: Profile, *, after_step: int, gpu_bytes: int
) -> Iterator[Prediction]:
    """Simulate a run; then with each single change too; then the splits of its GPUs too.

    ``after_step`` is the newest one whose groups the profile's lengths are from, ``gpu_bytes`` the memory of
    a GPU.

    Raises:
        ConfigError: no split fits into memory.
    """
    found = Prediction(
        after_step=after_step,
        num_replicas=config.generator.num_replicas,
        run=predict_run(config, facts, profile),
    )
    yield found
    found = found.model_copy(update={"changes": _changes(config, facts, profile)})
    yield found
    split = _split(config, facts, profile, found.run, gpu_bytes=gpu_bytes)
    yield found.model_copy(update={"split": split})


def _changes(config: RunConfig, facts: ModelFacts, profile: Profile) -> PredictedChanges:
    found = what_if(of_config(config, facts, profile, num_steps=_num_steps(config)), profile)
    return PredictedChanges(
        verdict=found.verdict,
        changes=tuple(
            PredictedChange(name=gain.change.name, before_s=gain.before_s, after_s=gain.after_s)
            for gain in found.gains
        ),
    )


def _split(
    config: RunConfig, facts: ModelFacts, profile: Profile, own: PredictedRun, *, gpu_bytes: int
) -> PredictedSplit:
    """The fastest of the splits of the GPUs that the run has (on CPUs of its procs)."""
    generator = config.generator
    plan = plan_splits(
        config,
        facts,
        lambda split: profile,
        num_gpus=config.trainer.parallel.num_procs + generator.num_engines * generator.tensor_parallel,
        num_steps=_num_steps(config),
        gpu_bytes=gpu_bytes,
    )
    fastest = plan.splits[0]
    return PredictedSplit(
        overrides=fastest.overrides(),
        # Simulated in the same way: the config is one of the splits.
        own_tokens_per_s=own.trained_tokens_per_s,
        tokens_per_s=fastest.tokens_per_s,
    )


def _predicted(found: SimulatedRun) -> PredictedRun:
    return PredictedRun(
        step_s=found.step_s,
        trained_tokens_per_s=found.trained_tokens_per_s,
        trainer_idle_share=min(1.0, found.trainer_idle_share),
        generators_idle_share=found.generators_idle_share,
        mean_age=found.mean_age,
        notes=tuple(found.notes()),
    )


def _num_steps(config: RunConfig) -> int:
    return min(config.max_steps, NUM_SIMULATED_STEPS)
