"""Paths by the renderers of families of models, against the chat templates as transformers renders them."""

import random

import numpy as np
import pytest

from forgeasync.environments import (
    ASSISTANT,
    TEXTS,
    TOOLS,
    Abilities,
    BridgeRefused,
    Difference,
    FamilyRenderer,
    TemplateRenderer,
    TurnMatch,
    assistant,
    call,
    compare,
    fixed_dialogues,
    other_tokens,
    random_dialogue,
    rendered_anew,
    result,
    user,
    walk,
)
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.conversations import Talk

ABILITIES = {
    "qwen3": Abilities(
        system=True,
        reasoning=True,
        must_reason=False,
        tools=TOOLS,
        calls=True,
        parallel_calls=True,
        text_beside_calls=True,
    ),
    "qwen3.5": Abilities(
        system=True,
        reasoning=True,
        must_reason=True,
        tools=TOOLS,
        calls=True,
        parallel_calls=True,
        text_beside_calls=True,
    ),
    "llama-3": Abilities(
        system=True,
        reasoning=False,
        must_reason=False,
        tools=TOOLS,
        calls=True,
        parallel_calls=False,
        text_beside_calls=False,
    ),
    "glm-4.5": Abilities(
        system=True,
        reasoning=True,
        must_reason=False,
        tools=TOOLS,
        calls=True,
        parallel_calls=True,
        text_beside_calls=True,
    ),
    "deepseek-v3": Abilities(
        system=True,
        reasoning=False,
        must_reason=False,
        tools=(),
        calls=True,
        parallel_calls=True,
        text_beside_calls=True,
    ),
}
DATE = {"date_string": "26 Jul 2024"}


def make_renderer(family: str) -> FamilyRenderer:
    return FamilyRenderer(family_tokenizer(family), family)


@pytest.mark.parametrize("family", TEMPLATES)
def test_first_prompts_are_those_of_the_template(family: str) -> None:
    tokenizer = family_tokenizer(family)
    template = TemplateRenderer(tokenizer, DATE if family == "llama-3" else {})
    renderer = make_renderer(family)
    num_equal = 0
    for dialogue in fixed_dialogues():
        try:
            expected = template.rendered_ids(dialogue.messages, dialogue.tools)
        except ValueError:
            continue
        num_equal += renderer.rendered_ids(dialogue.messages, dialogue.tools) == expected
    assert num_equal == (9 if family == "llama-3" else 10)


def _paths(family: str, seeds: range) -> None:
    """Tokens are those that were received and made; decoded, they are what the template renders."""
    tokenizer, renderer, abilities = family_tokenizer(family), make_renderer(family), ABILITIES[family]
    template = TemplateRenderer(tokenizer, DATE if family == "llama-3" else {})
    found: set[TurnMatch] = set()
    for seed in seeds:
        rng = random.Random(seed)
        dialogue = random_dialogue(rng, abilities, TEXTS)
        retokenized = other_tokens(tokenizer, rng)
        talk = Talk(renderer, tokenizer, dialogue.tools)
        heard: list[object] = []
        num_sampled = 0
        for index, message in enumerate(dialogue.messages):
            if message["role"] != ASSISTANT:
                heard.append(message)
                continue
            talk.hear(*heard)
            heard = []
            ids = retokenized(renderer.answer_ids(dialogue.messages[:index], message, dialogue.tools))
            before = list(talk.received)
            parsed = talk.say(ids.tolist())
            num_sampled += len(ids)
            assert talk.received == [*before, *ids.tolist()]
            calls = [one["function"] for one in message.get("tool_calls", ())]
            assert [{"name": one.name, "arguments": one.arguments} for one in parsed.tool_calls] == calls
            assert parsed.text.strip() == message["content"]
            assert (parsed.reasoning or "").strip() == message.get("reasoning_content", "")
        talk.hear(*heard)
        assert list(talk.conversation.token_ids) == talk.received[: len(talk.conversation.token_ids)]
        assert sum(talk.is_sampled) == num_sampled
        walked = walk(renderer, tokenizer, dialogue)
        anew = template.rendered_ids(dialogue.messages, dialogue.tools)
        likeness = compare(tokenizer, walked, dialogue.messages, anew)
        assert not isinstance(likeness, Difference), (seed, likeness)
        found |= likeness
    assert TurnMatch.SAME in found


@pytest.mark.parametrize("family", TEMPLATES)
def test_paths_of_random_conversations(family: str) -> None:
    _paths(family, range(20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", TEMPLATES)
def test_paths_of_many_random_conversations(family: str) -> None:
    _paths(family, range(100, 300))


def ends_of_turns() -> list[tuple[str, str, str]]:
    """What follows a turn that was cut: by hand, from each family's format."""
    chatml = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    llama = "<|eot_id|>" + header.format("user") + "more<|eot_id|>" + header.format("assistant")
    return [
        ("qwen3", "so", "so" + chatml),
        ("qwen3", "<think>\nso", "<think>\nso</think>" + chatml),
        ("qwen3.5", "so", "so</think>" + chatml + "<think>\n"),
        ("llama-3", "so", "so" + llama),
        ("glm-4.5", "\n<think></think>\nso", "so<|endoftext|><|user|>\nmore<|assistant|>"),
        ("deepseek-v3", "so", "so<｜end▁of▁sentence｜><｜User｜>more<｜Assistant｜>"),
    ]


@pytest.mark.parametrize(("family", "text", "expected"), ends_of_turns())
def test_a_turn_that_was_cut_is_closed(family: str, text: str, expected: str) -> None:
    talk = Talk(make_renderer(family), family_tokenizer(family))
    talk.hear(user("x"))
    talk.say_text(text, cut=True)
    talk.hear(user("more"))
    assert talk.text.endswith(expected)


def test_reasoning_of_earlier_turns_stays() -> None:
    """The template drops it once a user speaks again; it was attended to, so a path keeps it."""
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talk.hear(user("x"))
    assert talk.say_text("<think>\nhm\n</think>\n\na").reasoning == "hm"
    talk.hear(user("y"))
    talk.say_text("b")
    talk.hear(user("z"))
    assert "<think>\nhm\n</think>\n\na<|im_end|>\n<|im_start|>user\ny" in talk.text
    anew = talk.tokenizer.apply_chat_template(talk.messages, tokenize=False, add_generation_prompt=True)
    assert "hm" not in anew


@pytest.mark.parametrize("family", ["qwen3.5", "llama-3"])
def test_white_space_that_the_format_strips_stays_as_it_was_sampled(family: str) -> None:
    talk = Talk(make_renderer(family), family_tokenizer(family))
    talk.hear(user("x"))
    said = "hm \n </think>  a \n " if family == "qwen3.5" else " a \n "
    assert talk.say_text(said).text == "a"
    talk.hear(user("y"))
    assert f"{said}{talk.tokenizer.eos_token}" in talk.text


def test_reasoning_that_the_prompt_opens_is_read() -> None:
    talk = Talk(make_renderer("qwen3.5"), family_tokenizer("qwen3.5"))
    talk.hear(user("x"))
    parsed = talk.say_text("hm\n</think>\n\na")
    assert (parsed.reasoning, parsed.text) == ("hm", "a")


def test_several_results_follow_several_calls() -> None:
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"), TOOLS)
    talk.hear(user("x"))
    one = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    parsed = talk.say_text(f"{one}\n{one}")
    assert [made.id for made in parsed.tool_calls] == ["call_0_0", "call_0_1"]
    talk.hear(result("call_0_0", "a"), result("call_0_1", "b"))
    results = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n" in talk.text


def test_the_messages_of_others_cannot_be_bridged() -> None:
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talk.hear(user("x"))
    talk.say_text("a")
    before = list(talk.received)
    with pytest.raises(BridgeRefused, match=r"messages\[3\] is an assistant's message .* render .* anew"):
        talk.hear(user("y"), assistant("forged"), user("z"))
    assert talk.received == before


def test_a_turn_that_ended_while_it_was_reasoning_cannot_be_bridged() -> None:
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talk.hear(user("x"))
    talk.say_text("<think>\nhm")
    with pytest.raises(BridgeRefused, match=r"messages\[2:\] .* ended while the model was reasoning"):
        talk.hear(user("y"))


def test_a_turn_that_goes_on_after_its_end_cannot_be_bridged() -> None:
    """The library would cut it there, and the path would lose tokens that were sampled."""
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talk.hear(user("x"))
    talk.say_text("a<|endoftext|>b", cut=True)
    with pytest.raises(BridgeRefused, match="would take back tokens"):
        talk.hear(user("y"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 5000, r"'glm-4\.5' refuses these messages: RecursionError"),
        ("<arg_value>" * 4000, "more markup"),
    ],
)
def test_a_turn_that_the_bridge_cannot_read_is_rendered_anew(value: str, problem: str) -> None:
    """GLM's bridge parses the turn before it, as DeepSeek V4's and Gemma's do."""
    talk = Talk(make_renderer("glm-4.5"), family_tokenizer("glm-4.5"), TOOLS)
    talk.hear(user("x"))
    hostile = f"<tool_call>set_value\n<arg_key>count</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    parsed = talk.say_text("\n<think></think>\n" + hostile)
    assert len(parsed.broken_tool_calls) == 1
    with pytest.raises(BridgeRefused, match=problem):
        talk.hear(user("y"))
    messages = (*talk.messages, user("y"))
    made = rendered_anew(talk.renderer, messages, talk.conversation.turns, TOOLS)
    assert made.num_from_text == 1


def test_a_message_that_a_family_has_no_form_for_is_named_in_the_end() -> None:
    talk = Talk(make_renderer("qwen3.5"), family_tokenizer("qwen3.5"))
    talk.hear(user("x"))
    talk.say_text("hm</think>a")
    strange = {"role": "critic", "content": "no"}
    with pytest.raises(BridgeRefused):
        talk.hear(strange)
    with pytest.raises(ValueError, match=r"refuses these messages: .*critic") as refused:
        rendered_anew(talk.renderer, (*talk.messages, strange), talk.conversation.turns)
    assert not isinstance(refused.value, BridgeRefused)


def test_what_a_family_has_no_form_for_is_refused() -> None:
    tokenizer = family_tokenizer("llama-3")
    with pytest.raises(ValueError, match=r"'llama-3' refuses these messages: .*single tool call"):
        FamilyRenderer(tokenizer, "llama-3").answer_ids(
            (user("x"),), assistant("", call("a", "ping"), call("b", "ping")), TOOLS
        )
    with pytest.raises(ValueError, match="'set_value' was given, but the format of 'deepseek-v3' does not"):
        Talk(make_renderer("deepseek-v3"), family_tokenizer("deepseek-v3"), TOOLS).hear(user("x"))


@pytest.mark.parametrize(
    ("family", "arguments", "problem"),
    [
        ("qwen3", {}, r"no renderer 'qwen3': .*special token"),
        ("llama-3", {"enable_thinking": False}, "Unsupported chat_template_kwargs"),
        ("llama-3", {"thinking_retention": "tool_cycle"}, "Unsupported chat_template_kwargs"),
    ],
)
def test_a_family_that_the_tokenizer_is_not_of(family: str, arguments: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){problem}"):
        FamilyRenderer(family_tokenizer("llama-3"), family, arguments)


def test_an_answer_ends_with_what_the_model_samples() -> None:
    """GLM's turns end with the role of the next message: another one after a tool call."""
    tokenizer, renderer = family_tokenizer("glm-4.5"), make_renderer("glm-4.5")
    ends = [
        tokenizer.decode(renderer.answer_ids((user("x"),), said, TOOLS)[-1:].tolist())
        for said in (assistant("a"), assistant("", call("a", "ping")))
    ]
    assert ends == ["<|user|>", "<|observation|>"]
    assert renderer.answer_ids((user("x"),), assistant("a")).dtype == np.int32
