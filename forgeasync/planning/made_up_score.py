"""Score that a rehearsal adds to verifiers, which give all responses of a random model the same score.

A scorer's worker imports this module alone, without the model libraries of the other modules.
"""

import zlib

from forgeasync.environments import Response
from forgeasync.rollouts import Task

NUM_SCORES = 11


def score(task: Task, response: Response) -> float:
    """Return a multiple of 0.1 from 0 to 1, derived from the CRC-32 of the response's text."""
    return zlib.crc32(response.text.encode("utf-8", "surrogatepass")) % NUM_SCORES / (NUM_SCORES - 1)
