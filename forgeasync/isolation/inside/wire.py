"""Format of the messages between the host and the supervisor and watchers of a sandbox.

On the control socket, the supervisor first sends ``READY``, or ``FAILED_SETUP`` with the reason. Then the
host sends ``ASK`` messages, which start a call (with the call's socket attached) or kill all processes. The
supervisor sends ``LOST`` when a call has died. A call's socket carries frames: kind, length, payload.
"""

import struct

MAX_PAYLOAD_BYTES = 1 << 20
"""Maximum payload of one frame."""

CHUNK_BYTES = 1 << 16

READY, FAILED_SETUP = b"R", b"F"

ASK = struct.Struct("<BI")
"""Kind of request (``ASK_CALL`` or ``ASK_END_ALL``), and number of the call."""
ASK_CALL, ASK_END_ALL = 1, 2

LOST = struct.Struct("<IB")
"""Number of a call, and cause of its death (one of ``LOST_*``)."""
LOST_TAMPERED, LOST_MEMORY, LOST_PROCESSES, LOST_NO_PROCESS, LOST_ASKED = 1, 2, 3, 4, 5
LOST_CLOSED = 6
"""Cause when the host itself has closed the sandbox; never sent."""

FRAME = struct.Struct("<BI")
REQUEST, STDIN, STDOUT, STDERR, DONE, FAILED = 1, 2, 3, 4, 5, 6

RESULT = struct.Struct("<iBBQQd")
"""Exit code, whether the deadline passed, whether the session continues, bytes cut from stdout and from
stderr, duration in seconds. The report of a session follows."""

PYTHON_REPORT = struct.Struct("<BIIQ")
"""Whether there is a value, size of the value's text and of the traceback in bytes, and bytes cut from both.
The two texts follow."""

NONCE_CHARACTERS = 32
MARK_CHARACTERS = NONCE_CHARACTERS + 8
"""Length of the mark that ends a run's standard output: the nonce, then the report's length as 8 hexadecimal
digits."""
