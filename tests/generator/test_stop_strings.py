"""Where a response ends: by a text, by an engine's word, across swaps and deaths; all else of it stays."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.outputs import CompletionOutput

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.generator import EngineEpisode, EngineTurn, SequenceReader, TurnEnd
from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    FINISHES,
    BegunTurn,
    EpisodeId,
    FinishReason,
    LoggedTurn,
    Rollout,
    TokenBatch,
    VersionSpan,
    check_rollout,
)
from forgeasync.testing import write_tiny_model
from tests.generator.conftest import Seen
from tests.support.engines import RECORDS, flat_logprobs, start_engine
from tests.support.processes import run_alone

FREE = SamplingSection(temperature=1.0, top_k=20, max_response_tokens=40)
PROMPT = np.arange(3, 9, dtype=np.int32)
NUM_PAIRS = 3


async def _sample(folder: Path) -> Seen:
    """Free responses, a text in the middle of each, and the same draw again with it as the end.

    The last of these draws also as turns of episodes: with that end, and free.
    """
    from forgeasync.generator import EngineEpisodes

    engine = await start_engine(folder, GeneratorSection(kv_cache_gib=0.01))
    pairs: list[tuple[Rollout, str, Rollout]] = []
    for seed in range(60):
        (free,) = await engine.generate(prompt_ids_P=PROMPT, num_samples=1, sampling=FREE, seed=seed)
        stop = free.text[6:9]
        if len(free.text) < 12 or len(pairs) == NUM_PAIRS:
            continue
        # The first is never met: only the second ends anything.
        ended = FREE.model_copy(update={"stop": ("no such text", stop)})
        (cut,) = await engine.generate(prompt_ids_P=PROMPT, num_samples=1, sampling=ended, seed=seed)
        pairs.append((free, stop, cut))
        last_seed = seed
    episodes = EngineEpisodes(engine)
    turns = [
        await episodes.add_turn(
            EpisodeId(group_id=number, index=0),
            None,
            PROMPT,
            sampling=sampling,
            max_tokens=FREE.max_response_tokens,
            seed=last_seed,
        )
        for number, sampling in enumerate((ended, FREE))
    ]
    engine.shutdown()
    return Seen(pairs=pairs, turns=turns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=12.0)


@pytest.fixture
def ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer("12=3;45=9#6", add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def observed(folder: Path) -> Seen:
    return run_alone(_sample, folder)


def test_a_turn_says_which_text_ended_it(observed: Seen) -> None:
    (free, stop, cut), (ended, whole) = observed.pairs[-1], observed.turns
    assert (ended.stop_text, ended.text, ended.finish_reason) == (stop, cut.text, FinishReason.STOP)
    assert ended.ids_T.tolist() == cut.response_ids_T.tolist()
    assert whole.stop_text is None and whole.text == free.text


def test_a_response_ends_with_the_token_that_completes_the_text(folder: Path, observed: Seen) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = read_model_facts(str(folder))
    assert len(observed.pairs) == NUM_PAIRS
    for free, stop, cut in observed.pairs:
        assert len(stop) == 3 and cut.finish_reason is FinishReason.STOP
        num_tokens = cut.num_response_tokens
        assert 0 < num_tokens < free.num_response_tokens
        assert cut.text == free.text[: free.text.index(stop)], "its own text leaves it out"
        whole = tokenizer.decode(cut.response_ids_T)
        assert stop in whole and stop not in tokenizer.decode(cut.response_ids_T[:-1])
        check_rollout(cut, RECORDS, facts)
        np.testing.assert_array_equal(cut.response_ids_T, free.response_ids_T[:num_tokens])
        np.testing.assert_array_equal(cut.logprobs_T, free.logprobs_T[:num_tokens])
        assert cut.version_spans == (VersionSpan(version=0, start=0, end=num_tokens),)
        num_recorded = cut.routed_experts.num_recorded
        assert num_recorded == len(PROMPT) + num_tokens - 1
        np.testing.assert_array_equal(
            cut.routed_experts.expert_ids_RMK, free.routed_experts.expert_ids_RMK[:num_recorded]
        )
        np.testing.assert_array_equal(cut.kept_tokens.ids_N, free.kept_tokens.slice(0, num_tokens).ids_N)


def make_part(ids: list[int], *, first_row: int, version: int, finish_reason: str) -> CompletionOutput:
    """A part of a sequence as vLLM hands it out; rows of experts are their own numbers."""
    return CompletionOutput(
        index=0,
        text="",
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=flat_logprobs(ids, [-float(token) for token in ids]),
        routed_experts=np.arange(first_row + len(ids) - 1).reshape(-1, 1, 1),
        sampling_mask=SimpleNamespace(token_ids=[[token] for token in ids]),
        weight_versions=[SimpleNamespace(version=str(version), start=0, end=len(ids))],
        finish_reason=finish_reason,
        stop_reason=None,
    )


def grown(
    reader: SequenceReader, parts: Sequence[CompletionOutput], *, stop: Sequence[str]
) -> tuple[Rollout, str | None]:
    """What becomes of the parts, and which text ended them."""
    trajectory = reader.new_trajectory()
    trajectory.give(PROMPT)
    *going_on, end = (reader.grow(trajectory, part, stop=stop) for part in parts)
    assert going_on == [None] * len(going_on) and end is not None
    turn = EngineTurn(
        episode=EngineEpisode(number=0, sample=0), trajectory=trajectory, end=end, stop=tuple(stop)
    )
    (rollout,) = reader.rollouts([turn])
    assert rollout.finish_reason is end.finish_reason
    return rollout, end.stop_text


def test_a_text_that_two_parts_share_ends_the_response_too(reader: SequenceReader, ids: list[int]) -> None:
    """vLLM looks for it in each part alone: a swap between two of its tokens would hide it."""
    parts = [
        make_part(ids[:6], first_row=len(PROMPT), version=4, finish_reason="abort"),
        make_part(ids[6:], first_row=len(PROMPT) + 6, version=5, finish_reason="length"),
    ]
    rollout, _ = grown(reader, parts, stop=("45", "9"))
    assert rollout.text == "12=3;" and rollout.finish_reason is FinishReason.STOP
    assert rollout.response_ids_T.tolist() == ids[:7]
    assert rollout.logprobs_T.tolist() == [-float(token) for token in ids[:7]]
    assert [dataclasses.astuple(span) for span in rollout.version_spans] == [(4, 0, 6), (5, 6, 7)]
    assert rollout.routed_experts.expert_ids_RMK.ravel().tolist() == list(range(len(PROMPT) + 6))
    assert rollout.routed_experts.num_tokens == len(PROMPT) + 7
    assert rollout.kept_tokens.ids_N.tolist() == ids[:7]
    # The token that completes it may be the last one that there was room for.
    last = make_part(ids[6:7], first_row=len(PROMPT) + 6, version=5, finish_reason="length")
    for of_two in (parts, [parts[0], last]):
        rollout, stop_text = grown(reader, of_two, stop=("9", "45"))
        assert (rollout.finish_reason, stop_text) == (FinishReason.STOP, "45")
    for stop in (("no such text",), ()):
        whole, stop_text = grown(reader, parts, stop=stop)
        assert whole.text == "12=3;45=9#6" and whole.finish_reason is FinishReason.LENGTH
        assert stop_text is None


def logged(ids: list[int], *, finish: FinishReason | None) -> LoggedTurn:
    num = len(ids)
    begun = BegunTurn(
        key=0,
        episode=EpisodeId(group_id=0, index=0),
        number=0,
        after=None,
        num_tokens_before=0,
        given_ids=PROMPT,
    )
    return LoggedTurn(
        begun=begun,
        batch=TokenBatch(
            keys_N=np.zeros(num, np.int64),
            ids_N=np.asarray(ids, np.int32),
            logprobs_N=-np.asarray(ids, np.float32),
            versions_N=np.full(num, 4, np.int32),
            parts_N=np.zeros(num, np.int32),
            finishes_N=np.asarray([0] * (num - 1) + [FINISHES.index(finish)], np.uint8),
            num_rows_N=np.asarray([len(PROMPT), *[1] * (num - 1)], np.int32),
            rows_RMK=np.zeros((len(PROMPT) + num - 1, 1, 1), np.uint8),
            num_kept_N=np.zeros(num, np.int32),
            kept_ids_J=np.zeros(0, np.int32),
        ),
        ended=None,
    )


def test_texts_that_end_a_turn_are_found_across_a_death(reader: SequenceReader, ids: list[int]) -> None:
    """Its engine may have sampled further tokens, and died before anybody had looked for the text."""
    met = TurnEnd(finish_reason=FinishReason.STOP, has_end_token=False, stop_text="45")
    for num_before in range(1, len(ids)):
        trajectory = reader.new_trajectory()
        trajectory.give(PROMPT)
        end = reader.resume(trajectory, logged(ids[:num_before], finish=None), stop=("45",))
        assert end == (met if num_before >= 7 else None)
        if end is None:
            rest = make_part(
                ids[num_before:], first_row=len(PROMPT) + num_before, version=5, finish_reason="length"
            )
            assert reader.grow(trajectory, rest, stop=("45",)) == met
        assert trajectory.sampled_ids.tolist() == ids[:7]


@pytest.mark.parametrize("finish", FinishReason)
def test_a_turn_that_ended_with_its_last_token_is_over(reader: SequenceReader, finish: FinishReason) -> None:
    trajectory = reader.new_trajectory()
    trajectory.give(PROMPT)
    end = reader.resume(trajectory, logged([5, 6], finish=finish), stop=())
    assert end == TurnEnd(finish_reason=finish, has_end_token=finish is FinishReason.STOP)
