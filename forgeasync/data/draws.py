"""Seeds of random draws, so that they do not depend on who draws first."""

import numpy as np


def sampling_seed(run_seed: int, draw_id: int) -> int:
    """What a group's responses are sampled with; 64 bits, so that no two groups of a run share one."""
    return int(np.random.SeedSequence((run_seed, draw_id)).generate_state(1, np.uint64)[0])
