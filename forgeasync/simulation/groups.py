"""Groups on their way through a simulated run, and the sequences that engines decode for them."""

from collections.abc import Sequence as SequenceOf

from forgeasync.buffer import Start
from forgeasync.rollouts import FinishReason, Group, PayloadRef, StoredBranch, StoredRollout, VersionSpan
from forgeasync.simulation.draws import DrawnRollout

NOWHERE = PayloadRef(host_id="", file="", payload_id="", offset=0, num_bytes=0, checksum=0)
"""Nothing is stored of a simulated rollout."""


class Sequence:
    """One rollout while it is sampled; ``spans`` has number of tokens by version, oldest first."""

    __slots__ = (
        "at",
        "first_swap",
        "group",
        "index",
        "is_away",
        "num_sampled",
        "rollout",
        "spans",
        "start",
        "turn",
    )

    def __init__(self, group: "SimulatedGroup", index: int, rollout: DrawnRollout) -> None:
        self.group = group
        self.index = index
        self.rollout = rollout
        self.turn = 0
        self.is_away = False
        """The environment has it, or it has ended."""
        self.num_sampled = 0
        """Tokens of it that are accounted for in ``spans``."""
        self.spans: list[tuple[int, int]] = []
        self.start = 0.0
        """What the engine's counter of steps said when it began to run."""
        self.first_swap = 0
        self.at: tuple[int, int] | None = None
        """Engine and version that have its keys and values."""

    @property
    def num_left(self) -> int:
        """Tokens that its turn still lacks, as far as they are accounted for."""
        turns = self.rollout.turns
        if len(turns) == 1:
            return turns[0] - self.num_sampled
        return sum(turns[: self.turn + 1]) - self.num_sampled

    def sampled(self, version: int, num_tokens: int) -> None:
        """Take note of tokens."""
        if num_tokens <= 0:
            return
        self.num_sampled += num_tokens
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + num_tokens)
        else:
            self.spans.append((version, num_tokens))

    def begin_anew(self) -> None:
        """What was sampled is lost."""
        self.turn = self.num_sampled = 0
        self.is_away = False
        self.spans.clear()
        self.at = None

    def stored(self, generator_rank: int) -> StoredRollout:
        """The rollout that it has become."""
        spans, start = [], 0
        for version, num_tokens in self.spans:
            spans.append(VersionSpan(version=version, start=start, end=start + num_tokens))
            start += num_tokens
        branch = StoredBranch(
            prompt=NOWHERE,
            response=NOWHERE,
            num_prompt_tokens=self.rollout.num_prompt_tokens,
            num_response_tokens=start,
            version_spans=tuple(spans),
            text="",
        )
        return StoredRollout(
            generator_rank=generator_rank,
            branches=(branch,),
            finish_reason=FinishReason.STOP,
            episode=self.index,
        )


class SimulatedGroup:
    """A group from its start to the end of its scoring."""

    __slots__ = (
        "engine",
        "has_begun",
        "is_ended",
        "items",
        "num_finished",
        "num_scored",
        "prompt_at",
        "sequences",
        "start",
        "started_s",
        "unsubmitted",
    )

    def __init__(self, start: Start, rollouts: SequenceOf[DrawnRollout], started_s: float) -> None:
        self.start = start
        self.started_s = started_s
        self.sequences = [Sequence(self, index, rollout) for index, rollout in enumerate(rollouts)]
        self.engine: int | None = None
        """Number of the generator that it was given to."""
        self.has_begun = False
        """Whether that generator knows of it."""
        self.prompt_at: tuple[int, int] | None = None
        """Engine and version that have its prompt's keys and values."""
        self.num_finished = 0
        self.num_scored = 0
        self.items: list[int] = []
        """What of it is with the dispatcher of scorers."""
        self.unsubmitted: list[int] = []
        """Responses for which the scorers' queue had no room."""
        self.is_ended = False

    @property
    def group_id(self) -> int:
        return self.start.group_id

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all of it."""
        return sum(one.rollout.num_prompt_tokens + sum(one.rollout.turns) for one in self.sequences)

    def stored(self, generator_rank: int) -> Group:
        """What the buffer gets."""
        return Group(
            group_id=self.start.group_id,
            draw_id=self.start.draw_id,
            task=self.start.task,
            rollouts=tuple(one.stored(generator_rank) for one in self.sequences),
        )
