"""benchmarks/chaos.py: what it finds in the files of a run."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import chaos_report
import pytest
from chaos_faults import HOST, STORAGE, Kind, Moment
from chaos_report import Evidence, first_difference, match, rows

from tests.benchmarks.made_faults import detected, injected, planned, recovered


def good() -> Evidence:
    """Two faults of the scorer, one of an environment worker, and a delay that nobody noticed."""
    kinds = [("scorer", Kind.SIGKILL), ("environment", Kind.SIGSTOP)]
    kinds += [("scorer", Kind.SIGSTOP), ("scorer", Kind.DELAYED_MESSAGES)]
    faults = [injected(role, kind, 100.0 * n, number=n) for n, (role, kind) in enumerate(kinds)]
    faults[3] = dataclasses.replace(faults[3], words="num_messages: 3")
    events = []
    for number, (role, _) in enumerate(kinds[:3]):
        begin_s = 100.0 * number + number
        events += [detected(role, begin_s + 1, number), recovered(role, begin_s + 10, number)]
    steps: list[dict[str, Any]] = [{"step": 0}]
    for step in (1, 2, 3, 4):
        steps.append({"step": step, "time/step_s": 2.0, "time/elapsed_s": 2.5 * step})
        for what in ("detected", "recovered"):
            counted = {"scorer": 2.0, "environment": 1.0, "buffer": 0.0}
            steps[-1] |= {f"faults/{what}_{role}": number for role, number in counted.items()}
    steps[-1] |= {"time/eval_s": 0.5, "time/step_s": 2.5}
    return Evidence(
        planned=[planned(role, kind, at_step=number) for number, (role, kind) in enumerate(kinds)],
        injected=faults,
        faults=[event | {"who": f"the {event['role']}", "what": "has died"} for event in events],
        metrics=steps,
        rollouts=[
            {"step": step, "group_id": 2 * step + group, "episode": episode, "agent": "a"}
            for step in (1, 2, 3, 4)
            for group in (0, 1)
            for episode in (0, 1)
        ],
        ledger=[
            *({"event": "trained", "step": step, "groups": [2 * step, 2 * step + 1]} for step in (1, 2)),
            {"event": "trained", "step": 3, "groups": [100, 101]},
            {"event": "resumed", "step": 2},
            *({"event": "trained", "step": step, "groups": [2 * step, 2 * step + 1]} for step in (3, 4)),
        ],
        max_steps=4,
        groups_per_step=2,
        exit_code=0,
        problems={"apps.verify": None},
        left=(),
    )


def test_nothing_differs_where_all_counts_agree() -> None:
    assert first_difference(good()) is None


Change = Callable[[Evidence], object]


def unknown(role: str, time_s: float) -> Change:
    """One more line of faults.jsonl."""
    event = detected(role, time_s, 3) | {"who": "it", "what": "died"}
    return lambda one: one.faults.append(event)


def last_step(**values: float) -> Change:
    """Other metrics of the last step."""
    return lambda one: one.metrics[-1].update(
        {key.replace("__", "/"): value for key, value in values.items()}
    )


def change_fault(number: int, **values: object) -> Change:
    def change(one: Evidence) -> None:
        one.injected[number] = dataclasses.replace(one.injected[number], **values)

    return change


OTHER_GROUPS = "step 4 was trained on other groups than in the ledger"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exit_code": 1}, "exit code 1"),
        # Injection switched off.
        ({"injected": (), "faults": ()}, "scorer: 3 faults were to be injected, 0 were injected"),
        (lambda one: one.injected.pop() and one.injected.pop(), "scorer: 3 .* 1 were injected"),
        (lambda one: one.faults.pop(0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (lambda one: one.faults.pop(2), r"environment: fault 2 \(sigstop, step\) was not detected"),
        (lambda one: one.faults.pop(5), r"scorer: fault 3 \(sigstop, step\) was not recovered"),
        (unknown("buffer", 1.0), "buffer: nobody has injected this: it died"),
        # Within a delay that is below the heartbeat.
        (unknown("scorer", 301.0), "scorer: nobody has injected this"),
        (unknown("storage", 301.0), "storage: nobody has injected this"),
        (change_fault(3, words="num_messages: 0"), "has held no message"),
        (change_fault(0, time_s=50.0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (lambda one: one.metrics.pop(), "has steps .* not 1 to 4"),
        (lambda one: one.metrics.append(one.metrics[-1]), "has steps .* not 1 to 4"),
        (last_step(faults__recovered_scorer=1.0), "faults/recovered_scorer = 1, and faults.jsonl has 2"),
        (last_step(faults__detected_buffer=1.0), "faults/detected_buffer = 1, and faults.jsonl has 0"),
        (lambda one: one.rollouts[4].update(step=1), "group 4 was trained on in steps 1 and 2"),
        (
            lambda one: one.rollouts[5].update(episode=0),
            "episode 0 of group 4 was trained on twice in step 2",
        ),
        (lambda one: one.rollouts.pop() and one.rollouts.pop(), "step 4 was trained on 1 groups"),
        (lambda one: one.ledger.pop(), OTHER_GROUPS + r": \[8, 9\] are in one only"),
        (lambda one: one.ledger.append({"event": "resumed", "step": 3}), OTHER_GROUPS),
        ({"problems": {"apps.verify": None, "a witness": "2 times"}}, "a witness: 2 times"),
        ({"left": ("process 12",)}, "left behind: process 12"),
    ],
)
def test_whatever_differs_is_said(change: dict[str, object] | Change, said: str) -> None:
    evidence = good()
    if isinstance(change, dict):
        evidence = dataclasses.replace(evidence, **change)
    else:
        change(evidence)
    difference = first_difference(evidence)
    assert difference is not None and re.search(said, difference), difference


def test_a_loss_while_nobody_looks_after_its_role_may_be_the_controllers() -> None:
    events = [detected("controller", 12.0, 0), detected("controller", 30.0, 1)]
    resumed = [
        injected("controller", Kind.SIGKILL, 10.0, Moment.RESUME),
        injected("trainer", Kind.SIGKILL, 20.0, Moment.RESUME),
    ]
    matches, extra = match(resumed, events)
    assert [one.detected for one in matches] == events and not extra
    at_a_step = [resumed[0], dataclasses.replace(resumed[1], moment=Moment.STEP)]
    matches, extra = match(at_a_step, events)
    assert matches[1].detected is None and extra == [events[1]]
    # Its own role comes first.
    own = [*events[:1], detected("trainer", 40.0, 1), detected("controller", 30.0, 2)]
    matches, extra = match(resumed, own)
    assert matches[1].detected == own[1] and extra == [own[2]]


def test_outages_of_a_disk_that_overlap_are_each_counted() -> None:
    """A checkpoint that the first outage has refused is tried again after the second one."""
    first = injected(STORAGE, Kind.FULL_DISK, 10.0, Moment.CHECKPOINT)
    second = injected(STORAGE, Kind.FULL_DISK, 21.0)
    third = injected(STORAGE, Kind.FULL_DISK, 60.0)
    ledger = [detected(STORAGE, 11.0, 0), recovered(STORAGE, 15.0, 0)]
    checkpoint = [detected(STORAGE, 20.0, 1), recovered(STORAGE, 30.0, 1)]
    last = [detected(STORAGE, 61.0, 2), recovered(STORAGE, 65.0, 2)]
    matches, extra = match([first, second, third], [*ledger, *checkpoint, *last])
    assert [one.detected for one in matches] == [ledger[0], checkpoint[0], last[0]] and not extra
    assert [one.recovered for one in matches] == [ledger[1], checkpoint[1], last[1]]
    (row,) = rows(matches)
    assert (row["num_detected"], row["num_recovered"], row["detection_p50_s"]) == (3, 3, 1.0)
    # A fault that was over before says nothing of it, and neither does one that nobody has injected.
    matches, extra = match([first, second], ledger)
    assert matches[1].detected is None and not extra
    matches, extra = match([first, second], [detected(STORAGE, 5.0, 0)])
    assert [one.detected for one in matches] == [None, None] and len(extra) == 1
    # A line of its own comes before one that goes on.
    own = [detected(STORAGE, 23.0, 2), recovered(STORAGE, 28.0, 2)]
    matches, extra = match([first, second], [*ledger, *checkpoint, *own])
    assert matches[1].detected == own[0] and not extra


def test_what_dies_at_the_very_end_may_not_be_missed() -> None:
    ((scorer,), _) = match([injected("scorer", Kind.SIGKILL, 1.0, Moment.SHUTDOWN)], [])
    ((controller,), _) = match([injected("controller", Kind.SIGKILL, 1.0, Moment.SHUTDOWN)], [])
    assert not scorer.is_expected and controller.is_expected


def test_times_are_counted_from_the_injection_by_role_and_kind() -> None:
    evidence = good()
    found = rows(match(evidence.injected, evidence.faults)[0])
    by_kind = {(row["role"], row["kind"]): row for row in found}
    assert len(by_kind) == 4
    kill, stop = by_kind["scorer", "sigkill"], by_kind["scorer", "sigstop"]
    assert (kill["detection_p50_s"], kill["recovery_p95_s"]) == (1.0, 10.0)
    assert (stop["detection_p50_s"], stop["recovery_p50_s"]) == (3.0, 12.0)
    delay = by_kind["scorer", "delayed_messages"]
    assert (delay["num_injected"], delay["num_expected"], delay["num_detected"]) == (1, 0, 0)
    # Without the last recovery.
    (*_, unfinished) = rows(match(evidence.injected, evidence.faults[:-1])[0])
    assert (unfinished["num_injected"], unfinished["num_detected"], unfinished["num_recovered"]) == (1, 1, 0)
    assert unfinished["recovery_p50_s"] is None


def test_a_step_is_timed_without_the_evaluation_that_it_waits_for() -> None:
    assert chaos_report.step_median_s(good().metrics) == 2.0


def test_what_a_fault_costs_is_counted_to_the_next_one() -> None:
    # Steps of 2 s from second 0. The second one is 3 s late after the first fault. The third one is 2 s late,
    # within two more faults. The fourth one is 7 s late, of which nobody has injected anything.
    seen_s = {0: 0.0, 1: 2.0, 2: 7.0, 3: 11.0, 4: 20.0, 5: 22.5}
    steps = [{"step": step, "time/eval_s": 0.5 if step == 5 else 0.0} for step in seen_s]
    faults = [
        injected(role, Kind.SIGKILL, time_s, moment, number=number)
        for number, role, moment, time_s in (
            (0, "scorer", Moment.STEP, 3.0),
            (1, "generator", Moment.STEP, 7.5),
            (2, "controller", Moment.RESUME, 8.0),
            (2, "trainer", Moment.RESUME, 15.0),
        )
    ]
    lost = chaos_report.lost_times(faults, seen_s, steps, undisturbed_step_s=2.0)
    assert [(one["role"], one["moment"], one["lost_s"]) for one in lost] == [
        ("scorer", "step", pytest.approx(3.0)),
        ("generator", "step", pytest.approx(1.0)),
        ("trainer", "resume", pytest.approx(1.0 + 7.0)),
    ]
    # Before the first line nothing is known of the pace, and after the last one nothing is lost.
    for time_s in (-1.0, 23.0):
        alone = [injected("scorer", Kind.SIGKILL, time_s)]
        assert chaos_report.lost_times(alone, seen_s, steps, undisturbed_step_s=2.0) == []


def test_lengths_are_compared_with_runs_without_faults() -> None:
    def rollouts(*lengths: int) -> list[dict[str, Any]]:
        return [{"response_tokens": one} for one in lengths]

    undisturbed = [rollouts(10, 20, 30), rollouts(12, 22, 32)]
    assert chaos_report.length_problem(rollouts(31, 21, 11, 11, 21, 31), undisturbed) is None
    # Without the long responses.
    said = chaos_report.length_problem(rollouts(11, 11, 21), undisturbed)
    assert said is not None and said.endswith("from those of runs without faults, which differ by 2")


def test_what_was_on_a_lost_host_is_lost_with_it() -> None:
    lost = injected(HOST, Kind.SIGKILL, 10.0)
    events = [detected("generator", 11.0, 0), detected(HOST, 12.0, 1)]
    come_back = recovered(HOST, 50.0, 1)
    matches, extra = match([lost], [*events, come_back])
    assert matches[0].detected == events[1] and not extra
    later = detected("generator", 60.0, 2)
    assert match([lost], [*events, come_back, later])[1] == [later]
    assert match([lost], [*events, detected("scorer", 20.0, 2)])[1]
