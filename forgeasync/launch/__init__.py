"""Hosts of a run: started through Monarch's jobs, watched, and cleaned up."""

import os

# Monarch 0.7 gives a message up that a dead process has not taken within 30 s, or 20 s after the connection
# was lost, and returns it to its sender through the controller. Where that one is gone as well, the
# controller's process ends ("client received undeliverable message: crashing"), half a minute after the death
# that caused it. A run notices deaths by itself, so messages to the dead may wait for ever. Both can go when
# Monarch drops such messages. They are read when Monarch is imported, and every proc inherits them.
os.environ.setdefault("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", "1000h")
os.environ.setdefault("HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT", "1000h")
# Monarch 0.7 ends the procs of a host whose controller has been silent for a minute, but not the host. An
# agent ends both (forgeasync.launch.agent), by default later than that: it must still be there to do so.
os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "24h")
