"""How long Monarch waits for a process that does not take its messages."""

from tests.support.processes import run_alone


def _limits() -> tuple[str, str]:
    from monarch.config import get_global_config

    import forgeasync.actors.procs  # noqa: F401

    config = get_global_config()
    return config["message_delivery_timeout"], config["channel_reconnect_timeout"]


def test_messages_to_dead_processes_are_never_returned() -> None:
    """By Monarch 0.7 their return ends the controller, half a minute after the death of a worker."""
    assert all("month" in limit for limit in run_alone(_limits))
