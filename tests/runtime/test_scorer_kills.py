"""Scorers that are killed while they score: no group is lost, none is scored twice."""

import pytest

from tests.support.scorer_kills import kill_scorers


@pytest.mark.exhaustive
def test_scorers_that_are_killed_under_load_lose_no_group_and_score_none_twice() -> None:
    killed = kill_scorers(8)
    assert killed.lost == () and killed.wrong == ()
    assert set(killed.num_ended) == set(range(killed.num_groups)), "every group has ended"
    assert set(killed.num_ended.values()) == {1}, "once"
    assert killed.metrics["faults/recovered_scorer"] == killed.metrics["faults/detected_scorer"] == 8
    assert killed.metrics["scoring/num_lost_calls"] > 0, "they had responses"
    assert killed.metrics["score/num_failed"] == 0
    assert killed.metrics["score/num_early"] > 0
