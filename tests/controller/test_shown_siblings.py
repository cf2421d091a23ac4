"""Groups whose teacher reads what was correct: they are scored first, seen by it, and then train."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from forgeasync.config import TeacherSection
from forgeasync.rollouts import StoredRollout, TeacherPrompts, TeacherReads, WithoutPrompt
from forgeasync.runtime import Teacher, Teaching
from tests.support.loops import (
    MAX_STEPS,
    Generators,
    Recorder,
    Trainer,
    make_config,
    make_problem,
    make_run,
    run_loops,
)
from tests.support.rollouts import make_ref

WORDS = "no number"
"""A response that cannot be scored."""


class Characters:
    """Encodes a prompt as its characters."""

    def encode(self, prompt: str) -> np.ndarray:
        return np.array([ord(one) for one in prompt], np.int32)

    def has_special_text(self, text: str) -> bool:
        return False


class SeenGroups:
    """A teacher that remembers what it read before which responses, and stores groups anew."""

    version = 0

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, ...], tuple[str | None, ...]]] = []

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...]:
        shown = tuple(None if isinstance(one, WithoutPrompt) else "".join(map(chr, one)) for one in reads)
        self.seen.append((tuple(one.text for one in rollouts), shown))
        return tuple(
            dataclasses.replace(
                one, branches=tuple(dataclasses.replace(b, response=make_ref()) for b in one.branches)
            )
            for one in rollouts
        )


class SomeUnscored(Generators):
    """Every fifth group has a response that is no number."""

    async def sample_group(self, group_id: int, *arguments: object, **keywords: object) -> object:
        rollouts = await super().sample_group(group_id, *arguments, **keywords)  # type: ignore[arg-type]
        assert isinstance(rollouts, tuple)
        if group_id % 5 == 1:
            (branch,) = rollouts[0].branches
            wrong = dataclasses.replace(branch, text=WORDS)
            return (dataclasses.replace(rollouts[0], branches=(wrong,)), *rollouts[1:])
        return rollouts


def test_a_group_is_scored_before_its_teacher_sees_it_and_then_trains() -> None:
    """By the very scores that decided what was shown. What has none is seen by nobody, and freed."""
    model, trainer, recorder, generators = SeenGroups(), Trainer(), Recorder(), SomeUnscored()
    teacher = Teacher(
        name="t",
        section=TeacherSection(model_path="x", prompt="$sibling|$prompt"),
        model=model,
        prompts=TeacherPrompts(encoder=Characters(), max_tokens=100),  # type: ignore[arg-type]
        room=asyncio.Semaphore(3),
    )
    run = make_run(
        make_config("scorer.max_attempts=1"),
        generators=generators,
        trainer=trainer,
        recorder=recorder,
        held_out=[make_problem(10)],
        teaching=Teaching({make_problem(0).source: teacher}),
    )
    run_loops(run)
    seen = dict(model.seen)
    num_without = 0
    for texts, shown in seen.items():
        assert WORDS not in texts
        for index, one in enumerate(shown):
            others = {text for place, text in enumerate(texts) if place != index and float(text) >= 1.0}
            assert (one is None) == (not others)
            assert one is None or one.split("|")[0] in others
            num_without += one is None
    counted = recorder.counters[-1]["teacher/num_without_sibling"]
    assert 0 < counted <= num_without, "a group may have been seen since the last step"
    assert len(recorder.batches) == MAX_STEPS
    for batch in recorder.batches:
        for group in batch.groups:
            texts = tuple(one.text for one in group.rollouts)
            assert texts in seen and list(group.rewards or ()) == [float(text) for text in texts]
    freed = [one.text for one in generators.freed]
    assert WORDS in freed
    # Once as the generator stored it, once as the teacher did.
    for item in trainer.steps[0]:
        assert freed.count(item.branch.text) == 2
