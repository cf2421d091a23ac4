"""What engines say of given tokens: against transformers, and what of vLLM's answer is refused."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.logprobs import FlatLogprobs

from forgeasync.config import GeneratorSection
from forgeasync.generator import read_given_scores, read_scores
from forgeasync.models import read_model_facts
from forgeasync.rollouts import NO_ID, TeacherRecord, WrongTeacherRecord
from forgeasync.testing import write_tiny_model
from tests.support.engines import NO_RECORDS, start_engine
from tests.support.processes import run_alone

NUM_IDS, NUM_PROMPT = 6, 3


def given_ids(num_tokens: int, vocab_size: int) -> np.ndarray:
    """Up to ``NUM_IDS`` ids for every token, none for some."""
    rng = np.random.default_rng(num_tokens)
    ids_TK = np.sort(rng.permuted(np.tile(np.arange(vocab_size), (num_tokens, 1)), axis=1)[:, :NUM_IDS])
    ids_TK[np.arange(NUM_IDS) >= rng.integers(0, NUM_IDS + 1, (num_tokens, 1))] = NO_ID
    return ids_TK.astype(np.int32)


async def _score(folder: Path, sequences: list[np.ndarray]) -> list[TeacherRecord]:
    """All at once, twice each and by all ways, in an engine that computes 48 tokens a step."""
    from forgeasync.generator import score_given_ids, score_tokens

    generator = GeneratorSection(max_num_batched_tokens=48, max_num_seqs=16, kv_cache_gib=0.01)
    engine = await start_engine(folder, generator, records=NO_RECORDS, num_scored_ids=NUM_IDS + 1)
    found = await asyncio.gather(
        *(
            score
            for ids_S in (*sequences, *sequences)
            for score in (
                score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=NUM_IDS),
                score_tokens(engine, ids_S, num_prompt=NUM_PROMPT, num_ids=0),
                score_given_ids(
                    engine,
                    ids_S,
                    given_ids(len(ids_S) - NUM_PROMPT, engine.vocab_size),
                    num_prompt=NUM_PROMPT,
                ),
            )
        )
    )
    engine.shutdown()
    return list(found)


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """In pieces of a step, beside others, and where a prefix was computed for somebody else before."""
    folder = write_tiny_model(tmp_path / "hf", scale=4.0)
    rng = np.random.default_rng(0)
    vocab_size = read_model_facts(str(folder)).vocab_size
    sequences = [rng.integers(0, vocab_size, length).astype(np.int32) for length in (4, 40, 159)]
    found = run_alone(_score, folder, sequences)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    for number, ids_S in enumerate((*sequences, *sequences)):
        wide, narrow, given = found[3 * number : 3 * number + 3]
        ids = torch.from_numpy(ids_S.astype(np.int64))
        with torch.no_grad():
            logprobs_TV = model(ids[None]).logits[0, NUM_PROMPT - 1 : -1].log_softmax(-1)
        expected_T = logprobs_TV.gather(1, ids[NUM_PROMPT:, None])[:, 0]
        for one in (wide, narrow, given):
            np.testing.assert_allclose(one.logprobs_T, expected_T, atol=5e-5)
        assert narrow.ids_TK.shape == (len(ids_S) - NUM_PROMPT, 0)
        likeliest = logprobs_TV.topk(NUM_IDS)
        np.testing.assert_allclose(wide.topk_TK, likeliest.values, atol=5e-5)
        of_ids_TK = logprobs_TV.gather(1, torch.from_numpy(wide.ids_TK.astype(np.int64)))
        np.testing.assert_allclose(wide.topk_TK, of_ids_TK, atol=5e-5)
        scored_ids_TK = given_ids(len(ids_S) - NUM_PROMPT, vocab_size)
        np.testing.assert_array_equal(given.ids_TK, scored_ids_TK)
        expected_TK = logprobs_TV.gather(
            1, torch.from_numpy(scored_ids_TK.clip(min=0).astype(np.int64))
        ).numpy()
        np.testing.assert_allclose(
            given.topk_TK, np.where(scored_ids_TK == NO_ID, np.nan, expected_TK), atol=5e-5
        )
        assert (given.versions_T == 0).all()


def answer(ids: list[int], *, others: list[int], skip: int | None = None) -> SimpleNamespace:
    flat = FlatLogprobs()
    flat.append(None)
    for place, token in enumerate(ids[1:], start=1):
        if place == skip:
            flat.append(None)
            continue
        flat.append_fast([token, *others], [-1.0, *([-2.0] * len(others))], iter([1] * 9), [None] * 9)
    sampled = SimpleNamespace(weight_versions=[SimpleNamespace(version="3")])
    return SimpleNamespace(prompt_logprobs=flat, outputs=[sampled])


def test_an_answer_about_other_tokens_is_refused() -> None:
    ids_S = np.arange(6, dtype=np.int32)
    right = read_scores(answer([0, 1, 2, 3, 4, 5], others=[7, 8]), ids_S, num_prompt=2, num_ids=2)
    assert right.ids_TK.tolist() == [[7, 8]] * 4 and right.logprobs_T.tolist() == [-1.0] * 4
    assert right.versions_T.tolist() == [3] * 4
    for wrong, said in (
        (answer([0, 1, 2, 9, 4, 5], others=[7, 8]), "token 9 at position 3; must be token 3"),
        (answer([0, 1, 2, 3, 4], others=[7, 8]), "scored 5 positions; must be 6"),
        (answer([0, 1, 2, 3, 4, 5], others=[7]), "other than 2 ids and the token at position 2"),
        (answer([0, 1, 2, 3, 4, 5], others=[7, 8], skip=4), "other than 2 ids and the token at position 4"),
    ):
        with pytest.raises(WrongTeacherRecord, match=said):
            read_scores(wrong, ids_S, num_prompt=2, num_ids=2)


@pytest.mark.parametrize("found", [None, np.zeros((3, 2)), np.zeros((4, 1))])
def test_an_answer_about_fewer_ids_is_refused(found: np.ndarray | None) -> None:
    output = SimpleNamespace(prompt_token_id_logprobs=found)
    with pytest.raises(WrongTeacherRecord, match=r"must be \[4, 2\]"):
        read_given_scores(output, np.zeros((4, 2), np.int32))
