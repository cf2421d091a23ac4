"""When a run that has ended is started again."""

import signal

import pytest

from forgeasync.controller import End, Ending, Restart, RestartPolicy, is_death

MAX_STARTS_WITHOUT_STEP = 5
"""As docs/failures.md says."""


def ending(
    exit_code: int = -9,
    *,
    stopped_by: signal.Signals | None = None,
    newest_step: int = 0,
    has_ended: bool = False,
    words: str = "was killed by SIGKILL",
) -> Ending:
    return Ending(
        exit_code=exit_code,
        stopped_by=stopped_by,
        newest_step=newest_step,
        has_ended=has_ended,
        words=words,
    )


@pytest.mark.parametrize("exit_code", [1, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_death_is_followed_by_a_start(exit_code: int) -> None:
    assert is_death(ending(exit_code))
    assert RestartPolicy(0).after(ending(exit_code)) == Restart()


@pytest.mark.parametrize(
    ("exit_code", "said"), [(0, 0), (2, 2), (130, 130), (143, 143), (-signal.SIGTERM, 143)]
)
def test_done_refused_and_stopped_runs_stay_ended(exit_code: int, said: int) -> None:
    """The last one was stopped before it handled the signal."""
    assert not is_death(ending(exit_code))
    assert RestartPolicy(0).after(ending(exit_code)) == End(exit_code=said)


@pytest.mark.parametrize(("exit_code", "said"), [(1, 1), (143, 143), (-signal.SIGKILL, 143), (0, 0)])
def test_whatever_a_run_that_was_told_to_stop_does_ends_it(exit_code: int, said: int) -> None:
    stopped = ending(exit_code, stopped_by=signal.SIGTERM)
    assert not is_death(stopped)
    assert RestartPolicy(0).after(stopped) == End(exit_code=said)


def test_a_run_that_had_done_everything_is_not_started_again() -> None:
    decision = RestartPolicy(0).after(ending(has_ended=True, newest_step=9))
    assert isinstance(decision, End) and decision.exit_code == 0 and "SIGKILL" in (decision.words or "")


def test_only_steps_that_no_start_has_made_count_as_progress() -> None:
    """Steps that are made again after a checkpoint do not: the same batch would end the run for ever."""
    policy = RestartPolicy(3)
    for _ in range(MAX_STARTS_WITHOUT_STEP - 1):
        assert policy.after(ending(newest_step=3)) == Restart()
    assert policy.after(ending(newest_step=4)) == Restart()
    for newest_step in range(MAX_STARTS_WITHOUT_STEP - 1):
        assert policy.after(ending(newest_step=newest_step)) == Restart()
    decision = policy.after(ending(1, newest_step=4, words="has ended with exit code 1: failed: OSError: x"))
    assert decision == End(
        exit_code=1,
        words=f"failed: {MAX_STARTS_WITHOUT_STEP} starts in a row made no new step (the newest one is 4); "
        "the last one has ended with exit code 1: failed: OSError: x",
    )
