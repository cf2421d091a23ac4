"""Messages between the host and the program in a box.

Control socket: first a byte that says whether the box is ready, or why not. Then the host asks for a call
(``ASK``, with the call's own socket attached) or for the end of all processes, and the box tells when a call
has died (``LOST``). A call's socket carries frames: kind, length, payload.
"""

import struct

MAX_PAYLOAD_BYTES = 1 << 20
"""Most bytes of one frame."""

CHUNK_BYTES = 1 << 16

READY, FAILED_SETUP = b"R", b"F"

ASK = struct.Struct("<BI")
"""What is asked for, and the number of the call."""
ASK_CALL, ASK_END_ALL = 1, 2

LOST = struct.Struct("<IB")
"""Number of a call, and why it died."""
LOST_TAMPERED, LOST_MEMORY, LOST_PROCESSES, LOST_NO_PROCESS, LOST_ASKED = 1, 2, 3, 4, 5
LOST_CLOSED = 6
"""The host has closed the box."""

FRAME = struct.Struct("<BI")
REQUEST, STDIN, STDOUT, STDERR, DONE, FAILED = 1, 2, 3, 4, 5, 6

RESULT = struct.Struct("<iBBQQd")
"""Exit code, whether the deadline passed, whether the session goes on, bytes cut of stdout and of stderr,
seconds. What a session reports beyond that follows."""

PYTHON_REPORT = struct.Struct("<BIIQ")
"""Whether there is a value, bytes of the value's text and of the traceback, bytes cut of both; the texts
follow."""

NONCE_CHARACTERS = 32
MARK_CHARACTERS = NONCE_CHARACTERS + 8
"""A session ends the output of a run by a nonce and the length of its report in hexadecimal digits."""
