"""Hosts of a run: started through Monarch's jobs, watched, and cleaned up."""

import os

import lazy_loader

MONARCH_LIMITS = {
    # Monarch 0.7 gives a message up that a dead process has not taken within 30 s, or 20 s after the
    # connection was lost, and returns it to its sender through the controller. Where that one is gone as
    # well, the controller's process ends ("client received undeliverable message: crashing"), half a minute
    # after the death that caused it. A run notices deaths by itself, so messages to the dead may wait for
    # ever. Both can go when Monarch drops such messages.
    "message_delivery_timeout": "1000h",
    "channel_reconnect_timeout": "1000h",
    # Monarch 0.7 ends the procs of a host whose controller has been silent for a minute, but not the host. An
    # agent ends both (forgeasync.launch.agent), by default later than that: it must still be there to do so.
    "mesh_orphan_timeout": "24h",
}
"""Limits of Monarch that would decide before a run does. Every proc inherits them by its environment; a
process that has imported Monarch before is told by ``forgeasync.launch.hosts``."""

for name, limit in MONARCH_LIMITS.items():
    MONARCH_LIMITS[name] = os.environ.setdefault(f"HYPERACTOR_{name.upper()}", limit)

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
