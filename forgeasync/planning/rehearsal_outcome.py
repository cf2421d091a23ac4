"""Reads the findings of a rehearsal from the files of its run, and shows them as tables."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table

from forgeasync.checkpoints import FINAL, list_checkpoints
from forgeasync.config import LocalLauncher, ModelFacts, RoutingReplay, RunConfig, named_sources, num_hosts
from forgeasync.files import read_json_lines
from forgeasync.observability import RunDir
from forgeasync.planning.rehearsal_rule import Change

Line = Mapping[str, float]


class Verdict(StrEnum):
    """Result of the rehearsal for one part of the run."""

    EXERCISED = "exercised"
    FAILED = "failed"
    NOT_EXERCISED = "not exercised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Verdict and measurements of one part of the run."""

    part: str
    verdict: Verdict
    measured: str


def findings(config: RunConfig, facts: ModelFacts, run_dir: RunDir) -> list[Finding]:
    """Return the findings about the run in ``run_dir``; ``config`` and ``facts`` are the rehearsal's own."""
    lines = read_json_lines(run_dir.metrics)
    steps = [line for line in lines if line["step"] > 0]
    return [
        *_processes(config, run_dir),
        *_training(config, steps),
        *_weights(config, steps),
        *_records(config, facts, steps),
        *_payloads(config, steps),
        *_scores(config, steps),
        *_evaluations(config, lines),
        *_checkpoints(config, run_dir),
        *_machine(steps),
    ]


def _finding(part: str, is_right: bool, measured: str) -> Finding:
    return Finding(part=part, verdict=Verdict.EXERCISED if is_right else Verdict.FAILED, measured=measured)


def _not_exercised(part: str, why: str) -> Finding:
    return Finding(part=part, verdict=Verdict.NOT_EXERCISED, measured=why)


def _sum(steps: Sequence[Line], key: str) -> float:
    return sum(line.get(key) or 0 for line in steps)


def _last(steps: Sequence[Line], key: str) -> float:
    return (steps[-1].get(key) or 0) if steps else 0


def _max(steps: Sequence[Line], key: str) -> float:
    return max((line.get(key) or 0 for line in steps), default=0)


def _processes(config: RunConfig, run_dir: RunDir) -> Iterator[Finding]:
    """Yield findings about processes and hosts, counted by log files: each process opens its own."""
    parallel, generator = config.trainer.parallel, config.generator
    degrees = (
        f"data_replicate {parallel.data_replicate}, data_shard {parallel.data_shard}, "
        f"tensor {parallel.tensor}, context {parallel.context}, expert {parallel.expert}"
    )
    num_trainer = _num_logs(run_dir, r"trainer-\d+")
    yield _finding("trainer processes", num_trainer == parallel.num_procs, f"{num_trainer}: {degrees}")
    num_engines = _num_logs(run_dir, r"generator-\d+")
    yield _finding(
        "generators",
        num_engines == generator.num_replicas,
        f"{num_engines} engines of {generator.tensor_parallel} tensor-parallel processes",
    )
    others = [name for name in ("scorer", "buffer", "environment") if _num_logs(run_dir, rf"{name}-\d+")]
    wanted = ["scorer", "buffer"] + (["environment"] if config.environment is not None else [])
    yield _finding("other roles", others == wanted, ", ".join(others))
    if not isinstance(config.launcher, LocalLauncher):
        counts, num_logs = num_hosts(config.launcher), _num_logs(run_dir, r"host-.+")
        is_right = num_logs == counts.trainer + counts.generators
        yield _finding("hosts", is_right, f"{num_logs}, by launcher {config.launcher.kind}")


def _num_logs(run_dir: RunDir, pattern: str) -> int:
    return sum(re.fullmatch(pattern, file.stem) is not None for file in run_dir.logs.glob("*.log"))


def _training(config: RunConfig, steps: Sequence[Line]) -> Iterator[Finding]:
    skipped, nonfinite = _last(steps, "trainer/num_skipped_steps"), _sum(steps, "metrics/num_nonfinite")
    yield _finding(
        "steps",
        len(steps) == config.max_steps and not skipped and not nonfinite,
        f"{len(steps)} of {config.max_steps}; {skipped:.0f} skipped, {nonfinite:.0f} values not finite",
    )
    norms = [line["grad_norm"] for line in steps]
    # Without a gradient the published weights do not change, and later parts prove little.
    has_gradient = any(norm and norm > 0 for norm in norms)
    measured = f"norms {', '.join(f'{norm or 0:.3g}' for norm in norms)}"
    if has_gradient:
        yield _finding("gradient", True, measured)
    else:
        why = ": all rewards of each group were equal, the weights did not change"
        yield _not_exercised("gradient", measured + why)
    age = _max(steps, "off_policy/age_max")
    yield _finding(
        "age of tokens",
        age <= config.max_off_policy_steps,
        f"at most {age:.0f} versions; max_off_policy_steps {config.max_off_policy_steps}",
    )
    mismatch = _max(steps, "mismatch/logprob_abs_mean")
    yield _finding(
        "trainer and generators",
        bool(steps),
        f"log-probabilities differ by {mismatch:.2g} nats on average",
    )


def _weights(config: RunConfig, steps: Sequence[Line]) -> Iterator[Finding]:
    swaps, moved = _sum(steps, "weights/num_swaps"), _sum(steps, "weights/num_bytes_moved")
    bad, expired = _sum(steps, "weights/num_bad_blocks"), _last(steps, "weights/num_expired_leases")
    skipped = _last(steps, "weights/num_skipped_versions")
    transport = config.weights.transport
    name = transport if isinstance(transport, str) else transport.factory
    where = "within one host" if isinstance(config.launcher, LocalLauncher) else "between hosts"
    yield _finding(
        "publish, fetch, swap",
        swaps >= config.generator.num_replicas and moved > 0 and not bad and not expired,
        f"transport {name}, {where}: {len(steps) - skipped:.0f} versions published, {swaps:.0f} swaps, "
        f"{moved / 2**20:.3g} MiB fetched, {bad:.0f} bad blocks, {expired:.0f} expired leases",
    )
    crossing = _sum(steps, "generator/num_crossing") + _sum(steps, "generator/num_resumed")
    part, measured = f"interruption {config.weights.interruption}", f"{crossing:.0f} sequences crossed a swap"
    yield _finding(part, True, measured) if crossing else _not_exercised(part, measured)


def _records(config: RunConfig, facts: ModelFacts, steps: Sequence[Line]) -> Iterator[Finding]:
    if facts.num_experts and config.trainer.routing_replay is not RoutingReplay.OFF:
        shares = [line.get("routing/recorded_share") or 0.0 for line in steps]
        disagreement = _max(steps, "routing/disagreement_share")
        # With RESPONSE, prompts have no record of routed experts.
        is_right = bool(shares) and (
            min(shares) == 1.0 or config.trainer.routing_replay is RoutingReplay.RESPONSE
        )
        yield _finding(
            "replay of routed experts",
            is_right,
            f"{min(shares, default=0.0):.1%} of tokens recorded; the trainer's own gate would have chosen "
            f"others for {disagreement:.2%}",
        )
    if not config.sampling.cuts_vocabulary:
        yield _not_exercised("replay of kept tokens", "the config keeps the whole vocabulary")
    elif config.trainer.keep_sampling_mask:
        size = _max(steps, "payload/bytes_per_token")
        yield _finding("replay of kept tokens", bool(steps), f"payloads of {size:.0f} bytes a token")


def _payloads(config: RunConfig, steps: Sequence[Line]) -> Iterator[Finding]:
    shared, remote = _sum(steps, "payload/num_read_shared"), _sum(steps, "payload/num_read_remote")
    yield _finding(
        "payloads",
        shared + remote > 0,
        f"the first trainer rank read {shared:.0f} from shared memory, {remote:.0f} from other hosts",
    )
    lost = {key: _sum(steps, key) for line in steps[:1] for key in line if key.startswith("dropped/")}
    # Expected consequences of the config; all other reasons are faults.
    expected = ("dropped/stale", "dropped/cancelled", "dropped/filtered")
    faults = {key: count for key, count in lost.items() if count and key not in expected}
    groups = ", ".join(f"{count:.0f} {key.removeprefix('dropped/')}" for key, count in lost.items() if count)
    yield _finding("groups", not faults, f"lost: {groups or 'none'}")


def _scores(config: RunConfig, steps: Sequence[Line]) -> Iterator[Finding]:
    names = ("timeouts", "crashes", "errors", "oversized", "killed_rewards", "failed_attempts")
    failed = {name: count for name in names if (count := _last(steps, f"scoring/num_{name}"))}
    failures = ", ".join(f"{count:.0f} {name.replace('_', ' ')}" for name, count in failed.items())
    sources = ", ".join(source.name for source in named_sources(config.data))
    rewards = ", ".join(f"{line['reward/mean']:.3g}" for line in steps)
    measured = f"mean rewards {rewards} on {sources}; failures: {failures or 'none'}"
    yield _finding("scores", not failed, measured)
    if config.environment is not None:
        turns = _max(steps, "episode/turns_mean")
        truncated = _last(steps, "episode/ended_length")
        yield _finding(
            "environment", turns > 0, f"{turns:.2g} turns an episode, {truncated:.0f} episodes cut short"
        )


def _evaluations(config: RunConfig, lines: Sequence[Line]) -> Iterator[Finding]:
    names = ["", *(f"{one.name}/" for one in config.evaluation.sets)]
    for name in names:
        evaluated = [line for line in lines if line.get(f"eval/{name}accuracy") is not None]
        unscored = _sum(evaluated, f"eval/{name}num_unscored")
        steps = ", ".join(str(line["step"]) for line in evaluated)
        part = f"evaluation {name.rstrip('/')}".rstrip()
        due = {step for step in range(1, config.max_steps + 1) if step % config.evaluation.every_steps == 0}
        skipped = int(_last(lines, "eval/num_skipped"))
        wanted = 1 + len(due | {config.max_steps}) - skipped
        yield _finding(
            part,
            len(evaluated) == wanted and not unscored,
            f"at steps {steps or 'none'}; {unscored:.0f} unscored" + f", {skipped} skipped" * bool(skipped),
        )


def _checkpoints(config: RunConfig, run_dir: RunDir) -> Iterator[Finding]:
    written = [folder.name for folder in list_checkpoints(run_dir.checkpoints)]
    if config.checkpoint.every_steps is None:
        yield _not_exercised("checkpoint", "the config writes none")
    else:
        yield _finding("checkpoint", bool(written), ", ".join(written) or "none was written")
    name = "config.json" if config.lora is None else "adapter_config.json"
    final = run_dir.checkpoints / FINAL / name
    yield _finding("export", final.is_file(), str(final.parent) if final.is_file() else "none was written")
    yield _not_exercised("resuming", "nothing was resumed")


def _machine(steps: Sequence[Line]) -> Iterator[Finding]:
    sizes = {
        role: _max(steps, f"memory/{role}_gib") for role in ("controller", "trainer", "generator", "scorer")
    }
    words = ", ".join(f"{role} {size:.2g}" for role, size in sizes.items() if size)
    seconds = ", ".join(f"{line['time/step_s']:.3g}" for line in steps)
    measured = f"GiB of the largest process: {words}; seconds a step: {seconds}"
    yield _not_exercised("memory and speed of the run", measured)
    gpus = _max(steps, "memory/trainer_gpu_gib"), _max(steps, "memory/generator_gpu_gib")
    if any(gpus):
        yield _finding("GPUs", all(gpus), f"trainer {gpus[0]:.2g} GiB reserved, generators {gpus[1]:.2g} GiB")
    else:
        lost = "kernels, CUDA graphs, NCCL, copies between host and device: no process used a GPU"
        yield _not_exercised("GPUs", lost)


def changes_table(name: str, changes: Sequence[Change]) -> Table:
    """Return a table of every change to the config and the model, with its reason."""
    table = _table(f"rehearsal of {name}: what is different; everything else is as in the config")
    for column in ("", "run", "rehearsal", "why"):
        table.add_column(column, overflow="fold")
    for change in changes:
        table.add_row(change.field, change.before, change.after, change.why)
    return table


def findings_table(name: str, found: Sequence[Finding], changes: Sequence[Change]) -> Table:
    """Return a table of findings by verdict, followed by what the changes leave unexercised."""
    table = _table(f"rehearsal of {name}: what was exercised")
    for column in ("part", "", "measured"):
        table.add_column(column, overflow="fold")
    for verdict in (Verdict.FAILED, Verdict.EXERCISED, Verdict.NOT_EXERCISED):
        for finding in found:
            if finding.verdict is verdict:
                table.add_row(finding.part, verdict.value, finding.measured)
        table.add_section()
    for change in changes:
        if change.untried is not None:
            table.add_row(change.field, Verdict.NOT_EXERCISED.value, change.untried)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")
