"""benchmarks/chaos.py: what it finds in the files of a run."""

import dataclasses
import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from chaos import measured_band
from chaos_faults import HOST, STORAGE, Injected, Kind, Moment, Planned
from chaos_report import (
    Evidence,
    accuracy_of,
    distance,
    first_difference,
    length_distances,
    lost_times,
    match,
    rows,
    step_median_s,
)
from hypothesis import given
from hypothesis import strategies as st


def planned(role: str, kind: Kind, *, at_step: int, **more: Any) -> Planned:
    return Planned(
        **({"role": role, "kind": kind, "at_step": at_step, "pause_share": 0.0, "which": 0.0} | more)
    )


def good() -> Evidence:
    """Two faults of the scorer, one of an environment worker, and a delay that nobody noticed."""
    kinds = [
        ("scorer", Kind.SIGKILL),
        ("environment", Kind.SIGSTOP),
        ("scorer", Kind.SIGSTOP),
        ("scorer", Kind.DELAYED_MESSAGES),
    ]
    injected = [
        Injected(
            number=number,
            time_s=100.0 * number,
            role=role,
            rank=0,
            kind=kind,
            moment=Moment.STEP,
            pid=7,
            words="num_messages: 3" if kind is Kind.DELAYED_MESSAGES else "",
        )
        for number, (role, kind) in enumerate(kinds)
    ]
    events: list[dict[str, Any]] = []
    for number, (role, _) in enumerate(kinds[:3]):
        about = {"number": number, "role": role, "who": f"the {role}", "what": "has died"}
        events += [
            {"event": "detected", "time_s": 100.0 * number + 1 + number, **about},
            {"event": "recovered", "time_s": 100.0 * number + 10 + number, **about},
        ]
    steps: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1}]
    for step in (1, 2, 3, 4):
        steps.append({"step": step, "time/step_s": 2.0, "time/elapsed_s": 2.5 * step})
        for what in ("detected", "recovered"):
            counted = {f"faults/{what}_scorer": 2.0, f"faults/{what}_environment": 1.0}
            steps[-1] |= counted | {f"faults/{what}_buffer": 0.0}
    steps[-1] |= {"eval/accuracy": 0.5, "time/eval_s": 0.5, "time/step_s": 2.5}
    return Evidence(
        planned=[planned(role, kind, at_step=number) for number, (role, kind) in enumerate(kinds)],
        injected=injected,
        events=events,
        steps=steps,
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
        ledger_problem=None,
        band=(0.4, 0.6),
        lengths=(2.0, 1.0),
        left=(),
    )


def test_nothing_differs_where_all_counts_agree() -> None:
    assert first_difference(good()) is None
    assert first_difference(dataclasses.replace(good(), band=None)) is None


def _with(**changes: object) -> Callable[[Evidence], Evidence]:
    return lambda evidence: dataclasses.replace(evidence, **changes)


def _without_event(number: int) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        events = [one for place, one in enumerate(evidence.events) if place != number]
        return dataclasses.replace(evidence, events=events)

    return change


def _one_more(role: str, time_s: float) -> Callable[[Evidence], Evidence]:
    event = {"event": "detected", "role": role, "number": 3, "time_s": time_s, "who": "it", "what": "died"}
    return lambda evidence: dataclasses.replace(evidence, events=[*evidence.events, event])


def _last_step(**values: float) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        named = {key.replace("__", "/"): value for key, value in values.items()}
        return dataclasses.replace(evidence, steps=[*evidence.steps[:-1], evidence.steps[-1] | named])

    return change


def _rollout(place: int, **values: int) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        rollouts = [one | values if number == place else one for number, one in enumerate(evidence.rollouts)]
        return dataclasses.replace(evidence, rollouts=rollouts)

    return change


def _injected(place: int, **values: object) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        injected = list(evidence.injected)
        injected[place] = dataclasses.replace(injected[place], **values)
        return dataclasses.replace(evidence, injected=injected)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with(exit_code=1), "exit code 1"),
        # Injection switched off.
        (_with(injected=(), events=()), "scorer: 3 faults were to be injected, 0 were injected"),
        (lambda one: dataclasses.replace(one, injected=one.injected[:2]), "scorer: 3 .* 1 were injected"),
        (_without_event(0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (_without_event(2), r"environment: fault 2 \(sigstop, step\) was not detected"),
        (_without_event(5), r"scorer: fault 3 \(sigstop, step\) was not recovered"),
        (_one_more("buffer", 1.0), "buffer: nobody has injected this: it died"),
        # Within a delay that is below the heartbeat.
        (_one_more("scorer", 301.0), "scorer: nobody has injected this"),
        (_one_more("storage", 301.0), "storage: nobody has injected this"),
        (_injected(3, words="num_messages: 0"), "has held no message"),
        (_injected(0, time_s=50.0), r"scorer: fault 3 \(sigstop, step\) was not detected"),
        (lambda one: dataclasses.replace(one, steps=one.steps[:-1]), "has steps .* not 1 to 4"),
        (lambda one: dataclasses.replace(one, steps=[*one.steps, one.steps[-1]]), "has steps .* not 1 to 4"),
        (_last_step(faults__recovered_scorer=1.0), "faults/recovered_scorer = 1, and faults.jsonl has 2"),
        (_last_step(faults__detected_buffer=1.0), "faults/detected_buffer = 1, and faults.jsonl has 0"),
        (_rollout(4, step=1), "group 4 was trained on in steps 1 and 2"),
        (_rollout(5, episode=0), "episode 0 of group 4 was trained on twice in step 2"),
        (lambda one: dataclasses.replace(one, rollouts=one.rollouts[:-2]), "step 4 was trained on 1 groups"),
        (
            lambda one: dataclasses.replace(one, ledger=one.ledger[:-1]),
            r"step 4 was trained on other groups than in the ledger: \[8, 9\] are in one only",
        ),
        (
            lambda one: dataclasses.replace(one, ledger=[*one.ledger, {"event": "resumed", "step": 3}]),
            "step 4 was trained on other groups than in the ledger",
        ),
        (_with(ledger_problem="prompt 7 has two ends"), "apps.verify: prompt 7 has two ends"),
        (_with(witness_problem="its row says 2 times"), "the counting witness: its row says 2 times"),
        (_last_step(**{"eval__accuracy": 0.39}), "accuracy is 0.39, .* 0.4 to 0.6"),
        (_last_step(**{"eval__accuracy": float("nan")}), "accuracy is nan"),
        (_with(lengths=(2.1, 1.0)), "faults is 2.1 tokens, and theirs 1;"),
        (_with(left=("process 12",)), "left behind: process 12"),
    ],
)
def test_whatever_differs_is_said(change: Callable[[Evidence], Evidence], said: str) -> None:
    difference = first_difference(change(good()))
    assert difference is not None and re.search(said, difference), difference


def _fault(role: str, kind: Kind, moment: Moment, time_s: float) -> Injected:
    return Injected(number=0, time_s=time_s, role=role, rank=0, kind=kind, moment=moment, pid=7)


def _noticed(role: str, time_s: float, number: int) -> dict[str, Any]:
    return {"event": "detected", "role": role, "time_s": time_s, "number": number}


def test_a_loss_while_nobody_looks_after_its_role_may_be_the_controllers() -> None:
    events = [_noticed("controller", 12.0, 0), _noticed("controller", 30.0, 1)]
    resumed = [
        _fault("controller", Kind.SIGKILL, Moment.RESUME, 10.0),
        _fault("trainer", Kind.SIGKILL, Moment.RESUME, 20.0),
    ]
    matches, extra = match(resumed, events)
    assert [one.detected for one in matches] == events and not extra
    at_a_step = [resumed[0], dataclasses.replace(resumed[1], moment=Moment.STEP)]
    matches, extra = match(at_a_step, events)
    assert matches[1].detected is None and extra == [events[1]]
    # Its own role comes first.
    own = [*events[:1], _noticed("trainer", 40.0, 1), _noticed("controller", 30.0, 2)]
    matches, extra = match(resumed, own)
    assert matches[1].detected == own[1] and extra == [own[2]]


def test_what_an_outage_delays_belongs_to_it() -> None:
    outage = _fault(STORAGE, Kind.FULL_DISK, Moment.STEP, 10.0)
    events = [_noticed(STORAGE, 12.0, 0), _noticed(STORAGE, 20.0, 1)]
    matches, extra = match([outage], events)
    assert matches[0].detected == events[0] and not extra
    early = [_noticed(STORAGE, 5.0, 0)]
    matches, extra = match([outage], early)
    assert matches[0].detected is None and extra == early


def test_outages_of_a_disk_that_overlap_are_each_counted() -> None:
    """A checkpoint that the first outage has refused is tried again after the second one."""
    first = _fault(STORAGE, Kind.FULL_DISK, Moment.CHECKPOINT, 10.0)
    second = _fault(STORAGE, Kind.FULL_DISK, Moment.STEP, 21.0)
    third = _fault(STORAGE, Kind.FULL_DISK, Moment.STEP, 60.0)

    def back(time_s: float, number: int) -> dict[str, Any]:
        return _noticed(STORAGE, time_s, number) | {"event": "recovered"}

    ledger = [_noticed(STORAGE, 11.0, 0), back(15.0, 0)]
    checkpoint = [_noticed(STORAGE, 20.0, 1), back(30.0, 1)]
    last = [_noticed(STORAGE, 61.0, 2), back(65.0, 2)]
    matches, extra = match([first, second, third], [*ledger, *checkpoint, *last])
    assert [one.detected for one in matches] == [ledger[0], checkpoint[0], last[0]] and not extra
    assert [one.recovered for one in matches] == [ledger[1], checkpoint[1], last[1]]
    (row,) = rows(matches)
    assert (row["num_detected"], row["num_recovered"], row["detection_p50_s"]) == (3, 3, 1.0)
    # A fault that was over before says nothing of it, and neither does one that nobody has injected.
    matches, extra = match([first, second], ledger)
    assert matches[1].detected is None and not extra
    matches, extra = match([first, second], [_noticed(STORAGE, 5.0, 0)])
    assert [one.detected for one in matches] == [None, None] and len(extra) == 1
    # A line of its own comes before one that goes on.
    own = [_noticed(STORAGE, 23.0, 2), back(28.0, 2)]
    matches, extra = match([first, second], [*ledger, *checkpoint, *own])
    assert matches[1].detected == own[0] and not extra


def test_what_dies_at_the_very_end_may_not_be_missed() -> None:
    ((scorer,), _) = match([_fault("scorer", Kind.SIGKILL, Moment.SHUTDOWN, 1.0)], [])
    ((controller,), _) = match([_fault("controller", Kind.SIGKILL, Moment.SHUTDOWN, 1.0)], [])
    assert not scorer.is_expected and controller.is_expected


def test_times_are_counted_from_the_injection_by_role_and_kind() -> None:
    evidence = good()
    found = rows(match(evidence.injected, evidence.events)[0])
    by_kind = {(row["role"], row["kind"]): row for row in found}
    assert len(by_kind) == 4
    kill, stop = by_kind["scorer", "sigkill"], by_kind["scorer", "sigstop"]
    assert (kill["detection_p50_s"], kill["recovery_p95_s"]) == (1.0, 10.0)
    assert (stop["detection_p50_s"], stop["recovery_p50_s"]) == (3.0, 12.0)
    delay = by_kind["scorer", "delayed_messages"]
    assert (delay["num_injected"], delay["num_expected"], delay["num_detected"]) == (1, 0, 0)
    # Without the last recovery.
    (*_, unfinished) = rows(match(evidence.injected, evidence.events[:-1])[0])
    assert (unfinished["num_injected"], unfinished["num_detected"], unfinished["num_recovered"]) == (1, 1, 0)
    assert unfinished["recovery_p50_s"] is None


def test_steps_and_bands() -> None:
    steps = good().steps
    assert step_median_s(steps) == 2.0
    assert accuracy_of(steps) == 0.5 and accuracy_of(steps[:3]) is None
    assert measured_band([0.5, 0.6]) == pytest.approx((0.4, 0.7))
    assert measured_band([0.5]) == pytest.approx((0.48, 0.52))


def test_what_a_fault_costs_is_counted_to_the_next_one() -> None:
    # Steps of 2 s from second 0. The second one is 3 s late after the first fault. The third one is 2 s late,
    # within two more faults. The fourth one is 7 s late, of which nobody has injected anything.
    seen_s = {0: 0.0, 1: 2.0, 2: 7.0, 3: 11.0, 4: 20.0, 5: 22.5}
    steps = [{"step": step, "time/eval_s": 0.5 if step == 5 else 0.0} for step in seen_s]
    faults = [
        dataclasses.replace(_fault(role, Kind.SIGKILL, moment, time_s), number=number)
        for number, role, moment, time_s in (
            (0, "scorer", Moment.STEP, 3.0),
            (1, "generator", Moment.STEP, 7.5),
            (2, "controller", Moment.RESUME, 8.0),
            (2, "trainer", Moment.RESUME, 15.0),
        )
    ]
    lost = lost_times(faults, seen_s, steps, undisturbed_step_s=2.0)
    assert [(one["role"], one["moment"], one["lost_s"]) for one in lost] == [
        ("scorer", "step", pytest.approx(3.0)),
        ("generator", "step", pytest.approx(1.0)),
        ("trainer", "resume", pytest.approx(1.0 + 7.0)),
    ]
    # Before the first line nothing is known of the pace, and after the last one nothing is lost.
    for time_s in (-1.0, 23.0):
        alone = [_fault("scorer", Kind.SIGKILL, Moment.STEP, time_s)]
        assert lost_times(alone, seen_s, steps, undisturbed_step_s=2.0) == []


@given(
    first=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    second=st.lists(st.integers(0, 300), min_size=1, max_size=30),
)
def test_the_distance_of_lengths_is_the_mean_of_what_quantiles_differ_by(
    first: list[int], second: list[int]
) -> None:
    # Both samples with as many values, each of them as often: the distance does not change.
    pairs = zip(sorted(first * len(second)), sorted(second * len(first)), strict=True)
    expected = statistics.mean(abs(one - other) for one, other in pairs)
    assert distance(first, second) == pytest.approx(expected)


def test_lengths_are_compared_with_runs_without_faults() -> None:
    def rollouts(*lengths: int) -> list[dict[str, Any]]:
        return [{"response_tokens": one} for one in lengths]

    references = [rollouts(10, 20), rollouts(12, 22)]
    assert length_distances(rollouts(11, 21), references) == (1.0, 2.0)
    assert length_distances(rollouts(11, 21), references[:1]) is None


def test_what_was_on_a_lost_host_is_lost_with_it() -> None:
    lost = _fault(HOST, Kind.SIGKILL, Moment.STEP, 10.0)
    events = [_noticed("generator", 11.0, 0), _noticed(HOST, 12.0, 1)]
    come_back = {"event": "recovered", "role": HOST, "number": 1, "time_s": 50.0}
    matches, extra = match([lost], [*events, come_back])
    assert matches[0].detected == events[1] and not extra
    later = _noticed("generator", 60.0, 2)
    assert match([lost], [*events, come_back, later])[1] == [later]
    assert match([lost], [*events, _noticed("scorer", 20.0, 2)])[1]
