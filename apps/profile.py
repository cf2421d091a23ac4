"""Says how many GPUs should train and how many generate, by simulating the run.

    python -m apps.profile --plan --gpus N (--profile FILE | --response-tokens MEAN)
        --config FILE [--config FILE ...] [key.path=value ...]

``--profile`` is the file of a measured profile. ``--response-tokens`` plans for H100s that are not here, by
arithmetic on what their maker states, for responses of that mean length. Prints the splits that no other
beats in throughput, age of the data and GPUs at once, and recommends one (docs/simulation.md). It starts
nothing.

Exit code: 0; 2 with the reason if the config, the profile or the number of GPUs is refused.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forgeasync.config.load import load_config
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig, longest_response, resolve
from forgeasync.models.config_file import read_model_facts
from forgeasync.planning.layouts import GPU_GIB
from forgeasync.planning.splits import ProfileOf, Split, SplitPlan, plan_splits
from forgeasync.planning.stated_profile import stated_profile
from forgeasync.profile.profile_file import read_profile
from forgeasync.schema.problems import EXIT_REFUSED, ConfigError, Problem

NUM_STEPS = 30
"""Steps that each split is simulated for; the first third is left out of the means."""


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.profile", description="Plans the split of GPUs.")
    parser.add_argument("--plan", action="store_true", required=True, help="print splits and recommend one")
    parser.add_argument("--gpus", type=_positive, required=True, help="GPUs of the run; on CPUs its procs")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, metavar="FILE", help="a measured profile")
    source.add_argument(
        "--response-tokens", type=float, metavar="MEAN", help="plan for stated H100s and responses like these"
    )
    parser.add_argument("--config", action="append", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args(given)
    try:
        config = load_config(arguments.config, arguments.overrides)
        facts = read_model_facts(config.model.path)
        config = resolve(config, facts)
        profile_of = _profile_of(config, facts, arguments.profile, arguments.response_tokens)
        plan = plan_splits(
            config,
            facts,
            profile_of,
            num_gpus=arguments.gpus,
            num_steps=NUM_STEPS,
            gpu_bytes=round(GPU_GIB * 2**30),
        )
    except ConfigError as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    _show(plan, is_stated=arguments.profile is None)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if not 2 <= number <= 65536:
        raise argparse.ArgumentTypeError(f"{text} must be from 2, one that trains and one that generates")
    return number


def _profile_of(config: RunConfig, facts: ModelFacts, file: Path | None, mean: float | None) -> ProfileOf:
    if file is not None:
        profile = read_profile(file)
        return lambda split: profile
    assert mean is not None, "the parser wants one of them"
    if not 1.0 <= mean <= longest_response(config):
        remedy = f"must be from 1 to {longest_response(config)}, the longest response of the config"
        raise ConfigError([Problem(field="--response-tokens", value=mean, remedy=remedy)])
    return functools.partial(stated_profile, facts=facts, mean_response_tokens=mean)


def _show(plan: SplitPlan, *, is_stated: bool) -> None:
    console = Console()
    origin = "stated hardware, nothing of it measured" if is_stated else "measured profile"
    counted = f"{len(plan.splits)} simulated, {plan.num_refused} refused"
    table = Table(
        title=f"splits that no other one beats ({origin}; {counted})",
        caption="GPUs that train, replicas x GPUs that generate, max_off_policy_steps; seconds a step, "
        "tokens trained a second, mean age in versions; shares of time that trainer and generators wait",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("", "train", "generate", "bound", "step", "tokens/s", "age", "wait", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for split in plan.front:
        table.add_row("*" if split is plan.chosen else "", *_cells(split))
    if plan.chosen not in plan.front:
        table.add_row("*", *_cells(plan.chosen))
    console.print(table)
    console.print(f"recommended: {plan.chosen.overrides()}", soft_wrap=True, highlight=False)
    console.print(f"because {plan.reason}", soft_wrap=True, highlight=False)
    for note in plan.chosen.prediction.notes():
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _cells(split: Split) -> tuple[str, ...]:
    prediction = split.prediction
    return (
        str(split.num_trainer),
        f"{split.config.generator.num_replicas} x {split.config.generator.tensor_parallel}",
        str(split.config.max_off_policy_steps),
        f"{prediction.step_s:.3g}",
        f"{prediction.trained_tokens_per_s:,.0f}",
        f"{prediction.mean_age:.1f}",
        f"{prediction.trainer_idle_share:.0%}",
        f"{prediction.generators_idle_share:.0%}",
    )


if __name__ == "__main__":
    sys.exit(main())
