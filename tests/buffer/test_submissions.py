"""Which of the prompts that wait starts next."""

import pytest

from forgeasync.buffer import ATTEMPT_STRIDE, LengthHistory, Submission, Submissions, prompts
from tests.support.buffer_world import make_task, make_world, started


@pytest.mark.parametrize(("longest_first", "expected"), [(True, ["1", "2", "0"]), (False, ["0", "1", "2"])])
def test_within_a_cohort_the_longest_come_first_if_asked(longest_first: bool, expected: list[str]) -> None:
    world = make_world(3, 0, longest_first=longest_first)
    history = world.buffer._submissions.history
    for index, length in enumerate((5, 50, 20)):
        history.measure(make_task(index), length)
    assert [world.sampling[one].task.task_id for one in started(world)] == expected


def test_a_prompt_that_comes_again_keeps_the_first_lengths_that_were_known() -> None:
    submissions = Submissions(cohort_size=2, longest_first=False)
    for index in range(3):
        submissions.submit(make_task(index))
    again = submissions.pop()
    for attempt, (lengths, known) in enumerate([(None, None), ((3, 5), (3, 5)), ((9, 9), (3, 5))], start=1):
        submissions.reissue(again, lengths)
        again = submissions.pop()
        assert (again.submission_id, again.attempt, again.first_lengths) == (0, attempt, known)
        assert again.draw_id == attempt * ATTEMPT_STRIDE
    assert submissions.num_submitted == 3 and len(submissions) == 2


def test_restored_prompts_start_in_the_order_that_they_had() -> None:
    """What had started first, then what came again, then cohort after cohort, its longest first."""
    submissions = Submissions(cohort_size=2, longest_first=True)
    for index, length in enumerate((1, 9, 50, 2)):
        submissions.history.measure(make_task(index), length)

    def submission(index: int, source: str = "s", attempt: int = 0) -> Submission:
        return Submission(submission_id=index, task=make_task(index, source), attempt=attempt)

    waiting = [*map(submission, range(4)), submission(7, "other", attempt=1)]
    submissions.restore(started=[submission(5, "other")], pending=waiting, num_submitted=8)
    assert [one.submission_id for one in submissions.pending()] == [0, 1, 2, 3, 5, 7]
    assert [submissions.pop().submission_id for _ in range(6)] == [5, 7, 1, 0, 2, 3]
    submissions.submit(make_task(8))
    assert submissions.pop().submission_id == 8
    with pytest.raises(AssertionError, match="before anything is submitted"):
        submissions.restore(started=[], pending=[], num_submitted=0)


def test_expected_lengths_follow_the_newest_ones() -> None:
    """Half of the newest; of a prompt that was never seen, its source's; of another source, nothing."""
    history = LengthHistory()
    for length in (8, 16):
        history.measure(make_task(0), length)
    history.measure(make_task(1), 4)
    assert history.expected(make_task(0)) == 12.0
    assert history.expected(make_task(1)) == 4.0
    assert history.expected(make_task(2)) == 8.0
    assert history.expected(make_task(2, source="other")) == 0.0


def test_the_history_forgets_what_was_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPTS_IN_HISTORY", 2)
    history = LengthHistory()
    for index in (0, 1, 0, 2):
        history.measure(make_task(index), 8.0 * (index + 1))
    of_source = history.expected(make_task(9))
    assert [history.expected(make_task(index)) for index in range(3)] == [8.0, of_source, 24.0]
    assert of_source not in (8.0, 16.0, 24.0)
