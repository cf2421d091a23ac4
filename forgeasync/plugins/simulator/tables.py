"""Prints profiles, gains of changes and splits of GPUs as tables."""

from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table

from forgeasync.plugins.simulator.from_run import ProfiledRun
from forgeasync.plugins.simulator.profile import Distribution, Estimate, Profile
from forgeasync.plugins.simulator.what_if import Split, SplitPlan, what_if


def print_profiled_run(profiled: ProfiledRun) -> None:
    """Print the times of a run, its simulated step time, and the predicted gains of single changes.

    Times are in milliseconds, with the half width of their 95 % intervals.
    """
    profile, console = profiled.profile, Console()
    decode = _table("sequences", "tokens of context", "ms", "tokens/s")
    decode.title = f"decode steps on {profile.hardware}"
    for point in profile.decode:
        rate = point.num_running / point.step_s.mean
        decode.add_row(
            str(point.num_running), str(point.num_context_tokens), _ms(point.step_s), f"{rate:,.0f}"
        )
    train = _table("rows of a rank", "cost of a rank, in tokens", "ms", "tokens/s of a rank")
    train.title = "optimizer steps"
    for step in profile.train:
        rate = step.cost / step.step_s.mean
        train.add_row(str(step.num_rows), f"{step.cost:.0f}", _ms(step.step_s), f"{rate:,.0f}")
    others = _table("part", "ms", "p5", "p95", left="part")
    others.title = "other times"
    for name, times in _distributions(profile):
        others.add_row(name, _ms(times.mean), _number(times.at(0.05)), _number(times.at(0.95)))
    console.print(Group(decode, train, others, *_facts(profile)))
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
    changes = _table("with", "s a step", "saves", left="with")
    for gain in found.gains:
        changes.add_row(gain.change.name, f"{gain.after_s:.3g}", f"{gain.share:.0%}")
    console.print(changes)
    console.print(found.verdict, soft_wrap=True, highlight=False)


def _table(*columns: str, left: str | None = None) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == left else "right")
    return table


def _distributions(profile: Profile) -> Iterator[tuple[str, Distribution]]:
    yield "training waits to publish", profile.weights.wait_s
    yield "publish", profile.weights.publish_s
    yield "fetch and stage", profile.weights.fetch_s
    yield "swap", profile.weights.swap_s
    yield "score a response", profile.score_s
    yield "between two steps", profile.between_steps_s


def _facts(profile: Profile) -> Iterator[str]:
    prefill = profile.prefill_tokens_per_s
    yield f"prompts: {prefill.mean:,.0f} tokens/s ({prefill.low:,.0f} to {prefill.high:,.0f})"
    yield f"a scorer scores {profile.score_places} responses at once"
    for source, lengths in profile.lengths.items():
        response = lengths.response
        yield (
            f"{source}: prompts of {lengths.prompt.mean.mean:.0f} tokens, responses of "
            f"{response.mean.mean:.0f} (p95 {response.at(0.95):.0f}), alike within a group by "
            f"{lengths.prompt_share:.2f}"
        )
    yield f"starting: {profile.start_s.mean:.0f} s from the command until all processes are connected"


def _ms(estimate: Estimate) -> str:
    return f"{_number(estimate.mean)} ± {_number((estimate.high - estimate.low) / 2)}"


def _number(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def print_plan(plan: SplitPlan, *, is_stated: bool) -> None:
    """Print the splits on the Pareto front, the recommended split, and the reason."""
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
