"""Executes a recorded run again, and compares it bit for bit.

    python -m apps.reexecute RUN [--from STEP] [--to STEP] [key.path=value ...]
    python -m apps.reexecute RUN --token DRAW/ROLLOUT/POSITION

RUN is the folder of a run with ``record_execution: true``. Its steps are made again from its first model, or
from the checkpoint of --from: each token is sampled under the version that sampled it in the run, each group
is scored, and each step trains on the batch that it had. Tokens, log-probabilities, experts, kept sets,
scores, losses, gradient norms and weights must have the recorded bits. The first difference ends the
re-execution and is printed.

Overrides show whether a key matters, for example ``generator.num_replicas=1``. To find the change of the code
that made a difference, execute the run again with different checkouts.

With --token it prints what the record has of one token, which a difference names, and executes nothing.

Exit code: 0 if everything is the same; 1 with the first difference; 2 if the record is refused.
"""

import argparse
import sys
from pathlib import Path

from forgeasync.controller import (
    Fleet,
    Reexecution,
    describe_token,
    exit_code,
    parse_command_line,
    plan_reexecution,
    run_main,
    sample_again,
    score_again,
)
from forgeasync.observability import RecordedStep, exit_with
from forgeasync.rollouts import Group
from forgeasync.schema import EXIT_FAILED
from forgeasync.trainer import StepResult, training_items


async def reexecute(plan: Reexecution) -> str | None:
    """Make the steps of a plan again; return the first difference, or None.

    For each version: generators sample what it sampled; its step trains; generators get the next version.
    """
    async with Fleet.start(plan.config, resume_from=plan.checkpoint) as fleet:
        await fleet.publish()
        if (words := weights_difference(plan, fleet, plan.first_version)) is not None:
            return f"{words} in the checkpoint"
        for step in plan.steps:
            version = step.step - 1
            different = await sample_again(fleet, version, plan.beginning(version), seed=plan.config.seed)
            if different:
                return f"version {version}: group of draw {different[0].draw_id}: {different[0]}"
            groups = plan.batch(step)
            if plan.scores_again and (words := await score_again(fleet, groups)) is not None:
                return f"step {step.step}: {words}"
            items = training_items(groups, step.weights, plan.config.algorithm)
            result = await fleet.train(items)
            if (words := step_difference(step, result)) is not None:
                return f"step {step.step}: {words}"
            await fleet.publish()
            if (words := weights_difference(plan, fleet, step.step)) is not None:
                return words
            print(f"step {step.step}: the same ({num_tokens(groups):,} tokens trained)", flush=True)
    return None


def step_difference(step: RecordedStep, result: StepResult) -> str | None:
    """Describe a loss, gradient norm or reason to skip a step that is not the recorded one; None: all are."""
    for what, recorded, found in (
        ("loss", step.loss, result.metrics.get("loss")),
        ("gradient norm", step.grad_norm, result.metrics.get("grad_norm")),
        ("reason to skip it", step.skip_reason, result.skip_reason),
    ):
        if recorded != found:
            return f"{what}: recorded {recorded!r}, found {found!r}"
    return None


def weights_difference(plan: Reexecution, fleet: Fleet, step: int) -> str | None:
    """Describe weights after a step with another digest than the recorded one; None: they have the same."""
    if fleet.newest is None or (recorded := plan.digests.get(step)) in (None, fleet.newest.digest):
        return None
    return f"weights after step {step}: recorded digest {recorded}, found {fleet.newest.digest}"


def num_tokens(groups: list[Group]) -> int:
    """Return the number of sampled tokens of groups."""
    return sum(rollout.num_sampled_tokens for group in groups for rollout in group.rollouts)


def start(arguments: argparse.Namespace) -> str | None:
    """Execute the steps that the arguments name again; return the first difference, or None."""
    if arguments.token is not None:
        print("\n".join(describe_token(arguments.run, arguments.token)))
        return None
    plan = plan_reexecution(
        arguments.run, first=arguments.first, last=arguments.last, overrides=arguments.overrides
    )
    if plan.num_not_sampled:
        print(f"{plan.num_not_sampled} groups began before the checkpoint and are not sampled again")
    different = run_main(reexecute(plan))
    if different is None:
        print(f"{len(plan.steps)} of {len(plan.steps)} steps are the same, bit for bit")
    return different


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.reexecute", description="Execute a run again and compare bit by bit."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run with record_execution: true")
    parser.add_argument("--from", dest="first", type=int, metavar="STEP", help="start at this checkpoint")
    parser.add_argument("--to", dest="last", type=int, metavar="STEP", help="stop after this step")
    parser.add_argument("--token", metavar="DRAW/ROLLOUT/POSITION", help="print the record of a token")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces config values")
    arguments = parse_command_line(parser)
    found: list[str | None] = []
    code = exit_code(lambda: found.append(start(arguments)))
    different = next(filter(None, found), None)
    if different is None:
        return code
    print(f"different: {different}", file=sys.stderr)
    return EXIT_FAILED


if __name__ == "__main__":
    exit_with(main)
