"""How long Monarch waits for processes that do not answer."""

from monarch.config import get_global_config

from tests.support.processes import run_alone


def _limits() -> dict[str, str]:
    """Of a process that imports Monarch first."""
    import forgeasync.launch.hosts  # noqa: F401

    return {name: str(value) for name, value in get_global_config().items()}


def test_a_run_gives_processes_up_and_monarch_does_not() -> None:
    """By its own limits Monarch 0.7 ends a controller half a minute after the death of a worker, and the
    agents of hosts before these can end their hosts.
    """
    limits = run_alone(_limits)
    assert "month" in limits["message_delivery_timeout"] and "month" in limits["channel_reconnect_timeout"]
    assert limits["mesh_orphan_timeout"] == "1day"
