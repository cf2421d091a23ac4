"""When a run adds a replica by itself: as soon as one more is predicted to save a tenth of a step."""

from forgeasync.prediction.record import PredictedChange, Prediction
from forgeasync.simulation import ONE_MORE_REPLICA

LEAST_SAVING = 0.1
"""Share of the step time that one more replica has to save."""


class Growth:
    """Decides on growing, one prediction after the other. Pure: who has it makes it happen."""

    def __init__(self, *, max_replicas: int, num_each: int) -> None:
        """``num_each`` replicas are added at once: one on every host of generators, as they all have the same
        number."""
        self._max_replicas = max_replicas
        self._num_each = num_each

    def wanted(self, prediction: Prediction, num_replicas: int) -> tuple[int, str] | None:
        """Return how many replicas a run should have that has so many, and why; None: no more than now.

        What was predicted of another number says nothing: after a replica was added, the next one waits for a
        prediction that has it.
        """
        num = num_replicas + self._num_each
        if prediction.num_replicas != num_replicas or num > self._max_replicas:
            return None
        change = _one_more(prediction)
        if change is None or change.after_s > (1.0 - LEAST_SAVING) * change.before_s:
            return None
        return num, change.words


def _one_more(prediction: Prediction) -> PredictedChange | None:
    changes = () if prediction.changes is None else prediction.changes.changes
    return next((one for one in changes if one.name == ONE_MORE_REPLICA), None)
