"""Continuous batching by events against one that goes token by token."""

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.plugins.simulator import Clock, Engine, EngineCost, Sequence
from tests.plugins.simulator.made_engines import decode_table, engine_cost, made_group, play

BASE_S, SEQUENCE_S, CONTEXT_S, PREFILL_S = 0.01, 0.001, 0.00001, 0.0005


STEPS_S = {
    (num, context): BASE_S + SEQUENCE_S * num + CONTEXT_S * context
    for num, context in itertools.product((1, 64), (0, 10_000))
}


def _cost(**limits: float) -> EngineCost:
    """A step takes BASE_S, SEQUENCE_S a sequence and CONTEXT_S a token of the mean context."""
    return engine_cost(decode_table(STEPS_S), prefill_s=PREFILL_S, **limits)


def _by_tokens(
    groups: list[list[int]], num_prompt: int, max_num_seqs: int, kv_block_tokens: int
) -> tuple[dict[tuple[int, int], float], float]:
    """Times at which responses end, one step after the other, and when the last one has ended."""
    waiting = deque((group, index) for group, lengths in enumerate(groups) for index in range(len(lengths)))
    running: dict[tuple[int, int], int] = {}
    computed: set[int] = set()
    ends: dict[tuple[int, int], float] = {}
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            key = waiting.popleft()
            num_cached = (num_prompt - 1) // kv_block_tokens * kv_block_tokens if key[0] in computed else 0
            computed.add(key[0])
            now_s += (num_prompt - num_cached) * PREFILL_S
            running[key] = 1
        ended = [key for key, num in running.items() if num == groups[key[0]][key[1]]]
        for key in ended:
            del running[key]
            ends[key] = now_s
        if ended:
            continue
        context = num_prompt + sum(running.values()) / len(running)
        # The middle of a step: a token longer at its end than at its beginning.
        now_s += BASE_S + SEQUENCE_S * len(running) + CONTEXT_S * (context + 0.5)
        for key in list(running):
            running[key] += 1
    return ends, now_s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 12),
    st.integers(1, 40),
)
def test_responses_end_when_they_do_token_by_token(
    lengths: list[list[int]], num_prompt: int, max_num_seqs: int, kv_block_tokens: int
) -> None:
    clock = Clock()
    ends: dict[tuple[int, int], float] = {}

    def ended(sequence: Sequence) -> None:
        ends[sequence.group.group_id, sequence.index] = clock.now_s

    cost = _cost(max_num_seqs=max_num_seqs, kv_block_tokens=kv_block_tokens)
    engine = Engine(0, cost, clock, ended)
    groups = [made_group(number, one, num_prompt=num_prompt) for number, one in enumerate(lengths)]
    engine.add(sequence for group in groups for sequence in group.sequences)
    play(clock)
    expected, last_s = _by_tokens(lengths, num_prompt, max_num_seqs, kv_block_tokens)
    assert ends == {key: pytest.approx(end_s) for key, end_s in expected.items()}
    assert engine.total_busy_s == pytest.approx(last_s)


def test_tokens_belong_to_the_version_that_was_there() -> None:
    """Step i takes 0.011015 + 0.00001 i s: 44 whole ones in 0.5 s, 53 in 0.605 s, after the first token."""
    clock = Clock()
    ended: list[Sequence] = []
    engine = Engine(0, _cost(), clock, ended.append)
    (sequence,) = made_group(0, [100]).sequences
    engine.add([sequence])
    clock.after(0.5, lambda: engine.swap(1, 0.0, recompute=False))
    clock.after(0.605, lambda: engine.swap(2, 0.0, recompute=False))
    play(clock)
    assert sequence.spans == [(0, 45), (1, 9), (2, 46)]


def test_steps_that_the_clock_cannot_tell_apart_end() -> None:
    """At 1e5 s a step of 1e-13 s adds nothing to the time."""
    clock = Clock()
    ended: list[Sequence] = []
    short = {key: 1e-13 for key in STEPS_S}
    engine = Engine(0, engine_cost(decode_table(short), prefill_s=PREFILL_S), clock, ended.append)
    sequences = made_group(0, [100, 7]).sequences
    clock.after(1e5, lambda: engine.add(sequences))
    for _ in range(1000):
        if not clock.step():
            break
    assert len(ended) == 2


def test_a_swap_costs_its_pause_and_what_is_computed_again() -> None:
    """A prompt token and 99 steps of 0.01 s, 49 of them before the swap."""

    def end_s(recompute: bool) -> float:
        clock = Clock()
        cost = engine_cost(decode_table({(1, 0): 0.01}), prefill_s=PREFILL_S)
        engine = Engine(0, cost, clock, lambda one: None)
        engine.add(made_group(0, [100]).sequences)
        clock.after(PREFILL_S + 0.49, lambda: engine.swap(1, 0.25, recompute=recompute))
        play(clock)
        return clock.now_s

    assert end_s(False) == pytest.approx(PREFILL_S + 0.99 + 0.25)
    # The prompt and the tokens so far.
    assert end_s(True) == pytest.approx(PREFILL_S + 0.99 + 0.25 + 51 * PREFILL_S)


def test_a_full_cache_makes_the_last_sequence_wait_and_loses_no_token() -> None:
    clock = Clock()
    ended: list[Sequence] = []
    engine = Engine(0, _cost(max_kv_tokens=150), clock, ended.append)
    for number in range(3):
        engine.add(made_group(number, [80], num_prompt=10).sequences)
    assert engine.num_running == 3
    play(clock)
    assert len(ended) == 3 and [one.num_sampled for one in ended] == [80, 80, 80]
    # Once when three have 50 each, once when two have 75 each, and the third when it comes back too soon.
    assert 2 <= engine.num_preempted <= 3
