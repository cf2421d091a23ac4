"""Limits of Monarch 0.7 that would act before a run does; set before Monarch is imported."""

import os

MONARCH_LIMITS = {
    # Monarch 0.7 gives up on a message that a dead process has not received within 30 s, or within 20 s after
    # the connection was lost, and returns it to its sender through the controller. If the sender has died
    # too, the controller's process ends half a minute after the death ("client received undeliverable
    # message: crashing"). A run detects deaths itself, so these messages may wait without a limit. Remove
    # both limits when Monarch drops such messages.
    "message_delivery_timeout": "1000h",
    "channel_reconnect_timeout": "1000h",
    # Monarch 0.7 ends the processes of a host whose controller has been silent for a minute, but not the
    # host. The agent (forgeasync.runtime.job_hosts) ends both, after a longer silence, so it must live until
    # then.
    "mesh_orphan_timeout": "24h",
}
"""Limits that keep Monarch from acting on a death before the run does. Every process inherits them in its
environment; ``forgeasync.runtime.hosts`` sets them if Monarch was imported before."""

for name, limit in MONARCH_LIMITS.items():
    MONARCH_LIMITS[name] = os.environ.setdefault(f"HYPERACTOR_{name.upper()}", limit)
