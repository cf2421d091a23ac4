"""Log-probabilities that an engine gives to tokens sampled by another model.

They are over the full vocabulary at temperature 1, because vLLM's prompt log-probabilities ignore temperature
and kept sets. These requests never read from the prefix cache, so that every position is computed with the
weights of its request. New weights can arrive between two steps of one request. So an engine that scores
while its weights change must recompute running requests at every swap (``weights.kv_cache: recompute``). vLLM
then fills in all positions again, and no score mixes two versions.

Shape suffixes: S tokens of prompt and response, T response tokens, K ids of each token.
"""

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.updates import request_arguments
from forgeasync.observability import State, doing
from forgeasync.rollouts import NO_ID, TeacherRecord, WrongTeacherRecord, no_teacher_record


async def score_tokens(
    engine: GeneratorEngine, ids_S: np.ndarray, *, num_prompt: int, num_ids: int
) -> TeacherRecord:
    """Score the tokens after the first ``num_prompt`` and the ``num_ids`` likeliest ids at each position.

    Args:
        engine: Engine whose model scores.
        ids_S: Token ids of prompt and response.
        num_prompt: Number of tokens that are not scored, at least 1.
        num_ids: Number K of likeliest ids.

    Returns:
        Log-probabilities in nats, of each token [T] and of K ids [T, K].

    Raises:
        WrongTeacherRecord: The engine's result is for other tokens.
    """
    # Returns the log-probability of every token and of the ``num_ids`` likeliest ids at its position.
    params = SamplingParams(**_once(engine), prompt_logprobs=num_ids, flat_logprobs=True)
    with engine.busy.running(), doing(State.COMPUTING):
        output = await engine.run_request(ids_S.tolist(), params)
    return read_scores(output, ids_S, num_prompt=num_prompt, num_ids=num_ids)


async def score_given_ids(
    engine: GeneratorEngine, ids_S: np.ndarray, given_TK: np.ndarray, *, num_prompt: int
) -> TeacherRecord:
    """Score the tokens after the first ``num_prompt`` and given ids at each position.

    Args:
        engine: Engine whose model scores.
        ids_S: Token ids of prompt and response.
        given_TK: Ids, int32; the score of ``NO_ID`` is nan.
        num_prompt: Number of tokens that are not scored, at least 1.

    Returns:
        Log-probabilities in nats, of each token [T] and of the given ids [T, K].

    Raises:
        WrongTeacherRecord: The engine's result is for other ids.
    """
    scored_ids_TK = np.concatenate([ids_S[num_prompt:, None], given_TK], axis=1, dtype=np.int32)
    if not len(scored_ids_TK):
        return no_teacher_record(0, given_TK.shape[1])
    # Row i scores its ids as predictions of token num_prompt + i.
    params = SamplingParams(
        **_once(engine), prompt_logprob_token_ids=scored_ids_TK, prompt_logprob_start=num_prompt - 1
    )
    with engine.busy.running(), doing(State.COMPUTING):
        output = await engine.run_request(ids_S.tolist(), params)
    return read_given_scores(output, scored_ids_TK)


def read_given_scores(output: RequestOutput, scored_ids_TK: np.ndarray) -> TeacherRecord:
    """Return the record of tokens, whose ids are the first column of ``scored_ids_TK``.

    Raises:
        WrongTeacherRecord: The engine's result does not cover all ids.
    """
    found_TK = output.prompt_token_id_logprobs
    if found_TK is None or found_TK.shape != scored_ids_TK.shape:
        shape = None if found_TK is None else list(found_TK.shape)
        raise WrongTeacherRecord(f"the engine scored ids {shape}; must be {list(scored_ids_TK.shape)}")
    return TeacherRecord(
        logprobs_T=found_TK[:, 0].astype(np.float32),
        ids_TK=scored_ids_TK[:, 1:],
        topk_TK=np.where(scored_ids_TK == NO_ID, np.nan, found_TK)[:, 1:].astype(np.float32),
        versions_T=np.full(len(scored_ids_TK), _version(output), np.int32),
    )


def _once(engine: GeneratorEngine) -> dict[str, Any]:
    """Return the sampling parameters that all scoring requests share."""
    return {
        # vLLM samples at least one token.
        "max_tokens": 1,
        "temperature": 1.0,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "extra_args": request_arguments(episode=engine.new_episode(0).number),
    }


def read_scores(output: RequestOutput, ids_S: np.ndarray, *, num_prompt: int, num_ids: int) -> TeacherRecord:
    """Return the record of the tokens after the first ``num_prompt``.

    Raises:
        WrongTeacherRecord: The engine's result is for other tokens, or does not cover all of them.
    """
    found = output.prompt_logprobs
    assert isinstance(found, FlatLogprobs), "as it was asked for"
    if len(found) != len(ids_S):
        raise WrongTeacherRecord(f"the engine scored {len(found)} positions; must be {len(ids_S)}")
    starts_T = np.asarray(found.start_indices[num_prompt:], np.int64)
    widths_T = np.asarray(found.end_indices[num_prompt:], np.int64) - starts_T
    if (widths_T != 1 + num_ids).any():
        place = num_prompt + int((widths_T != 1 + num_ids).argmax())
        raise WrongTeacherRecord(
            f"the engine scored other than {num_ids} ids and the token at position {place}"
        )
    # The token itself comes first, then the likeliest ids by rank.
    places_TK = starts_T[:, None] + np.arange(1 + num_ids)
    token_ids_TK = np.asarray(found.token_ids, np.int32)[places_TK]
    logprobs_TK = np.asarray(found.logprobs, np.float32)[places_TK]
    is_other_T = token_ids_TK[:, 0] != ids_S[num_prompt:]
    if is_other_T.any():
        place = int(is_other_T.argmax())
        raise WrongTeacherRecord(
            f"the engine scored token {token_ids_TK[place, 0]} at position {num_prompt + place}; must be "
            f"token {ids_S[num_prompt + place]}"
        )
    return TeacherRecord(
        logprobs_T=logprobs_TK[:, 0],
        ids_TK=token_ids_TK[:, 1:],
        topk_TK=logprobs_TK[:, 1:],
        versions_T=np.full(len(logprobs_TK), _version(output), np.int32),
    )


def _version(output: RequestOutput) -> int:
    spans = output.outputs[0].weight_versions
    assert spans is not None and len(spans) == 1, "one token was sampled"
    return int(spans[0].version)
