"""What was logged in flight, compared with what came out."""

import numpy as np

from forgeasync.rollouts import LoggedTurn, Rollout


def assert_begins_with(rollout: Rollout, turn: LoggedTurn, *, length: int | None = None) -> None:
    """A response begins with a turn that was logged, bit for bit, and has nothing else if that had ended.

    ``length``: of the response's first turn, where it has several.
    """
    assert rollout.prompt_ids_P.tolist() == turn.begun.given_ids.tolist()
    num_tokens = turn.num_tokens
    if not num_tokens:
        return
    tokens = turn.tokens()
    assert rollout.response_ids_T[:num_tokens].tolist() == tokens.ids_T.tolist()
    assert rollout.logprobs_T[:num_tokens].tobytes() == tokens.logprobs_T.tobytes()
    versions = [span.version for span in rollout.version_spans for _ in range(span.start, span.end)]
    assert versions[:num_tokens] == turn.batch.versions_N.tolist()
    for token in range(num_tokens):
        assert rollout.kept_tokens.row(token).tolist() == tokens.kept_tokens.row(token).tolist()
    old_RMK = np.sort(tokens.expert_ids_RMK, axis=-1)
    assert len(old_RMK) == len(turn.begun.given_ids) + num_tokens - 1
    assert rollout.routed_experts.expert_ids_RMK[: len(old_RMK)].tolist() == old_RMK.tolist()
    if turn.ended is not None:
        assert num_tokens == (rollout.num_response_tokens if length is None else length)
    if turn.ended is not None and length is None:
        assert rollout.finish_reason is turn.ended.finish_reason
