"""Ten bottlenecks, made on purpose: does the simulator find the cause, and what does the cure bring?

    python benchmarks/simulation_counterfactuals.py --profile FILE [--scenarios NAME ...] [--steps N]
        [--seed S] [--folder DIR]

FILE is a profile of configs/tiny_moe_cpu.yaml, taken on this machine shortly before. Each scenario changes
that config so that one part of it is the bottleneck: rewards that take a known time, few places in the
engine, a small buffer, no or little staleness. All changes that ``what_if`` knows are simulated. Then the
scenario is run as it is, and with the change that should help most. Prints which cause was found, the
predicted and the measured gain (seconds a step before by after), and how many causes are right and gains
within 15 %; writes DIR/simulation_counterfactuals.json.

In a simulation a slow reward takes its sleep and what the profile's verifier takes.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common import REPOSITORY, RESULTS, machine_facts, read_json_lines, write_json
from rich.console import Console
from rich.table import Table
from simulation_validation import QUIET, Figures, measured, start_app

from forgeasync.config import load_config, resolve
from forgeasync.models import read_model_facts
from forgeasync.plugins.simulator import Distribution, Profile, SimulatedRun, of_config, read_profile, what_if
from forgeasync.scoring import CALLS_SIDE_BY_SIDE

CONFIG = REPOSITORY / "configs" / "tiny_moe_cpu.yaml"

MAX_ERROR = 0.15
"""Share by which a predicted gain may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One bottleneck and its cure."""

    overrides: tuple[str, ...]
    cure: str
    """Name of the change of ``what_if`` that should help most."""
    cured_by: tuple[str, ...]
    """The same change of the config."""
    sleep_s: float = 0.0
    """Time of a slow reward; 0: the config's own verifier."""
    is_far: bool = False
    """Whether the reward has many calls at once."""

    @property
    def settings(self) -> tuple[str, ...]:
        """All overrides of the run as it is."""
        if not self.sleep_s:
            return self.overrides
        factory = f"benchmarks.sleeping_reward.{'Far' if self.is_far else 'Slow'}"
        reward = f"data.reward={{kind: python, factory: {factory}, options: {{sleep_s: {self.sleep_s}}}}}"
        return (*self.overrides, reward, "scorer.max_in_flight=1024", "scorer.max_concurrent=256")


def _bound(steps: int) -> str:
    return f"max_off_policy_steps={steps}"


SCENARIOS: dict[str, Scenario] = {
    "slow scorer": Scenario(
        overrides=(_bound(4), "scorer.num_workers=4"),
        sleep_s=0.1,
        cure="one more scorer",
        cured_by=("scorer.num_replicas=2",),
    ),
    "slow scorer, bound 1": Scenario(
        overrides=(_bound(1), "scorer.num_workers=8"),
        sleep_s=0.25,
        cure="one more scorer",
        cured_by=("scorer.num_replicas=2",),
    ),
    "slow scorer, synchronous": Scenario(
        overrides=(_bound(0), "scorer.num_workers=4"),
        sleep_s=0.1,
        cure="one more scorer",
        cured_by=("scorer.num_replicas=2",),
    ),
    # Without a wait, two cores have as much to do with a bound of 1: a faster trainer would bring as much.
    "short wait, synchronous": Scenario(
        overrides=(_bound(0), "scorer.num_workers=4"),
        sleep_s=0.5,
        is_far=True,
        cure="max_off_policy_steps 1",
        cured_by=(_bound(1),),
    ),
    "far scorer, synchronous": Scenario(
        overrides=(_bound(0), "scorer.num_workers=4"),
        sleep_s=2.0,
        is_far=True,
        cure="max_off_policy_steps 1",
        cured_by=(_bound(1),),
    ),
    "far scorer, bound 1": Scenario(
        overrides=(_bound(1), "scorer.num_workers=8"),
        sleep_s=4.0,
        is_far=True,
        cure="max_off_policy_steps 2",
        cured_by=(_bound(2),),
    ),
    "small buffer": Scenario(
        overrides=(_bound(4), "buffer.max_groups=24", "scorer.num_workers=4"),
        sleep_s=1.0,
        is_far=True,
        cure="a buffer twice as large",
        cured_by=("buffer.max_groups=48",),
    ),
    "few in flight, far scorer": Scenario(
        overrides=(_bound(4), "buffer.max_groups=null", "buffer.max_in_flight=24", "scorer.num_workers=4"),
        sleep_s=3.0,
        is_far=True,
        cure="a buffer twice as large",
        cured_by=("buffer.max_in_flight=48",),
    ),
    "few places": Scenario(
        overrides=(_bound(4), "generator.max_num_seqs=4"),
        cure="one more replica",
        cured_by=("generator.num_replicas=2",),
    ),
    "few places, bound 1": Scenario(
        overrides=(_bound(1), "generator.max_num_seqs=6"),
        cure="one more replica",
        cured_by=("generator.num_replicas=2",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was predicted of a scenario, and what came."""

    found: str
    """The change that was predicted to help most."""
    is_right: bool
    predicted_before_s: float
    predicted_after_s: float
    before: Figures
    after: Figures

    @property
    def predicted_gain(self) -> float:
        return self.predicted_before_s / self.predicted_after_s

    @property
    def gain(self) -> float:
        return self.before.step_s / self.after.step_s

    @property
    def error(self) -> float:
        """Share by which the predicted gain is off."""
        return abs(self.predicted_gain / self.gain - 1.0)


def simulated(scenario: Scenario, settings: Sequence[str], profile: Profile) -> tuple[SimulatedRun, Profile]:
    """The scenario with its reward, as the simulator has it."""
    loaded = load_config([str(CONFIG)], list(settings))
    facts = read_model_facts(loaded.model.path)
    loaded = resolve(loaded, facts)
    run = of_config(loaded, facts, profile, num_steps=loaded.max_steps)
    if not scenario.sleep_s:
        return run, profile
    if scenario.is_far:
        num_calls = run.scorer.num_workers * CALLS_SIDE_BY_SIDE
        run = replace(run, scorer=run.scorer.model_copy(update={"num_workers": num_calls}))
    busy_s = profile.score_s.mean.mean
    score_s = scenario.sleep_s + busy_s
    cores = profile.cores.model_copy(update={"scorer": profile.cores.scorer * busy_s / score_s})
    return run, profile.model_copy(update={"score_s": Distribution.point(score_s), "cores": cores})


def play(scenario: Scenario, profile: Profile, *, num_steps: int, seed: int, folder: Path) -> Outcome:
    """Predict a scenario, then run it without and with its cure."""
    settings = [*QUIET, *scenario.settings, f"max_steps={num_steps}", f"seed={seed}"]
    found = what_if(*simulated(scenario, settings, profile))
    (cure,) = (one for one in found.gains if one.change.name == scenario.cure)
    figures = []
    for name, more in (("before", ()), ("after", scenario.cured_by)):
        run_dir = folder / name
        shutil.rmtree(run_dir, ignore_errors=True)
        start_app("apps.grpo", CONFIG, [*settings, *more, f"run_dir={run_dir}"])
        run, _ = simulated(scenario, [*settings, *more], profile)
        figures.append(measured(read_json_lines(run_dir / "metrics.jsonl"), run))
    return Outcome(
        found=found.gains[0].change.name,
        is_right=found.gains[0].change.name == scenario.cure,
        predicted_before_s=cure.before_s,
        predicted_after_s=cure.after_s,
        before=figures[0],
        after=figures[1],
    )


def results(outcomes: dict[str, Outcome]) -> Table:
    """A row for each scenario."""
    num_right = sum(one.is_right for one in outcomes.values())
    num_near = sum(one.error <= MAX_ERROR for one in outcomes.values())
    table = Table(
        title="seconds a step before -> after the cure",
        caption=f"{num_right} of {len(outcomes)} causes, {num_near} gains within {MAX_ERROR:.0%}",
    )
    for column in ("scenario", "found", "predicted", "measured", "gain", "error"):
        table.add_column(column, justify="left" if column in ("scenario", "found") else "right")
    for name, one in outcomes.items():
        table.add_row(
            name,
            one.found if one.is_right else f"{one.found} (wrong)",
            f"{one.predicted_before_s:.2f} -> {one.predicted_after_s:.2f}",
            f"{one.before.step_s:.2f} -> {one.after.step_s:.2f}",
            f"{one.predicted_gain:.2f} / {one.gain:.2f}",
            f"{one.error:.0%}",
        )
    return table


def main() -> None:
    """Predict and run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Causes and cures, predicted and run.")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=RESULTS / "simulation_counterfactuals")
    arguments = parser.parse_args()
    profile, outcomes, console = read_profile(arguments.profile), dict[str, Outcome](), Console(width=130)
    for name in arguments.scenarios:
        folder = arguments.folder / name.replace(",", "").replace(" ", "-")
        outcomes[name] = play(
            SCENARIOS[name], profile, num_steps=arguments.steps, seed=arguments.seed, folder=folder
        )
        console.print(results({name: outcomes[name]}))
    console.print(results(outcomes))
    facts = {"machine": machine_facts(), "scenarios": {name: asdict(one) for name, one in outcomes.items()}}
    write_json(arguments.folder / "simulation_counterfactuals.json", facts)


if __name__ == "__main__":
    main()
