"""Evaluates a model on the held-out problems and evaluation sets of a config, without training.

    python -m apps.evaluate --config FILE [--config FILE ...] [key.path=value ...]
        [--model PATH | --base-url URL [--endpoint-model NAME] [--api-key-env NAME]]
        [--samples N] [--concurrency N] [--out FOLDER]

The model is the config's, another Hugging Face folder (such as the export of a run,
runs/x/checkpoints/final), or a model behind an OpenAI-compatible endpoint. Models in folders are sampled by
generators, as in a run; an endpoint needs no engine or GPU here. Episodes run in the environment's workers;
single responses are scored by the config's rewards.

    sample       answer every problem --samples times; each rollout is written when it ends
    summarize    accuracy, mean score and pass@k of every set, with confidence intervals
    report       a printed table; summary.json and episodes.jsonl in --out, which python -m apps.show reads
"""

import argparse
import asyncio
import time
from datetime import datetime
from pathlib import Path

from forgeasync.config import dump_config, load_config
from forgeasync.controller import (
    EvaluationFolder,
    LocalModel,
    PreparedEvaluation,
    config_parser,
    exit_code,
    find_endpoint,
    parse_command_line,
    prepare_evaluation,
    problem_scores,
    run_main,
    sample_problems,
    start_sampling,
    summary_table,
)
from forgeasync.isolation import sandbox_warning
from forgeasync.observability import (
    RUNS_FOLDER,
    SetSummary,
    StepConsole,
    configure_controller_logging,
    exit_with,
    separate_native_output,
    summarize,
)
from forgeasync.runtime import GroupSampler, HeldOutRollout, ProcessManager

DEFAULT_CONCURRENCY = 32
"""Maximum concurrent responses or episodes of an endpoint."""


class NothingScored(RuntimeError):
    """Raised if no response of any set was scored."""


async def evaluate(prepared: PreparedEvaluation, concurrency: int | None) -> None:
    """Start the processes that sample and score, evaluate every set, and end the processes.

    Raises:
        NothingScored: no response of any set was scored.
    """
    folder = EvaluationFolder.create(prepared.out, dump_config(prepared.config))
    separate_native_output(folder.log("controller"))
    configure_controller_logging(folder.log("controller"))
    start_s = time.perf_counter()
    summaries: dict[str, SetSummary] = {}
    with StepConsole(1) as console, folder:
        console.message(f"evaluating {described(prepared)} into {folder.path}")
        for warning in prepared.warnings:
            console.message(f"warning: {warning}")
        if prepared.config.environment is not None:
            if (alarm := sandbox_warning(prepared.config.sandbox)) is not None:
                console.alarm(alarm)
        processes = ProcessManager(folder.logs.resolve())
        try:
            sampling = start_sampling(prepared, processes, console, artifacts=folder.artifacts.resolve())
            async with processes.naming_deaths(), sampling as groups:
                async with asyncio.TaskGroup() as watching:
                    watch = watching.create_task(processes.watch())
                    for name in prepared.sets:
                        summaries[name] = await evaluate_set(
                            prepared, name, groups, folder, console, concurrency
                        )
                    watch.cancel()
        finally:
            console.phase("ending all processes")
            await processes.close()
            console.end_phase()
        folder.write_summary(
            described(prepared),
            summaries,
            wall_s=time.perf_counter() - start_s,
            warnings=prepared.warnings,
        )
        console.message(summary_table(summaries))
        console.message(f"episodes: python -m apps.show {folder.path}")
    if all(one.accuracy is None for one in summaries.values()):
        raise NothingScored(f"no response was scored; {folder.episodes} says why of each")


async def evaluate_set(
    prepared: PreparedEvaluation,
    name: str,
    groups: GroupSampler,
    folder: EvaluationFolder,
    console: StepConsole,
    concurrency: int | None,
) -> SetSummary:
    """Sample and score all responses to the problems of a set, and write each one when it ends."""
    one = prepared.sets[name]
    if concurrency is None:
        generator = prepared.config.generator
        is_ours = isinstance(prepared.model, LocalModel)
        # The engines' concurrency: more requests would wait in the engines while their deadlines run.
        concurrency = generator.max_num_seqs * generator.num_replicas if is_ours else DEFAULT_CONCURRENCY
    num_rollouts = len(one.tasks) * one.num_samples
    console.phase(
        f"{name}: {len(one.tasks)} problems, {num_rollouts} responses, {concurrency} at once",
        num_parts=num_rollouts,
    )

    def on_ended(problem: int, sample: int, rollout: HeldOutRollout) -> None:
        folder.write(name, problem, sample, one.tasks[problem], rollout)
        console.part_done()

    rollouts = await sample_problems(
        one,
        groups,
        on_ended=on_ended,
        max_concurrent=concurrency,
        keeps_record=True,
    )
    console.end_phase()
    return summarize(problem_scores(rollouts, len(one.tasks)), num_samples=one.num_samples)


def described(prepared: PreparedEvaluation) -> str:
    """Return the name of the model that is evaluated, for people."""
    model = prepared.model
    if isinstance(model, LocalModel):
        return prepared.config.model.path
    return f"{model.model} at {model.base_url}"


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = config_parser("Evaluates a model on the held-out problems and evaluation sets of a config.")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", metavar="PATH", help="Hugging Face folder; default: model.path")
    models.add_argument("--base-url", metavar="URL", help="evaluate an endpoint: http://host:8000/v1")
    parser.add_argument(
        "--endpoint-model", metavar="NAME", help="the model's name there; default: its only model"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the endpoint's key; default: no key"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="responses per problem; default: 1 (sets: their own)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"concurrent responses; default: {DEFAULT_CONCURRENCY} for an endpoint, else what engines hold",
    )
    parser.add_argument("--out", metavar="FOLDER", help="new folder; default: runs/evaluate-<name>-<time>")
    arguments = parse_command_line(parser)
    for name, value in (
        ("--endpoint-model", arguments.endpoint_model),
        ("--api-key-env", arguments.api_key_env),
    ):
        if value is not None and arguments.base_url is None:
            parser.error(f"{name}: needs --base-url; a local model has neither a name nor a key")
    if arguments.concurrency is not None and arguments.concurrency < 1:
        parser.error(f"--concurrency {arguments.concurrency}: must be at least 1")
    return arguments


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = read_arguments()

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        endpoint = None
        if arguments.base_url is not None:
            endpoint = find_endpoint(
                arguments.base_url, model=arguments.endpoint_model, api_key_variable=arguments.api_key_env
            )
        default_out = RUNS_FOLDER / f"evaluate-{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
        prepared = prepare_evaluation(
            config,
            model=arguments.model,
            endpoint=endpoint,
            num_samples=arguments.samples,
            out=default_out if arguments.out is None else Path(arguments.out),
        )
        run_main(evaluate(prepared, arguments.concurrency))

    return exit_code(run)


if __name__ == "__main__":
    exit_with(main)
