"""Simulated time."""

from forgeasync.plugins.simulator import Clock
from tests.plugins.simulator.made_engines import play


def test_canceled_events_do_not_run_and_events_of_one_time_keep_their_order() -> None:
    clock = Clock()
    seen = []
    for name in "abc":
        event = clock.after(1.0, lambda name=name: seen.append(name))
        if name == "b":
            event.cancel()
    clock.after(0.5, lambda: seen.append("first"))
    play(clock)
    assert seen == ["first", "a", "c"] and clock.now_s == 1.0
