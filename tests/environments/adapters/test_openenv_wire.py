"""The wire to an OpenEnv server: what is read of hostile text."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.environments import BadReward, ServerError, read_schema, reset_message, step_message, text_of
from forgeasync.environments.openenv.wire import WireError, read_answer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def observation(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": data})


@given(
    fields=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    reward=st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False),
    done=st.booleans(),
    metadata=json_values,
)
def test_observations_are_read_as_they_were_written(
    fields: Any, reward: Any, done: bool, metadata: Any
) -> None:
    found = read_answer(observation(observation=fields, reward=reward, done=done, metadata=metadata))
    assert json.dumps(found.fields) == json.dumps(fields) and found.done == done
    assert found.reward == (None if reward is None else float(reward))


@given(text=st.text(max_size=40) | json_values.map(json.dumps) | st.builds(observation, data=json_values))
def test_text_that_is_no_answer_is_said_to_be_none(text: str) -> None:
    with pytest.raises(WireError):
        read_answer(text)


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "1e999", str(10**400)])
def test_rewards_that_are_no_finite_number(reward: str) -> None:
    with pytest.raises(BadReward, match="must be finite"):
        read_answer(f'{{"type": "observation", "data": {{"observation": {{}}, "reward": {reward}}}}}')


@pytest.mark.parametrize("depth", [200_000])
def test_text_that_is_nested_beyond_measure(depth: int) -> None:
    for text in ("[" * depth, '{"a":' * depth, "1" * 10_000):
        with pytest.raises(WireError):
            read_answer(text)


@given(data=st.dictionaries(st.sampled_from(["message", "code", "errors"]), json_values))
def test_errors_are_told_on_one_line_of_bounded_length(data: dict[str, Any]) -> None:
    with pytest.raises(ServerError) as caught:
        read_answer(json.dumps({"type": "error", "data": data}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 500


def test_what_is_wrong_with_an_action_is_told_by_its_place() -> None:
    errors = [{"loc": ["sign"], "msg": "must be\nplus"}, {"msg": "too many"}]
    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
    with pytest.raises(ServerError) as caught:
        read_answer(json.dumps({"type": "error", "data": data}))
    assert str(caught.value) == "Invalid message; sign: must be plus; action: too many"
    assert caught.value.code == "VALIDATION_ERROR"


@given(data=st.dictionaries(st.text(st.characters(), max_size=5), st.text(st.characters(), max_size=5)))
def test_what_a_model_wrote_is_sent_as_ascii(data: dict[str, str]) -> None:
    for message, kind in ((reset_message(data), "reset"), (step_message(data), "step")):
        assert message.isascii() and json.loads(message) == {"type": kind, "data": data}


@given(value=json_values | st.text(st.characters(categories=["Cs", "Lu"]), max_size=5))
def test_observations_become_text_that_can_be_encoded(value: Any) -> None:
    text = text_of(value)
    text.encode()
    if isinstance(value, str):
        assert len(text) == len(value)
    elif not isinstance(value, float) or math.isfinite(value):
        assert json.dumps(json.loads(text)) == json.dumps(value)


def test_schemas() -> None:
    assert read_schema('{"action": {"type": "object"}}', "action") == {"type": "object"}
    for text in ("{}", "[]", '{"action": 3}', "x"):
        with pytest.raises(WireError):
            read_schema(text, "action")
