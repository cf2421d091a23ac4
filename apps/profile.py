"""Profiles the parts of a run, and plans how to split GPUs between training and generation.

    python -m apps.profile --config FILE [--config FILE ...] [key.path=value ...] [--out FILE]
    python -m apps.profile --run RUN_DIR --out FILE
    python -m apps.profile --plan --gpus N (--profile FILE | --response-tokens MEAN)
        --config FILE [--config FILE ...] [key.path=value ...]

The first form starts the run's processes, makes a few steps with the loops of apps/grpo.py, times each part
while the others are idle, and writes a profile (docs/profiling.md). The second form starts nothing and reads
the times from the folder of a run. Both print the estimated effect of single changes. The third form
simulates the run (docs/simulation.md), prints the Pareto-optimal splits by throughput, age of the data and
GPUs, and recommends one. ``--profile`` is the file of a profile. ``--response-tokens`` needs no profile: it
plans for H100s from their data sheet, for responses of that mean length.

Exit code: 0; 1 if a part could not be measured; 2 with the reason if the config, the run, the profile or the
number of GPUs is refused.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from forgeasync.config import ModelFacts, RunConfig, load_config, longest_response, resolve
from forgeasync.models import read_model_facts
from forgeasync.planning import GPU_GIB
from forgeasync.plugins.simulator import (
    ProfileOf,
    plan_splits,
    print_plan,
    print_profiled_run,
    profile_run,
    read_profile,
    stated_profile,
    write_profile,
)
from forgeasync.schema import EXIT_REFUSED, ConfigError, Problem

NUM_STEPS = 30
"""Number of simulated steps per split; means exclude the first third."""


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = _arguments(given)
    if arguments.run is not None:
        return _read(arguments.run, arguments.out)
    return _plan(arguments) if arguments.plan else _measure(arguments)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m apps.profile", description="Measures a profile, or plans the split of GPUs."
    )
    parser.add_argument("--config", action="append", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of the profile; default: in runs/")
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="read the times from the folder of a run")
    parser.add_argument("--plan", action="store_true", help="print splits and recommend one")
    parser.add_argument("--gpus", type=_positive, help="GPUs of the run; on CPUs its processes")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--profile", type=Path, metavar="FILE", help="the file of a profile")
    source.add_argument(
        "--response-tokens", type=float, metavar="MEAN", help="plan for stated H100s and responses like these"
    )
    arguments = parser.parse_intermixed_args(given)
    has_source = arguments.profile is not None or arguments.response_tokens is not None
    if arguments.run is not None:
        if arguments.out is None:
            parser.error("--run: needs --out")
        if arguments.plan or arguments.config or arguments.overrides:
            parser.error("--run: takes the config of the run; leave --plan, --config and overrides away")
    elif not arguments.config:
        parser.error("the following arguments are required: --config")
    if arguments.plan and (arguments.gpus is None or not has_source):
        parser.error("--plan: needs --gpus, and --profile or --response-tokens")
    if arguments.plan and arguments.out is not None:
        parser.error("--out: is of a profile that is measured; leave --plan away")
    if not arguments.plan and (arguments.gpus is not None or has_source):
        parser.error("--gpus, --profile and --response-tokens: are for --plan")
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if not 2 <= number <= 65536:
        raise argparse.ArgumentTypeError(f"{text} must be from 2, one that trains and one that generates")
    return number


def _measure(arguments: argparse.Namespace) -> int:
    # Imported here because they import torch and Monarch, which a plan does not need.
    from apps.grpo import GrpoRun
    from forgeasync.controller import exit_code
    from forgeasync.plugins.simulator import profile_config

    return exit_code(
        lambda: profile_config(load_config(arguments.config, arguments.overrides), arguments.out, GrpoRun)
    )


def _read(run_dir: Path, out: Path) -> int:
    try:
        found = profile_run(run_dir)
        write_profile(found.profile, out)
    except (ConfigError, OSError) as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    print_profiled_run(found)
    print(f"wrote {out}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
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
    print_plan(plan, is_stated=arguments.profile is None)
    return 0


def _profile_of(config: RunConfig, facts: ModelFacts, file: Path | None, mean: float | None) -> ProfileOf:
    if file is not None:
        profile = read_profile(file)
        return lambda split: profile
    assert mean is not None, "the parser wants one of them"
    if not 1.0 <= mean <= longest_response(config):
        remedy = f"must be from 1 to {longest_response(config)}, the longest response of the config"
        raise ConfigError([Problem(field="--response-tokens", value=mean, remedy=remedy)])
    return functools.partial(stated_profile, facts=facts, mean_response_tokens=mean)


if __name__ == "__main__":
    sys.exit(main())
