"""What planning splits has found, for people."""

from rich.console import Console
from rich.table import Table

from forgeasync.planning.splits import Split, SplitPlan


def print_plan(plan: SplitPlan, *, is_stated: bool) -> None:
    """Print the splits that no other one beats, the recommended one and the reason."""
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
