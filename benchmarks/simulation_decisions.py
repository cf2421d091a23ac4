"""Whether the planner picks the right split: all splits of a number of procs, simulated and run.

    python benchmarks/simulation_decisions.py [--config FILE] [--procs N] [--profile FILE] [--rounds N]
        [--steps N] [--folder DIR] [key.path=value ...]

Measures a profile of the config, or reads the one that is given, and plans the splits of N procs with it
(`python -m apps.profile --plan`). Then every split is run, one after the other, as many times as there are
rounds. Prints predicted and measured trained tokens a second of each, and how much slower the split that was
recommended is than the fastest one that was measured; writes DIR/simulation_decisions.json.
"""

import argparse
import shutil
import statistics
from pathlib import Path

from common import REPOSITORY, RESULTS, machine_facts, read_json_lines, write_json
from rich.console import Console
from rich.table import Table
from simulation_validation import QUIET, measured, start_app

from forgeasync.config import load_config, resolve
from forgeasync.models import read_model_facts
from forgeasync.planning import GPU_GIB
from forgeasync.plugins.simulator import Profile, Split, SplitPlan, of_config, plan_splits, read_profile


def plan(config: Path, settings: list[str], profile: Profile, *, num_procs: int, num_steps: int) -> SplitPlan:
    """The splits of so many procs, by the planner."""
    loaded = load_config([str(config)], settings)
    facts = read_model_facts(loaded.model.path)
    return plan_splits(
        resolve(loaded, facts),
        facts,
        lambda _: profile,
        num_gpus=num_procs,
        num_steps=num_steps,
        gpu_bytes=round(GPU_GIB * 2**30),
    )


def run_split(config: Path, settings: list[str], split: Split, profile: Profile, folder: Path) -> float:
    """Run a split; returns its trained tokens a second."""
    shutil.rmtree(folder, ignore_errors=True)
    start_app("apps.grpo", config, [*settings, *split.overrides().split(), f"run_dir={folder}"])
    run = of_config(split.config, read_model_facts(split.config.model.path), profile)
    return measured(read_json_lines(folder / "metrics.jsonl"), run).trained_tokens_per_s


def results(found: SplitPlan, tokens_per_s: dict[str, float]) -> Table:
    """A row for each split, in the order of what was predicted."""
    best, chosen = max(tokens_per_s.values()), tokens_per_s[found.chosen.overrides()]
    table = Table(
        title="trained tokens a second",
        caption=f"the recommended split is {1.0 - chosen / best:.1%} slower than the fastest",
    )
    for column in ("split", "predicted", "measured", "of the fastest", "age", "recommended"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split in found.splits:
        real = tokens_per_s[split.overrides()]
        table.add_row(
            f"{split.num_trainer} train, {split.num_generating} generate, bound "
            f"{split.config.max_off_policy_steps}",
            f"{split.tokens_per_s:,.0f}",
            f"{real:,.0f}",
            f"{real / best:.1%}",
            f"{split.prediction.mean_age:.1f}",
            "yes" if split is found.chosen else "",
        )
    return table


def main() -> None:
    """Plan, run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Whether the planner picks the right split.")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "tiny_moe_cpu.yaml")
    parser.add_argument("--procs", type=int, default=3)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=RESULTS / "simulation_decisions")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config, file = arguments.config, arguments.profile
    if file is None:
        file = arguments.folder / "profile.json"
        start_app("apps.profile", config, [*arguments.overrides, "--out", str(file)])
    profile, console = read_profile(file), Console(width=110)
    settings = [*QUIET, *arguments.overrides, f"max_steps={arguments.steps}"]
    found = plan(config, settings, profile, num_procs=arguments.procs, num_steps=arguments.steps)
    runs: dict[str, list[float]] = {split.overrides(): [] for split in found.splits}
    for number in range(arguments.rounds):
        for place, split in enumerate(found.splits):
            folder = arguments.folder / f"split-{place}-{number}"
            real = run_split(config, settings, split, profile, folder)
            runs[split.overrides()].append(real)
            console.print(f"{split.overrides()}: {split.tokens_per_s:,.0f} predicted, {real:,.0f} measured")
    tokens_per_s = {name: statistics.fmean(real) for name, real in runs.items()}
    console.print(results(found, tokens_per_s))
    splits = {
        split.overrides(): {"predicted": split.tokens_per_s, "measured": runs[split.overrides()]}
        for split in found.splits
    }
    content = {"machine": machine_facts(), "recommended": found.chosen.overrides(), "splits": splits}
    write_json(arguments.folder / "simulation_decisions.json", content)


if __name__ == "__main__":
    main()
