"""Reads the times of a run, and plans how to split GPUs between training and generation.

    python -m apps.profile --run RUN_DIR --out FILE
    python -m apps.profile --plan --gpus N (--profile FILE | --response-tokens MEAN)
        --config FILE [--config FILE ...] [key.path=value ...]

The first form reads how long each part took in a run, writes a profile (docs/profiling.md), and prints the
predicted effect of single changes of the run. The second form simulates a config (docs/simulation.md), prints
the Pareto-optimal splits by throughput, age of the data and GPUs, and recommends one. ``--profile`` is the
file of a profile. ``--response-tokens`` needs no profile: it plans for H100s from their data sheet, for
responses of that mean length.

Exit code: 0; 2 with the reason if the run, the config, the profile or the number of GPUs is refused.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from forgeasync.config import ModelFacts, RunConfig, load_config, longest_response, resolve
from forgeasync.controller import config_parser, parse_command_line
from forgeasync.models import read_model_facts
from forgeasync.observability import exit_with
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
    try:
        if arguments.plan:
            _plan(arguments)
        else:
            _read(arguments.run, arguments.out)
    except (ConfigError, OSError) as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = config_parser("Measure a run, or plan how to split GPUs.", needs_config=False)
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="folder of the run to measure")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write the profile to")
    parser.add_argument("--plan", action="store_true", help="compare splits of --gpus and recommend one")
    parser.add_argument("--gpus", type=_positive, help="number of GPUs; on CPUs, of processes")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--profile", type=Path, metavar="FILE", help="profile to plan with")
    source.add_argument(
        "--response-tokens", type=float, metavar="MEAN", help="plan for H100s and this mean response length"
    )
    arguments = parse_command_line(parser, given)
    has_source = arguments.profile is not None or arguments.response_tokens is not None
    if arguments.plan:
        if not arguments.config or arguments.gpus is None or not has_source:
            parser.error("--plan: needs --config, --gpus, and --profile or --response-tokens")
        if arguments.run is not None or arguments.out is not None:
            parser.error("--run and --out: read a run; omit --plan")
    else:
        if arguments.run is None or arguments.out is None:
            parser.error("needs --run with --out, or --plan")
        if arguments.config or arguments.overrides or arguments.gpus is not None or has_source:
            parser.error("--config, overrides, --gpus, --profile and --response-tokens: are for --plan")
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if not 2 <= number <= 65536:
        raise argparse.ArgumentTypeError(f"{text} must be from 2, one that trains and one that generates")
    return number


def _read(run_dir: Path, out: Path) -> None:
    found = profile_run(run_dir)
    write_profile(found.profile, out)
    print_profiled_run(found)
    print(f"wrote {out}")


def _plan(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    facts = read_model_facts(config.model.path)
    config = resolve(config, facts)
    plan = plan_splits(
        config,
        facts,
        _profile_of(config, facts, arguments.profile, arguments.response_tokens),
        num_gpus=arguments.gpus,
        num_steps=NUM_STEPS,
        gpu_bytes=round(GPU_GIB * 2**30),
    )
    print_plan(plan, is_stated=arguments.profile is None)


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
    exit_with(main)
