"""When a run adds replicas by itself."""

import pytest

from forgeasync.prediction import Growth, PredictedChange, PredictedChanges, PredictedRun, Prediction
from forgeasync.simulation import ONE_MORE_REPLICA

RUN = PredictedRun(
    step_s=2.0, trained_tokens_per_s=10.0, trainer_idle_share=0.5, generators_idle_share=0.0, mean_age=1.0
)


def predicted(num_replicas: int, after_s: float | None, name: str = ONE_MORE_REPLICA) -> Prediction:
    changes = None
    if after_s is not None:
        change = PredictedChange(name=name, before_s=2.0, after_s=after_s)
        changes = PredictedChanges(verdict="", changes=(change,))
    return Prediction(after_step=0, num_replicas=num_replicas, run=RUN, changes=changes)


@pytest.mark.parametrize(
    ("prediction", "num_replicas", "wanted"),
    [
        (predicted(2, 1.5), 2, 3),
        (predicted(2, 1.8), 2, 3),
        (predicted(2, 1.81), 2, None),  # too little
        (predicted(2, 2.5), 2, None),  # it costs
        (predicted(1, 1.0), 2, None),  # of another number
        (predicted(3, 1.0), 2, None),
        (predicted(4, 1.0), 4, None),  # no more than 4
        (predicted(2, None), 2, None),  # changes are not simulated yet
        (predicted(2, 1.0, name="one more scorer"), 2, None),
    ],
)
def test_one_is_added_where_that_saves_a_tenth(
    prediction: Prediction, num_replicas: int, wanted: int | None
) -> None:
    found = Growth(max_replicas=4, num_each=1).wanted(prediction, num_replicas)
    assert (None if found is None else found[0]) == wanted
    if found is not None:
        assert found[1].startswith("one more replica: 2 -> ")


def test_every_host_gets_one() -> None:
    assert Growth(max_replicas=6, num_each=2).wanted(predicted(4, 1.0), 4) is not None
    assert Growth(max_replicas=5, num_each=2).wanted(predicted(4, 1.0), 4) is None


def test_a_run_stops_growing_where_it_helps_no_more() -> None:
    """Each replica halves what the one before has saved."""
    growth, num = Growth(max_replicas=64, num_each=1), 1
    sizes = []
    while (found := growth.wanted(predicted(num, 2.0 - 1.0 / 2.0**num), num)) is not None:
        num = found[0]
        sizes.append(num)
    assert sizes == [2, 3], "savings of 25, 12.5 and 6.25 %"
