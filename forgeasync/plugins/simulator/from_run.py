"""Derives a profile from the files of an ordinary run: its metrics, its ledger and the traces of its
processes.

All times are those of the run, including what processes on shared cores cost each other. The run may use
many hosts. Nothing is started.

The duration of a decode step is not recorded, but fitted. The traces contain when each group was sampled and
the lengths of its responses. Replaying a generator's groups gives the steps, sequences and prompt tokens
between the begin and the end of each.
"""

import functools
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from forgeasync.buffer import (
    BadLine,
    Dropped,
    DropReason,
    LedgerLines,
    Scored,
    Start,
    Started,
    Submitted,
    Trained,
)
from forgeasync.config import ModelFacts, RunConfig, is_served, load_config, resolve
from forgeasync.files import read_json_lines, whole_lines
from forgeasync.models import read_model_facts
from forgeasync.observability import (
    KEYS,
    SUFFIX,
    Lane,
    MeasuredWindow,
    RunDir,
    Span,
    num_steps_ahead,
)
from forgeasync.planning import KV_BLOCK_TOKENS, pair_cost, planned_machine
from forgeasync.plugins.simulator.engine import (
    Clock,
    Counts,
    DrawnRollout,
    Engine,
    EngineCost,
    SimulatedGroup,
)
from forgeasync.plugins.simulator.engine import Sequence as OneRollout
from forgeasync.plugins.simulator.profile import (
    DecodePoint,
    DecodeTable,
    Distribution,
    Lengths,
    Profile,
    TrainPoint,
    WeightTimes,
    fit_lengths,
    fit_not_negative,
    powers_of_two,
)
from forgeasync.plugins.simulator.run import simulate_seeds, step_sizes
from forgeasync.plugins.simulator.shape import SimulatedRun, of_config
from forgeasync.plugins.simulator.what_if import what_if
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Problem, raise_if_any

MAX_STEPS = 200
"""Maximum number of steps in the profile; the newest are used."""

MAX_GROUPS = 3_000
"""Maximum number of groups to which decode steps are fitted; the newest are used."""

MAX_TRAIN_POINTS = 4
"""Maximum number of sizes of optimizer steps in the profile."""

STEPS_PER_POINT = 20
"""Minimum number of steps in the mean of a point, except in short runs, since their times vary widely."""

NUM_REPLAYS = 5
"""Number of replays of the groups; each uses the decode steps that the previous one has found."""

NUM_SEEDS = 4
"""Number of simulated runs that the run is compared with."""

FAST_PREFILL = 1e9
"""Prompt tokens per second if the times of groups do not depend on their prompts."""

UNBOUNDED = 10**18
"""Capacity in tokens of a KV cache that is never full."""

_NO_TASK = Task(task_id="", prompt="", answer="", source_index=0, source="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """Profile of a run, with the run's speed and the simulated speed."""

    profile: Profile
    run: SimulatedRun
    measured_s: float
    """Measured seconds per step, without evaluations."""
    simulated_s: float
    """Seconds per step in a simulation with the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """A group on one generator, from its trace."""

    lane: int
    """Index of its trace."""
    begin_s: float
    took_s: float
    num_prompt_tokens: int
    lengths: tuple[int, ...]
    """Number of tokens of each response."""


def profile_run(folder: Path) -> ProfiledRun:
    """Return the profile of the run in a folder, which may still be running.

    Raises:
        ConfigError: the run has parts that a profile does not cover, or its files lack the times.
    """
    run_dir = RunDir(path=folder)
    config = load_config(run_dir.config)
    _check(config, folder)
    facts = read_model_facts(config.model.path)
    config = resolve(config, facts)
    lines = _metrics(run_dir.metrics)
    num_ahead = num_steps_ahead(
        max_off_policy_steps=config.max_off_policy_steps,
        max_groups=config.buffer.max_groups,
        groups_per_step=config.algorithm.groups_per_step,
    )
    window = MeasuredWindow.of_run(config.max_steps, num_steps_ahead=num_ahead)
    for line in lines:
        window.add(line)
    measured = window.measured()
    later = lines[max(1, window.num_left_out) :]
    counted = [line for line in later if line["step"] <= window.last_step][-MAX_STEPS:]
    if measured is None or not counted:
        raise _refusal(run_dir.metrics, "must have the lines of more steps")
    lanes = _lanes(run_dir.logs)
    # Time at which the training loop requested the batch of each step.
    wait_begin_s = {one.facts["step"]: one.begin_s for one in _spans(lanes, "controller", "wait for a batch")}
    since_s = wait_begin_s.get(int(counted[0]["step"]))
    if since_s is None:
        raise _refusal(run_dir.logs, "must have the controller's trace")
    groups = _groups(lanes)
    if not groups:
        raise _refusal(run_dir.logs, "must have traces with the tokens of sampled groups")
    prompts = _prompts(run_dir.ledger)
    profile = _profile(config, facts, lanes, groups, prompts, lines, counted, since_s=since_s)
    run = of_config(config, facts, profile, num_steps=min(config.max_steps, MAX_STEPS))
    found = simulate_seeds(run, profile, num_seeds=NUM_SEEDS)
    return ProfiledRun(
        profile=profile,
        run=run,
        measured_s=measured.step_s,
        simulated_s=statistics.fmean(one.step_s for one in found),
    )


def _refusal(file: Path, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=str(file), remedy=remedy)])


def _check(config: RunConfig, folder: Path) -> None:
    problems = []
    for field, is_there in (
        ("environment", config.environment is not None),
        ("teachers", bool(config.teachers)),
        ("data.source.kind", is_served(config)),
    ):
        if is_there:
            remedy = f"the run {folder} must not have it: its times are not in a run's files"
            problems.append(Problem(field=field, remedy=remedy))
    raise_if_any(problems)


def _profile(
    config: RunConfig,
    facts: ModelFacts,
    lanes: Sequence[Lane],
    groups: Mapping[int, SampledGroup],
    prompts: "_Prompts",
    lines: Sequence[Mapping[str, float]],
    counted: Sequence[Mapping[str, float]],
    *,
    since_s: float,
) -> Profile:
    since = {number: group for number, group in groups.items() if group.begin_s >= since_s} or groups
    kv_block_tokens = KV_BLOCK_TOKENS[planned_machine(config)]
    decode, prefill = _fit_decode(
        _by_generator(lanes, since.values()),
        max_num_seqs=config.generator.max_num_seqs,
        kv_block_tokens=kv_block_tokens,
    )
    scores = _spans(lanes, "scorer", "score")
    scores = [one for one in scores if one.begin_s >= since_s] or scores
    swaps = [one.took_s for one in _spans(lanes, "generator", "swap")]
    (controller,) = _of_role(lanes, "controller")[-1:]
    waits = [line["time/publish_weights_s"] for line in counted]
    publishes = [
        max(0.0, line["weights/max_publish_s"] - line["time/publish_weights_s"])
        for line in counted
        if line.get("weights/max_publish_s")
    ]
    return Profile(
        measured_at=datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds"),
        hardware=", ".join(sorted({lane.opened.host for lane in lanes if lane.opened is not None})),
        model=config.model.path,
        kv_block_tokens=kv_block_tokens,
        decode=decode,
        prefill_tokens_per_s=prefill,
        train=_train(config, facts, groups, prompts, counted),
        between_steps_s=_between(lines, counted),
        weights=WeightTimes(
            wait_s=Distribution.of(waits),
            publish_s=Distribution.of(publishes or [0.0]),
            fetch_s=Distribution.of(_fetches(lanes) or [0.0]),
            swap_s=Distribution.of(swaps or [0.0]),
        ),
        score_s=Distribution.of([one.took_s for one in scores] or [0.0]),
        score_places=max(config.scorer.num_workers, _overlap(scores) // config.scorer.num_replicas),
        lengths=_lengths(groups, prompts),
        filtered_share=prompts.filtered_share,
        start_s=max(0.0, controller.spans[0].begin_s - controller.begin_s),
    )


# ---- contents of the files


def _metrics(file: Path) -> list[dict[str, float]]:
    """Return the lines of all steps since the last start of the command."""
    lines: list[dict[str, float]] = []
    try:
        records = read_json_lines(file)
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _refusal(file, f"must have an object on every line: {error}") from error
    for line in records:
        if not line.keys() >= set(KEYS) or any(line[key] is None for key in KEYS):
            continue
        is_new_start = bool(lines) and line["generator/busy_s"] < lines[-1]["generator/busy_s"]
        if is_new_start:
            lines.clear()
        lines.append({key: value for key, value in line.items() if isinstance(value, int | float)})
    return lines


def _lanes(logs: Path) -> list[Lane]:
    lanes = []
    for file in sorted(logs.glob(f"*{SUFFIX}")):
        lane = Lane()
        for line in whole_lines(file):
            lane.add(line.removesuffix(b"\n"))
        if lane.opened is not None:
            lanes.append(lane)
    return sorted(lanes, key=lambda one: one.begin_s)


def _of_role(lanes: Iterable[Lane], role: str) -> list[Lane]:
    return [lane for lane in lanes if lane.opened is not None and lane.opened.proc.startswith(role)]


def _spans(lanes: Iterable[Lane], role: str, name: str) -> list[Span]:
    return [one for lane in _of_role(lanes, role) for one in lane.spans if one.name == name]


def _groups(lanes: Sequence[Lane]) -> dict[int, SampledGroup]:
    """Return the groups that were sampled to their end, by number."""
    return {
        int(span.facts["group"]): SampledGroup(
            lane=index,
            begin_s=span.begin_s,
            took_s=span.took_s,
            num_prompt_tokens=int(span.facts["prompt_tokens"]),
            lengths=tuple(map(int, str(span.facts["response_tokens"]).split())),
        )
        for index, lane in enumerate(lanes)
        for span in lane.spans
        if span.name == "sample group" and span.facts.get("response_tokens") is not None
    }


def _by_generator(
    lanes: Sequence[Lane], groups: Iterable[SampledGroup]
) -> list[tuple[list[SampledGroup], list[Span]]]:
    """Return the newest groups of each generator, and its swaps."""
    found: dict[int, list[SampledGroup]] = defaultdict(list)
    for group in sorted(groups, key=lambda group: group.begin_s)[-MAX_GROUPS:]:
        found[group.lane].append(group)
    return [(own, _spans([lanes[index]], "generator", "swap")) for index, own in found.items()]


def _fetches(lanes: Sequence[Lane]) -> list[float]:
    """Return the times in which each host's generators fetched each version and prepared it."""
    ends: dict[tuple[str, object], list[tuple[float, float]]] = defaultdict(list)
    for lane in _of_role(lanes, "generator"):
        assert lane.opened is not None
        for one in lane.spans:
            if one.name in ("fetch", "make ready"):
                ends[lane.opened.host, one.facts["version"]].append((one.begin_s, one.begin_s + one.took_s))
    return [max(end for _, end in pairs) - min(begin for begin, _ in pairs) for pairs in ends.values()]


def _overlap(spans: Sequence[Span]) -> int:
    """Return the mean number of concurrent spans, over the time in which there is any."""
    changes = sorted(
        itertools.chain.from_iterable(((one.begin_s, 1), (one.begin_s + one.took_s, -1)) for one in spans)
    )
    num, busy_s = 0, 0.0
    for (at_s, change), (next_s, _) in itertools.pairwise(changes):
        num += change
        busy_s += next_s - at_s if num else 0.0
    return round(sum(one.took_s for one in spans) / busy_s) if busy_s else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Groups in the ledger."""

    sources: Mapping[int, str]
    """Source of each group."""
    batches: Mapping[int, tuple[int, ...]]
    """Groups of each step."""
    filtered_share: float


def _prompts(file: Path) -> _Prompts:
    by_prompt: dict[int, str] = {}
    sources: dict[int, str] = {}
    batches: dict[int, tuple[int, ...]] = {}
    counts: Counter[str] = Counter()
    try:
        ledger = LedgerLines(file.name)
        for line in whole_lines(file):
            match event := ledger.read(line.removesuffix(b"\n")):
                case Submitted():
                    by_prompt[event.prompt] = event.source
                # A ledger may begin after some prompts were submitted.
                case Started() if event.prompt in by_prompt:
                    sources[event.group] = by_prompt[event.prompt]
                case Scored():
                    counts["scored"] += 1
                case Dropped(reason=DropReason.FILTERED):
                    counts["filtered"] += 1
                case Trained():
                    batches[event.step] = event.groups
                case _:
                    continue
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    except BadLine as error:
        raise _refusal(file, f"must be a whole ledger: a line {error}") from error
    share = counts["filtered"] / max(1, counts.total())
    return _Prompts(sources=sources, batches=batches, filtered_share=min(share, 0.99))


# ---- values of the profile


def _lengths(groups: Mapping[int, SampledGroup], prompts: _Prompts) -> dict[str, Lengths]:
    by_source: dict[str, list[SampledGroup]] = defaultdict(list)
    for number, group in groups.items():
        if number in prompts.sources:
            by_source[prompts.sources[number]].append(group)
    return {
        source: fit_lengths(
            [float(one.num_prompt_tokens) for one in found],
            [[float(max(1, length)) for length in one.lengths] for one in found],
        )
        for source, found in by_source.items()
    }


def _train(
    config: RunConfig,
    facts: ModelFacts,
    groups: Mapping[int, SampledGroup],
    prompts: _Prompts,
    counted: Sequence[Mapping[str, float]],
) -> tuple[TrainPoint, ...]:
    """Return the means of steps with similar costs."""
    trainer, sizes = config.trainer, list[tuple[float, int, float]]()
    num_ranks = trainer.parallel.data_shard * trainer.parallel.data_replicate
    for line in counted:
        batch = prompts.batches.get(int(line["step"]), ())
        if not batch or any(number not in groups for number in batch):
            continue
        steps = step_sizes(
            [[(groups[one].num_prompt_tokens, length) for length in groups[one].lengths] for one in batch],
            steps_per_batch=trainer.steps_per_batch,
            tokens_per_row=trainer.tokens_per_row,
            num_ranks=num_ranks,
            share_prefixes=trainer.shares_prefixes,
            pair_cost=pair_cost(facts),
        )
        sizes.append((sum(cost for _, cost in steps), sum(rows for rows, _ in steps), line["time/train_s"]))
    if not sizes:
        remedy = "must have the tokens of all groups of a step, which its ledger names"
        raise ConfigError([Problem(field="traces", remedy=remedy)])
    sizes.sort(key=lambda size: size[:2])
    num_points = max(1, min(MAX_TRAIN_POINTS, len(sizes) // STEPS_PER_POINT))
    bounds = [number * len(sizes) // num_points for number in range(num_points + 1)]
    # Times are those of a whole batch, whose optimizer steps are alike.
    share = 1.0 / trainer.steps_per_batch
    points = []
    for begin, end in itertools.pairwise(bounds):
        part = sizes[begin:end]
        points.append(
            TrainPoint(
                num_rows=max(1, round(share * statistics.fmean(rows for _, rows, _ in part))),
                cost=share * statistics.fmean(cost for cost, _, _ in part),
                step_s=share * statistics.fmean(took_s for _, _, took_s in part),
            )
        )
    return tuple(points)


def _between(lines: Sequence[Mapping[str, float]], counted: Sequence[Mapping[str, float]]) -> Distribution:
    """Return the seconds of a step outside of waiting, training, publishing and evaluating."""
    steps = {line["step"] for line in counted}
    found = []
    for before, line in itertools.pairwise(lines):
        if line["step"] in steps:
            known_s = sum(
                line[f"time/{part}_s"] for part in ("wait_for_batch", "train", "publish_weights", "eval")
            )
            found.append(max(0.0, line["time/elapsed_s"] - before["time/elapsed_s"] - known_s))
    return Distribution.of(found or [0.0])


# ---- decode steps


def _fit_decode(
    generators: Sequence[tuple[Sequence[SampledGroup], Sequence[Span]]],
    *,
    max_num_seqs: int,
    kv_block_tokens: int,
) -> tuple[tuple[DecodePoint, ...], float]:
    """Return decode steps and prompt tokens per second, fitted to the times of groups on their generators.

    ``generators`` has the groups of each generator, and the spans in which it paused. The time of a step is a
    fixed time plus a time per sequence, neither negative. A sequence takes at least the time of a prompt's
    token, which does the same computation: without this bound, an engine that is always full could seem to
    spend all its time on prompts. The fit minimizes the squared errors of the groups'
    times, relative to the prediction of the previous fit; relative to the times themselves, long ones would
    have too little weight. The steps between the begin and the end of a group depend on the times of steps,
    so the replay and the fit alternate.
    """
    times_s = np.array(
        [
            max(1e-9, group.took_s - _paused_s(group, pauses))
            for groups, pauses in generators
            for group in groups
        ]
    )
    longest = sum(max(group.lengths) for groups, _ in generators for group in groups)
    prompt_s, sequence_s, step_s = 0.0, 0.0, float(times_s.sum() / longest)
    for _ in range(NUM_REPLAYS):
        cost = EngineCost(
            decode=DecodeTable(_decode_points(step_s, sequence_s, max_num_seqs)),
            prefill_s_per_token=max(1.0 / FAST_PREFILL, prompt_s),
            kv_block_tokens=kv_block_tokens,
            max_num_seqs=max_num_seqs,
            max_kv_tokens=UNBOUNDED,
            shares_prefixes=True,
        )
        terms = np.concatenate([_replay(groups, pauses, cost) for groups, pauses in generators])
        before_s = np.maximum(1e-9, terms @ np.array([prompt_s, sequence_s, step_s]))
        terms[:, 0] += terms[:, 1]
        prompt_s, further_s, step_s = fit_not_negative(terms / before_s[:, None], times_s / before_s)
        sequence_s = prompt_s + further_s
    prefill = 1.0 / prompt_s if prompt_s else FAST_PREFILL
    return _decode_points(step_s, sequence_s, max_num_seqs), prefill


def _decode_points(step_s: float, sequence_s: float, max_num_seqs: int) -> tuple[DecodePoint, ...]:
    return tuple(
        DecodePoint(
            num_running=num,
            num_context_tokens=0,
            step_s=max(1e-9, step_s + num * sequence_s),
        )
        for num in powers_of_two(max_num_seqs)
    )


def _paused_s(group: SampledGroup, pauses: Sequence[Span]) -> float:
    end_s = group.begin_s + group.took_s
    return sum(
        max(0.0, min(end_s, one.begin_s + one.took_s) - max(group.begin_s, one.begin_s)) for one in pauses
    )


def _replay(groups: Sequence[SampledGroup], pauses: Sequence[Span], cost: EngineCost) -> np.ndarray:
    """Return an engine's work (``Counts``) during each group, if groups begin at the recorded times."""
    clock = Clock()
    zero_s = min([*(one.begin_s for one in groups), *(one.begin_s for one in pauses)])
    passed = np.zeros((len(groups), 3))
    begun: dict[int, Counts] = {}

    def add(index: int) -> None:
        group = groups[index]
        begun[index] = engine.counts()
        rollouts = [
            DrawnRollout(num_prompt_tokens=group.num_prompt_tokens, num_tokens=max(1, length), score_s=0.0)
            for length in group.lengths
        ]
        start = Start(group_id=index, draw_id=index, task=_NO_TASK)
        engine.add(SimulatedGroup(start, rollouts).sequences)

    def ended(sequence: OneRollout) -> None:
        # The last sequence of a group overwrites the others.
        index = sequence.group.group_id
        passed[index] = np.subtract(sequence.counts, begun[index])

    engine = Engine(0, cost, clock, ended)
    for index, group in enumerate(groups):
        clock.after(group.begin_s - zero_s, functools.partial(add, index))
    for pause in pauses:
        clock.after(pause.begin_s - zero_s, engine.pause)
        clock.after(pause.begin_s + pause.took_s - zero_s, engine.resume)
    while clock.step():
        pass
    return passed


# ---- output


def print_profiled_run(profiled: ProfiledRun) -> None:
    """Print the times of a run, its simulated step time, and the predicted gains of single changes.

    Times are in milliseconds.
    """
    profile, console = profiled.profile, Console()
    decode = _table(f"decode steps on {profile.hardware}", "sequences", "ms")
    for point in profile.decode:
        decode.add_row(str(point.num_running), _ms(point.step_s))
    train = _table("optimizer steps", "rows of a rank", "cost of a rank, in tokens", "ms")
    for step in profile.train:
        train.add_row(str(step.num_rows), f"{step.cost:.0f}", _ms(step.step_s))
    others = _table("other times", "part", "ms", "p5", "p95")
    for name, times in (
        ("training waits to publish", profile.weights.wait_s),
        ("publish", profile.weights.publish_s),
        ("fetch and stage", profile.weights.fetch_s),
        ("swap", profile.weights.swap_s),
        ("score a response", profile.score_s),
        ("between two steps", profile.between_steps_s),
    ):
        others.add_row(name, _ms(times.mean), _ms(times.at(0.05)), _ms(times.at(0.95)))
    console.print(decode, train, others)
    console.print(f"prompts: {profile.prefill_tokens_per_s:,.0f} tokens/s")
    console.print(f"a scorer scores {profile.score_places} responses at once")
    for source, lengths in profile.lengths.items():
        response = lengths.response
        console.print(
            f"{source}: prompts of {lengths.prompt.mean:.0f} tokens, responses of "
            f"{response.mean:.0f} (p95 {response.at(0.95):.0f}), alike within a group by "
            f"{lengths.prompt_share:.2f}"
        )
    console.print(f"starting: {profile.start_s:.0f} s from the command to the first step")
    console.print(
        f"steps of the run took {profiled.measured_s:.3g} s each; simulated with this profile "
        f"{profiled.simulated_s:.3g} s"
    )
    found = what_if(profiled.run, profile)
    base = found.base
    console.print(
        f"predicted: {base.step_s:.3g} s a step, {base.trained_tokens_per_s:,.0f} tokens/s trained, "
        f"trainer waits {base.trainer_idle_share:.0%}, generators {base.generators_idle_share:.0%}, "
        f"mean age {base.mean_age:.1f}"
    )
    changes = _table("what changes would bring", "with", "s a step", "saves")
    for gain in found.gains:
        changes.add_row(gain.change, f"{gain.after_s:.3g}", f"{gain.share:.0%}")
    console.print(changes)
    console.print(found.verdict, soft_wrap=True, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("part", "with") else "right")
    return table


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
