"""How long Monarch waits for processes that do not answer: longer than what decides about them here."""

from tests.support.processes import run_alone


def _limits() -> dict[str, str]:
    from monarch.config import get_global_config

    import forgeasync.actors.procs  # noqa: F401

    return {name: str(value) for name, value in get_global_config().items()}


def test_it_is_the_run_that_gives_processes_up() -> None:
    """Monarch 0.7's own limits end the controller half a minute after the death of a worker, and the agents of
    hosts before they can end these.
    """
    limits = run_alone(_limits)
    assert "month" in limits["message_delivery_timeout"] and "month" in limits["channel_reconnect_timeout"]
    assert limits["mesh_orphan_timeout"] == "1day"
