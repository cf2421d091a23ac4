"""The section on scoring: how many groups and answers are scored at once, and what one answer may take."""

from pydantic import Field

from forgeasync.config.section import Section


class ScorerSection(Section):
    """Scoring of groups, and the processes that verify answers."""

    max_concurrent: int = Field(default=8, gt=0, le=1024)
    """Groups that are with the scorer at once; others wait, and waiting counts against no limit."""
    num_workers: int = Field(default=2, gt=0, le=256)
    """Processes that verify answers, each one answer at a time."""
    answer_limit_s: float = Field(default=3.0, ge=0.01, le=3600.0)
    """Wall time for one answer; past it, the answer scores 0 and is counted (``scoring/num_timeouts``)."""
    answer_memory_mib: int = Field(default=1024, ge=16, le=1048576)
    """What the verification of one answer may allocate."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """A group whose scoring fails this often is given up (``dropped/unscored``)."""
