"""The score that a rehearsal adds to verifiers: they score every response of a random model alike."""

import zlib

from forgeasync.environments import Response
from forgeasync.rollouts import Task

NUM_SCORES = 11


def score(task: Task, response: Response) -> float:
    """Return a number from 0 to 1 that depends on the response's text alone: its CRC-32, in tenths."""
    return zlib.crc32(response.text.encode("utf-8", "surrogatepass")) % NUM_SCORES / (NUM_SCORES - 1)
