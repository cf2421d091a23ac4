"""Starts process after process that is to supervise a box: forks of one Python that has loaded everything.

Starting Python in every box would take longer than all the rest. A fork joins the namespaces that bubblewrap
has made, while nothing of the box's own runs in them yet, sets the box up from inside and stays there.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import sys

from . import setup, supervisor, tree

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

_MAX_SETTINGS_BYTES = 1 << 16


def main() -> None:
    """Serve the host until it closes the socket."""
    host = _socket.socket(fileno=os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    # Supervisors become its children when the process between exits; it takes their exit codes.
    setup.become_subreaper()
    # Or "pkill python" in a box would kill its supervisor.
    setup.rename("forgeasync-box")
    _signal.signal(_signal.SIGCHLD, lambda number, frame: tree.reap())
    # Ctrl-C in a terminal is the host's to act on.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    while True:
        data, ancillary, _, _ = host.recvmsg(
            _MAX_SETTINGS_BYTES, _socket.CMSG_LEN(4), _socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(0)
        control = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
        if os.fork() == 0:
            host.close()
            _launch(control, marshal.loads(data))
        os.close(control)


def _launch(control_fd: int, settings: dict[str, Any]) -> None:
    """In a fork: become the supervisor of a box. Does not return."""
    try:
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        control = _socket.socket(fileno=control_fd)
        try:
            # A process enters a namespace of processes with its next fork.
            final_user = setup.join(settings["holder"]) if settings["isolated"] else None
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
            setup.enter(settings, final_user)
        except Exception as error:
            # Whatever the kernel refuses is told to the host, which raises it.
            supervisor.tell_failure(control, error)
            os._exit(1)
        supervisor.serve(control, settings)
    finally:
        # Whatever was raised: this process must not go on as a second launcher.
        os._exit(0)
