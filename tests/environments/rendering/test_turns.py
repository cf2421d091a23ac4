"""What is read of a model's turn, whatever the model has written."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import (
    MAX_BROKEN_TEXT,
    MAX_CALLS,
    MAX_DEPTH,
    MAX_VALUES,
    TOOLS,
    FamilyRenderer,
    TemplateRenderer,
    ToolSpec,
    Turn,
    sampled,
)
from forgeasync.rollouts import FinishReason, SampledTurn
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.conversations import turn_of

SWITCH = ToolSpec(
    name="switch",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "label": {"type": "string"},
            "maybe": {"type": ["integer", "null"]},
        },
    },
)


DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json{}```<｜tool▁call▁end｜>"
)


def read(family: str, text: str, *tools: ToolSpec, cut: bool = False) -> Turn:
    tokenizer = family_tokenizer(family)
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return FamilyRenderer(tokenizer, family).parse(
        [], turn_of(tokenizer, text, number=7, finish_reason=reason), tools or TOOLS
    )


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<think>\n</think>\n\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"on": "true"}, {"on": True}),
        # As the template of Qwen3.5 itself writes booleans and null.
        ({"on": "True", "maybe": "None"}, {"on": True, "maybe": None}),
        ({"on": "False", "label": "True"}, {"on": False, "label": "True"}),
        ({"label": "3"}, {"label": "3"}),
        ({"maybe": "3"}, {"maybe": 3}),
        # Whoever has the tool tells the model that this is no boolean.
        ({"on": "perhaps"}, {"on": "perhaps"}),
        ({}, {}),
    ],
)
def test_values_without_quotes_have_the_declared_type(values: dict, arguments: dict) -> None:
    (made,) = read("qwen3.5", xml("switch", **values), SWITCH).tool_calls
    assert made.arguments == arguments


@pytest.mark.parametrize("family", ["qwen3.5", "glm-4.5"])
def test_a_tool_that_does_not_exist_is_called_all_the_same(family: str) -> None:
    """The agent's tools answer that there is none."""
    texts = {
        "qwen3.5": xml("fly", to="moon"),
        "glm-4.5": "\n<think></think>\n<tool_call>fly\n"
        "<arg_key>to</arg_key>\n<arg_value>moon</arg_value>\n</tool_call>",
    }
    (made,) = read(family, texts[family]).tool_calls
    assert (made.name, made.arguments) == ("fly", {"to": "moon"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "ping", "arguments": {', "not a JSON object"),
        ("{'name': 'ping'}", "not a JSON object"),
        ('{"arguments": {}}', "names no tool"),
        ('["ping"]', "names no tool"),
        ('{"name": 5, "arguments": {}}', "names no tool"),
        ('{"name": "ping", "arguments": "x"}', "must be an object"),
        ('{"name": "ping", "arguments": [1]}', "must be an object"),
        ('{"name": "ping", "arguments": {"a": NaN}}', "not JSON compliant"),
        ('{"name": "ping", "arguments": {"a": 1e999}}', "not JSON compliant"),
        ('{"name": "ping", "arguments": {"a": "\\ud83d"}}', "surrogate"),
        (json.dumps({"name": "p" * 200, "arguments": {}}), "200 characters"),
        (json.dumps({"name": "ping", "arguments": {"a": [0] * MAX_VALUES}}), "at most 10000 values"),
        ('{"name": "ping", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}", "nested deeper than"),
        ('{"name": "ping", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}", "cannot be read"),
        ('{"name": "ping", "arguments": {"a": ' + "9" * 5000 + "}}", "cannot be read"),
    ],
)
def test_calls_that_cannot_be_made_say_why(text: str, problem: str) -> None:
    parsed = read("qwen3", hermes(text))
    assert not parsed.tool_calls
    (broken,) = parsed.broken_tool_calls
    assert problem in broken.problem and len(broken.text) <= MAX_BROKEN_TEXT
    assert broken.text[:5] in hermes(text)


NESTED: object = 1
for _ in range(MAX_DEPTH - 1):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "ping", "arguments": {}}', {}),
        ('{"name": "ping"}', {}),
        ('{"name": "ping", "arguments": null}', {}),
        (json.dumps({"name": "ping", "arguments": {"a": NESTED}}), {"a": NESTED}),
    ],
)
def test_arguments_that_are_read(text: str, arguments: dict[str, object]) -> None:
    (made,) = read("qwen3", hermes(text)).tool_calls
    assert (made.name, made.arguments, made.id) == ("ping", arguments, "call_7_0")


@pytest.mark.parametrize(("cut", "problem"), [(True, "was cut before"), (False, "has no end")])
def test_half_a_call(cut: bool, problem: str) -> None:
    parsed = read("qwen3", 'Well. <tool_call>\n{"name": "ping"', cut=cut)
    assert parsed.text == "Well." and not parsed.tool_calls
    (broken,) = parsed.broken_tool_calls
    assert problem in broken.problem and '"ping"' in broken.text


def test_one_broken_call_between_two() -> None:
    whole = hermes('{"name": "ping", "arguments": {}}')
    parsed = read("qwen3", whole + hermes("{") + whole)
    assert [made.id for made in parsed.tool_calls] == ["call_7_0", "call_7_2"]
    assert len(parsed.broken_tool_calls) == 1


def test_a_call_inside_reasoning_is_none() -> None:
    call = hermes('{"name": "ping", "arguments": {}}')
    parsed = read("qwen3", f"<think>\nmaybe {call}\n</think>\n\nno")
    assert not parsed.tool_calls and not parsed.broken_tool_calls
    assert parsed.text == "no" and parsed.reasoning is not None and "ping" in parsed.reasoning


def test_more_calls_than_are_read() -> None:
    parsed = read("qwen3", hermes('{"name": "ping", "arguments": {}}') * (MAX_CALLS + 3))
    assert len(parsed.tool_calls) == MAX_CALLS
    (broken,) = parsed.broken_tool_calls
    assert "it and 2 after it are too many" in broken.problem


def test_special_tokens_are_in_no_text() -> None:
    parsed = read("qwen3", "a<|im_start|>b")
    assert parsed.text == "ab"
    parsed = read("qwen3", "<think>\na<|im_start|>b</think>c")
    assert (parsed.reasoning, parsed.text) == ("ab", "c")


def test_a_text_that_ended_the_turn_is_not_in_it() -> None:
    tokenizer = family_tokenizer("qwen3")
    whole = turn_of(tokenizer, "a b STOP")
    turn = SampledTurn(
        turn=0, ids_T=whole.ids_T, text="a b ", finish_reason=FinishReason.STOP, first_version=0, version=0
    )
    assert FamilyRenderer(tokenizer, "qwen3").parse([], turn).text == "a b "


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3.5", "<tool_call>\n<function=x>\n" + "<parameter=a>" * 4000 + "</tool_call>"),
        ("qwen3.5", "<tool_call>" + "<function=" * 5000 + "</tool_call>"),
        ("deepseek-v3", "a" + " \n" * 5000 + "b"),
        # The time grows with the cube of the number of blanks here: 42 s with 4,400 of them.
        ("deepseek-v3", DEEPSEEK_CALL.replace("{}", " \n" * 150 + "x")),
    ],
)
def test_what_would_take_the_parsers_too_long_is_not_parsed(family: str, text: str) -> None:
    parsed = read(family, text)
    assert not parsed.tool_calls
    assert ["more markup than is read" in broken.problem for broken in parsed.broken_tool_calls] == [True]


PIECES = st.sampled_from(
    """<think> </think> <tool_call> </tool_call> <function=ping> <parameter=a> </parameter> </function>
    <arg_key> </arg_key> <arg_value> </arg_value> <|im_end|> <|user|> { [[[ null é ```json "\\ud800" {"name":
    {"name":"ping","arguments":{}} <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function<｜tool▁sep｜>ping\n
    <｜tool▁call▁end｜>""".split()
)


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(PIECES | st.text(max_size=5), max_size=12), cut=st.booleans())
def test_nothing_that_is_written_raises(pieces: list[str], cut: bool) -> None:
    for family in TEMPLATES:
        text = "".join(pieces).encode(errors="ignore").decode()
        parsed = read(family, text + "x", cut=cut)
        for made in parsed.tool_calls:
            json.dumps(made.message_form, ensure_ascii=False, allow_nan=False).encode()
            assert made.name.strip() and isinstance(made.arguments, dict)


@pytest.mark.parametrize("by_template", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_no_tokens_raise(family: str, by_template: bool) -> None:
    tokenizer = family_tokenizer(family)
    renderer = TemplateRenderer(tokenizer) if by_template else FamilyRenderer(tokenizer, family)
    rng = random.Random(0)
    marks = list(tokenizer.get_added_vocab().values())
    for _ in range(100):
        ids = [
            rng.choice(marks) if rng.random() < 0.4 else rng.randrange(len(tokenizer))
            for _ in range(rng.randint(1, 40))
        ]
        before = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 20))]
        parsed = renderer.parse(before, sampled(tokenizer, np.asarray(ids, np.int32), number=0), TOOLS)
        assert isinstance(parsed.text, str)
