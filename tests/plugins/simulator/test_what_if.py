"""The right cause with its number: what a change is said to bring is what the changed run takes."""

from typing import Any

import pytest

from forgeasync.config import BufferSection, ScorerSection
from forgeasync.plugins.simulator import simulate, what_if
from tests.support.profiles import simple_profile, small_run

FIXED = (50.0, 50.0)

FAST = {"lengths": FIXED, "token_s": 1e-6}
TWO_SCORERS = ScorerSection(num_workers=2)
SMALL_BUFFER = BufferSection(max_in_flight=2, adapt_load=False)


@pytest.mark.parametrize(
    ("run", "profile", "change", "least"),
    [
        ({"max_num_seqs": 8}, FAST, "one more replica", 0.5),
        ({}, {"lengths": FIXED, "token_s": 1e-2}, "a trainer twice as fast", 0.5),
        ({"scorer": TWO_SCORERS}, FAST | {"score_s": 1.0}, "one more scorer", 0.5),
        ({"buffer": SMALL_BUFFER}, FAST, "a buffer twice as large", 0.5),
        ({"max_off_policy_steps": 0}, FAST | {"swap_s": 4.0}, "weights twice as fast", 0.3),
    ],
)
def test_the_change_that_helps_is_found(
    run: dict[str, Any], profile: dict[str, Any], change: str, least: float
) -> None:
    found = what_if(small_run(num_steps=20, **run), simple_profile(**profile))
    assert found.best is not None
    assert found.best.change.name == change, [gain.words for gain in found.gains]
    assert found.best.share >= least - 0.05
    # Counterfactual: the run that has the change.
    changed = simulate(found.best.change.run, found.best.change.profile)
    assert found.best.after_s == changed.step_s
    steps = f"{found.base.step_s:.3g} -> {changed.step_s:.3g} s a step"
    assert found.verdict == f"{found.best.change.bound}; {change}: {steps}"


def test_a_synchronous_run_gains_most_from_a_bound() -> None:
    """Half of a step trains and half of it generates: one version ahead does both at once."""
    run = small_run(num_steps=20, max_off_policy_steps=0, buffer=BufferSection(adapt_load=False))
    found = what_if(run, simple_profile(lengths=FIXED, token_s=5e-4))
    assert found.best is not None and found.best.change.name == "max_off_policy_steps 1"
    assert found.best.share == pytest.approx(0.5, abs=0.06)


def test_where_nothing_helps_it_says_so() -> None:
    run = small_run(num_steps=10)
    found = what_if(run, simple_profile(lengths=FIXED, token_s=1e-6, between_s=100.0))
    assert found.best is None
    assert found.verdict.startswith("nothing that was tried brings 2%")
