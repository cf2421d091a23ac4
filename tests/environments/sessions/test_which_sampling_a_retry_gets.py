"""Which sampling an attempt joins, against rules that are written down a second time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import Attempt, KeyReused, Sampling, Samplings


def attempt(body: str = "a", num_retries: int = 0, key: str | None = None) -> Attempt:
    return Attempt(digest=body.encode(), num_retries=num_retries, idempotency_key=key)


def begin(samplings: Samplings[str], one: Attempt, work: str) -> Sampling[str]:
    sampling = samplings.begin(one, work)
    sampling.num_waiting = 1
    return sampling


def leave(sampling: Sampling[str], *, is_delivered: bool) -> None:
    sampling.num_waiting -= 1
    sampling.is_delivered |= is_delivered


def test_a_first_attempt_never_joins_without_a_key() -> None:
    samplings: Samplings[str] = Samplings(keep_s=10, max_kept=10)
    leave(begin(samplings, attempt(), "one"), is_delivered=False)
    assert samplings.find(attempt()) is None
    assert samplings.find(attempt(num_retries=1)).work == "one"
    assert samplings.find(attempt("b", num_retries=1)) is None


def test_which_of_several_a_retry_joins() -> None:
    samplings: Samplings[str] = Samplings(keep_s=10, max_kept=10)
    waited_for = begin(samplings, attempt(), "waited for")
    retry = attempt(num_retries=1)
    assert samplings.find(retry) is waited_for
    got = begin(samplings, attempt(), "got")
    leave(got, is_delivered=True)
    assert samplings.find(retry) is got
    samplings.refused(attempt())
    assert samplings.find(retry) is None
    assert samplings.find(retry) is got
    lost = begin(samplings, attempt(), "lost")
    leave(lost, is_delivered=False)
    samplings.refused(attempt())
    assert samplings.find(retry) is lost
    lost.num_waiting += 1
    assert samplings.find(retry) is None
    assert samplings.find(retry) is got


def test_a_key_binds_one_body() -> None:
    samplings: Samplings[str] = Samplings(keep_s=10, max_kept=10)
    keyed = begin(samplings, attempt(key="k"), "keyed")
    assert samplings.find(attempt(key="k")) is keyed
    assert samplings.find(attempt(key="k", num_retries=3)) is keyed
    assert samplings.find(attempt(key="other")) is None
    # A retry without the key is no retry of it.
    assert samplings.find(attempt(num_retries=1)) is None
    with pytest.raises(KeyReused):
        samplings.find(attempt("b", key="k"))


def test_what_failed_is_not_joined() -> None:
    samplings: Samplings[str] = Samplings(keep_s=10, max_kept=10)
    failed = begin(samplings, attempt(), "failed")
    samplings.ended(failed, has_failed=True, now_s=0)
    leave(failed, is_delivered=True)
    assert samplings.find(attempt(num_retries=1)) is None
    assert samplings.clear() == []


def test_what_is_kept_and_for_how_long() -> None:
    samplings: Samplings[str] = Samplings(keep_s=10, max_kept=2)
    all_ = [begin(samplings, attempt(str(index)), str(index)) for index in range(5)]
    for time_s, one in enumerate(all_[:4]):
        samplings.ended(one, has_failed=False, now_s=time_s)
    assert samplings.expired(100) == []  # Somebody waits for each.
    for one in all_[1:]:
        leave(one, is_delivered=False)
    # Of three that have ended and nobody waits for, the oldest goes; the last one runs.
    assert samplings.expired(3) == [all_[1]]
    assert samplings.expired(12) == []
    assert samplings.expired(12.5) == [all_[2]]
    assert samplings.expired(13.5) == [all_[3]]
    assert samplings.clear() == [all_[0], all_[4]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_client_gets_a_turn_and_none_is_sampled_without_need(data: st.DataObject) -> None:
    """Clients that ask the same, lose their connections and ask again until they have a turn.

    Each loss is noticed before the retry. Then every client ends with a turn that is its own.
    """
    samplings: Samplings[int] = Samplings(keep_s=1e9, max_kept=10**6)
    num_clients = data.draw(st.integers(1, 6))
    num_retries = [0] * num_clients
    held: dict[int, Sampling[int]] = {}
    waiting = set(range(num_clients))
    got: dict[int, int] = {}
    num_begun = num_refused = 0
    for _ in range(60):
        if not waiting:
            break
        client = data.draw(st.sampled_from(sorted(waiting)))
        if client in held:
            sampling = held.pop(client)
            if data.draw(st.booleans()):
                leave(sampling, is_delivered=True)
                waiting.remove(client)
                got[client] = sampling.work
            else:
                leave(sampling, is_delivered=False)
                num_retries[client] += 1
            continue
        one = attempt(num_retries=num_retries[client])
        found = samplings.find(one)
        if found is None and data.draw(st.booleans()):
            samplings.refused(one)
            num_retries[client] += 1
            num_refused += 1
            continue
        if found is None:
            found = samplings.begin(one, num_begun)
            num_begun += 1
        found.num_waiting += 1
        assert found.num_waiting == 1, "two clients wait for one turn"
        held[client] = found
    assert len(set(got.values())) == len(got)
    assert num_begun <= num_clients
