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


@pytest.mark.parametrize(
    ("exit_code", "stopped_by", "decision"),
    [
        *((one, None, Restart()) for one in (1, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)),
        # Done, refused and stopped runs stay ended; the last one was stopped before it handled the signal.
        *((one, None, End(exit_code=one)) for one in (0, 2, 130, 143)),
        (-signal.SIGTERM, None, End(exit_code=143)),
        # Whatever a run does that was told to stop.
        *((one, signal.SIGTERM, End(exit_code=one)) for one in (1, 143, 0)),
        (-signal.SIGKILL, signal.SIGTERM, End(exit_code=143)),
    ],
)
def test_only_a_death_is_followed_by_a_start(
    exit_code: int, stopped_by: signal.Signals | None, decision: Restart | End
) -> None:
    one = ending(exit_code, stopped_by=stopped_by)
    assert is_death(one) == isinstance(decision, Restart)
    assert RestartPolicy(0).after(one) == decision


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
