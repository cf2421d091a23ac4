"""Attempts at a group by engines that are plain objects, and groups that are written once more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forgeasync.config import TeacherEndpoint, TeacherSection, TimeoutSection
from forgeasync.models import character_tokenizer
from forgeasync.rollouts import (
    NO_ID,
    FinishReason,
    PayloadReader,
    PayloadWriter,
    PromptEncoder,
    Rollout,
    Score,
    Task,
    TeacherPrompts,
    TeacherReads,
    TeacherRecord,
    TokenTrace,
    WithoutPrompt,
    create_run_folder,
    decode_rollout,
    remove_run_folder,
)
from forgeasync.runtime import (
    ProcessLost,
    SampledRollout,
    Teacher,
    TeacherEngines,
    TeacherFailure,
    TeacherRecorder,
    Teachers,
    store_group,
)
from forgeasync.scoring import RewardUnavailable
from tests.support.payloads import HOST, MIB
from tests.support.rollouts import FACTS, make_rollout

PROMPTS = TeacherPrompts(
    encoder=PromptEncoder(character_tokenizer(chat_template=False), chat_template=False), max_tokens=100
)
ROLLOUTS = (
    SimpleNamespace(num_response_tokens=3, text="wrong"),
    SimpleNamespace(num_response_tokens=4, text="=2"),
)
NEW = ("new",)
TASK = Task(task_id="t", prompt="1+1", answer="2", source_index=0, source="sums")


@dataclass
class Engines:
    """A pool whose answers are given, one for each attempt; an exception is raised."""

    answers: list[object]
    num_live: int = 0
    most_live: int = 0
    hold: asyncio.Event | None = None
    served: int = 0
    table: "Engines" = field(init=False)

    def __post_init__(self) -> None:
        self.table = self

    @property
    def state(self) -> "Engines":
        return self

    @asynccontextmanager
    async def assigned(self, num_rollouts: int) -> AsyncIterator["Engines"]:
        self.num_live += num_rollouts
        self.most_live = max(self.most_live, self.num_live)
        try:
            yield self
        finally:
            self.num_live -= num_rollouts

    @property
    def actor(self) -> "Engines":
        return self

    async def call(self, call: Callable[[], Awaitable[object]]) -> object:
        if self.hold is not None:
            await self.hold.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def teaching_by(model: Any, section: TeacherSection, *, limit_s: float = 30.0) -> Teachers:
    teacher = Teacher(name="t", section=section, model=model, prompts=PROMPTS, room=asyncio.Semaphore(2))
    return Teachers({"sums": teacher}, limit_s)


def teaching(engines: Engines, *, max_attempts: int = 3, limit_s: float = 30.0) -> Teachers:
    section = TeacherSection(model_path="x", max_attempts=max_attempts)
    model = TeacherEngines(engines, section, TimeoutSection())  # type: ignore[arg-type]
    return teaching_by(model, section, limit_s=limit_s)


def teach(one: Teachers, *scores: Score) -> object:
    return asyncio.run(one.teach(4, TASK, ROLLOUTS, scores or None))  # type: ignore[arg-type]


def test_lost_engines_and_refused_answers_are_tried_again() -> None:
    engines = Engines([ProcessLost("it is gone"), TeacherFailure(problem="a nan"), NEW])
    one = teaching(engines)
    assert teach(one) == NEW
    found = one.metrics()
    assert (found["teacher/num_retried"], found["teacher/num_failed"]) == (2, 0)
    assert found["teacher/num_tokens"] == 7 and engines.num_live == 0


def test_attempts_have_an_end_and_a_full_store_has_it_at_once() -> None:
    one = teaching(Engines([ProcessLost("one"), ProcessLost("it is gone"), NEW]), max_attempts=2)
    given_up = teach(one)
    assert given_up == TeacherFailure(problem="teacher t, group 4: it is gone")
    assert one.metrics()["teacher/num_failed"] == 1 and one.metrics()["teacher/num_tokens"] == 0
    full = teaching(Engines([TeacherFailure(problem="no room", is_full=True), NEW]))
    found = teach(full)
    assert isinstance(found, TeacherFailure) and found.is_full, "the group is refused for its size"
    assert full.metrics()["teacher/num_retried"] == 0


def test_what_raises_otherwise_is_no_fault_of_the_group() -> None:
    with pytest.raises(KeyError):
        teach(teaching(Engines([KeyError("a bug")])))


def test_an_answer_that_is_late_counts_as_none() -> None:
    engines = Engines([NEW, NEW], hold=asyncio.Event())
    found = teach(teaching(engines, max_attempts=2, limit_s=0.1))
    assert isinstance(found, TeacherFailure) and "timeouts.score_s" in found.problem
    assert engines.num_live == 0


async def test_groups_beyond_the_room_wait() -> None:
    engines = Engines([NEW] * 6)
    one = teaching(engines)
    engines.hold = asyncio.Event()
    waiting = (one.teach(number, TASK, ROLLOUTS) for number in range(6))  # type: ignore[arg-type]
    groups = [asyncio.create_task(each) for each in waiting]
    for _ in range(20):
        await asyncio.sleep(0)
    assert engines.num_live == 2 * len(ROLLOUTS)
    engines.hold.set()
    assert await asyncio.gather(*groups) == [NEW] * 6
    assert engines.most_live == 2 * len(ROLLOUTS)


class Server:
    """A teacher that is away for the first so many calls."""

    version = 0

    def __init__(self, num_away: int, retry_after_s: float) -> None:
        self.num_away = num_away
        self.retry_after_s = retry_after_s
        self.num_calls = 0

    async def teach(self, rollouts: object, reads: Sequence[TeacherReads]) -> object:
        self.num_calls += 1
        self.reads = reads
        if self.num_calls <= self.num_away:
            raise RewardUnavailable("the server is down", self.retry_after_s)
        return NEW


def served(server: Server, **endpoint: float) -> Teachers:
    where = TeacherEndpoint(base_url="http://localhost:1/v1", model="m", **endpoint)
    return teaching_by(server, TeacherSection(endpoint=where, max_attempts=1))


def test_a_server_that_is_down_for_a_while_costs_no_attempt() -> None:
    server = Server(num_away=5, retry_after_s=0.001)
    one = served(server)
    assert teach(one) == NEW and server.num_calls == 6
    assert one.metrics()["teacher/num_retried"] == 5 and one.metrics()["teacher/num_failed"] == 0


def test_a_server_that_stays_down_gives_the_group_up() -> None:
    one = served(Server(num_away=10**6, retry_after_s=0.01), max_unavailable_s=0.2)
    assert teach(one) == TeacherFailure(problem="teacher t, group 4: the server is down")
    assert one.metrics()["teacher/num_failed"] == 1


def test_a_teacher_is_asked_where_there_is_what_it_shows() -> None:
    """What is missing is counted: words, or, where there are some, a sibling."""
    server = Server(num_away=0, retry_after_s=0.0)
    one = served(server)
    assert not one.needs_scores(TASK) and teach(one) == NEW
    assert server.reads == (WithoutPrompt.POLICYS,) * 2 and one.metrics()["teacher/num_tokens"] == 7

    teacher, right = one.by_source["sums"], Score(1.0, True)
    wrong, said = Score(0.0, False), Score(0.0, False, feedback="=2 $answer")
    counts = ("num_without_feedback", "num_without_sibling", "num_tokens")
    for prompt, scores, shown, expected in (
        ("$sibling;$prompt", (wrong, right), "=2;1+1", (0, 1, 7 + 3)),
        ("$feedback;$prompt", (said, right), "=2 $answer;1+1", (1, 1, 7 + 3 + 3)),
        ("$feedback;$sibling;$prompt", (wrong, Score(1.0, True, feedback="=2")), None, (2, 2, 7 + 3 + 3)),
    ):
        teacher.section = teacher.section.model_copy(update={"prompt": prompt})
        assert one.needs_scores(TASK) and not Teachers().needs_scores(TASK)
        teach(one, *scores)
        first, nothing = server.reads
        assert nothing is WithoutPrompt.NOTHING
        if shown is None:
            assert first is WithoutPrompt.NOTHING
        else:
            assert PROMPTS.encoder.encode(shown).tolist() == first.tolist()
        assert tuple(one.metrics()[f"teacher/{name}"] for name in counts) == expected


# --- Groups that are written once more ---


NUM_IDS = 2


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    folder = create_run_folder(MIB)
    yield folder
    remove_run_folder(folder)


async def taught(
    folder: Path,
    rollouts: list[Rollout],
    reads: Sequence[TeacherReads],
    score: Callable[..., Awaitable[TeacherRecord]],
    *,
    num_ids: int,
    needs_student_ids: bool = False,
) -> list[TokenTrace]:
    """What is stored of a group after its teacher has read it."""
    sampled = [
        SampledRollout(branches=(one,), finish_reason=FinishReason.STOP, episode=index)
        for index, one in enumerate(rollouts)
    ]
    stored = store_group(PayloadWriter(folder, HOST, MIB), sampled, group_id=7, generator_rank=0)
    groups = TeacherRecorder(
        teacher="t",
        folder=folder,
        host_id=HOST,
        capacity_bytes=MIB,
        num_ids=num_ids,
        needs_student_ids=needs_student_ids,
        vocab_size=FACTS.vocab_size,
    )
    written = await groups.teach(stored, reads, score)
    assert not isinstance(written, TeacherFailure)
    branches, reader = [one.branches[0] for one in written], PayloadReader(HOST)
    return [decode_rollout(reader.read(one.prompt), reader.read(one.response)) for one in branches]


async def test_each_response_follows_what_the_teacher_reads_token_by_token(folder: Path) -> None:
    rollouts = [make_rollout(seed, 4, 5 + seed) for seed in range(3)]
    asked: list[tuple[list[int], int]] = []

    async def score(ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        assert given_TK is None
        asked.append((ids_S.tolist(), num_prompt))
        num = len(ids_S) - num_prompt
        return TeacherRecord(
            logprobs_T=np.full(num, -1.0, np.float32),
            ids_TK=np.zeros((num, NUM_IDS), np.int32),
            topk_TK=np.full((num, NUM_IDS), -2.0, np.float32),
            versions_T=np.full(num, 3, np.int32),
        )

    shown = np.array([1, 0, 1, 1, 0, 2], np.int32)
    reads = (shown, WithoutPrompt.NOTHING, WithoutPrompt.POLICYS)
    traces = await taught(folder, rollouts, reads, score, num_ids=NUM_IDS)
    first, _, last = rollouts
    assert asked == [
        ([*shown.tolist(), *first.response_ids_T.tolist()], len(shown)),
        ([*last.prompt_ids_P.tolist(), *last.response_ids_T.tolist()], len(last.prompt_ids_P)),
    ]
    for rollout, trace, is_asked in zip(rollouts, traces, (True, False, True), strict=True):
        np.testing.assert_array_equal(trace.prompt_ids_P, rollout.prompt_ids_P)
        np.testing.assert_array_equal(trace.response_ids_T, rollout.response_ids_T)
        np.testing.assert_array_equal(trace.logprobs_T, rollout.logprobs_T)
        assert trace.teacher is not None
        assert trace.teacher.has_target_T.tolist() == [is_asked] * rollout.num_response_tokens
        assert np.isfinite(trace.teacher.topk_TK).all() == is_asked


async def test_the_teacher_is_asked_about_what_the_policy_could_have_drawn(folder: Path) -> None:
    rollout = make_rollout(1, 4, 6)
    asked: list[np.ndarray | None] = []

    async def score(ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        asked.append(given_TK)
        assert given_TK is not None
        return TeacherRecord(
            logprobs_T=np.full(len(given_TK), -1.0, np.float32),
            ids_TK=given_TK,
            topk_TK=np.where(given_TK == NO_ID, np.nan, -2.0).astype(np.float32),
            versions_T=np.zeros(len(given_TK), np.int32),
        )

    reads, num_ids = (WithoutPrompt.POLICYS,), FACTS.vocab_size - 1
    (trace,) = await taught(folder, [rollout], reads, score, num_ids=num_ids, needs_student_ids=True)
    assert rollout.kept_tokens is not None and trace.teacher is not None
    (given_TK,) = asked
    assert given_TK is not None
    for token, row in enumerate(given_TK.tolist()):
        assert [one for one in row if one != NO_ID] == rollout.kept_tokens.row(token).tolist()
    np.testing.assert_array_equal(trace.teacher.ids_TK, given_TK)
    np.testing.assert_array_equal(np.isnan(trace.teacher.topk_TK), given_TK == NO_ID)
