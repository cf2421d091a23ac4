"""Rules on scoring."""

import math
from collections.abc import Iterator

from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig


def check_scorer(config: RunConfig) -> Iterator[Problem]:
    """A group whose answers are all cut off is done before its own deadline: they score 0, it is not lost."""
    size, scorer = config.algorithm.group_size, config.scorer
    rounds = math.ceil(size / scorer.num_workers)
    needed_s = rounds * scorer.answer_limit_s
    if config.timeouts.score_s <= needed_s:
        yield Problem(
            field="timeouts.score_s",
            value=config.timeouts.score_s,
            remedy=f"must be over {needed_s:g}: {size} answers of a group (algorithm.group_size), "
            f"{scorer.num_workers} at once (scorer.num_workers), may take {scorer.answer_limit_s:g} s each "
            "(scorer.answer_limit_s)",
        )
