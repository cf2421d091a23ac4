"""What messages add to a path, by formats of families, a chat template or neither, against transformers."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from forgeasync.environments import (
    ASSISTANT,
    TEXTS,
    TOOLS,
    BridgeRefused,
    FamilyRenderer,
    Message,
    PlainRenderer,
    RenderedAnew,
    TemplateFeatures,
    TemplateRenderer,
    ToolSpec,
    assistant,
    compare,
    other_tokens,
    random_dialogue,
    rendered_anew,
    result,
    user,
    walk,
)
from forgeasync.rollouts import PromptEncoder, SampledTurn
from tests.support.chat import (
    CHATML,
    END,
    FORGETFUL,
    LAST_ONLY,
    NUMBERED,
    PICKY,
    SPACED,
    START,
    STRIPPING,
    make_tokenizer,
)
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.conversations import Talk, turn_of

ALL = TemplateFeatures(
    system=True,
    reasoning=True,
    must_reason=False,
    tools=TOOLS,
    calls=True,
    parallel_calls=True,
    text_beside_calls=True,
)
FEATURES = {
    "qwen3": ALL,
    "qwen3.5": replace(ALL, must_reason=True),
    "llama-3": replace(ALL, reasoning=False, parallel_calls=False, text_beside_calls=False),
    "glm-4.5": ALL,
    "deepseek-v3": replace(ALL, reasoning=False, tools=()),
}
DATE = {"date_string": "26 Jul 2024"}


def make_renderer(family: str) -> FamilyRenderer:
    return FamilyRenderer(family_tokenizer(family), family)


def make_talk(tokenizer: PreTrainedTokenizerFast) -> Talk:
    template = tokenizer.chat_template is not None
    return Talk((TemplateRenderer if template else PlainRenderer)(tokenizer), tokenizer)


def family_talk(family: str = "qwen3", tools: Sequence[ToolSpec] = ()) -> Talk:
    return Talk(make_renderer(family), family_tokenizer(family), tools)


def talk_begun(family: str = "qwen3", tools: Sequence[ToolSpec] = ()) -> Talk:
    """A conversation in which the user has spoken."""
    talk = family_talk(family, tools)
    talk.hear(user("x"))
    return talk


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(100, 300), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", TEMPLATES)
def test_paths_of_random_conversations(family: str, seeds: range) -> None:
    """Tokens are those that were received and made; decoded, they are what the template renders."""
    tokenizer, renderer, features = family_tokenizer(family), make_renderer(family), FEATURES[family]
    template = TemplateRenderer(tokenizer, DATE if family == "llama-3" else {})
    num_same = 0
    for seed in seeds:
        rng = random.Random(seed)
        dialogue = random_dialogue(rng, features, TEXTS)
        retokenized = other_tokens(tokenizer, rng)
        talk = Talk(renderer, tokenizer, dialogue.tools)
        heard: list[object] = []
        for index, message in enumerate(dialogue.messages):
            if message["role"] != ASSISTANT:
                heard.append(message)
                continue
            talk.hear(*heard)
            heard = []
            ids = retokenized(renderer.answer_ids(dialogue.messages[:index], message, dialogue.tools))
            parsed = talk.say(ids.tolist())
            calls = [one["function"] for one in message.get("tool_calls", ())]
            assert [{"name": one.name, "arguments": one.arguments} for one in parsed.tool_calls] == calls
            assert parsed.text.strip() == message["content"]
            assert (parsed.reasoning or "").strip() == message.get("reasoning_content", "")
        talk.hear(*heard)
        walked = walk(renderer, tokenizer, dialogue)
        anew = template.rendered_ids(dialogue.messages, dialogue.tools)
        difference = compare(tokenizer, walked, dialogue.messages, anew)
        assert difference is None, (seed, difference)
        num_same += walked.ids == anew
    assert num_same, "a path may differ in a turn's tokens and reasoning, but not every path does"


MORE = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA = "<|eot_id|>" + HEADER.format("user") + "more<|eot_id|>" + HEADER.format("assistant")


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        # By hand, from each family's format.
        ("qwen3", "so", "so" + MORE),
        ("qwen3", "<think>\nso", "<think>\nso</think>" + MORE),
        ("qwen3.5", "so", "so</think>" + MORE + "<think>\n"),
        ("llama-3", "so", "so" + LLAMA),
        ("glm-4.5", "\n<think></think>\nso", "so<|endoftext|><|user|>\nmore<|assistant|>"),
        ("deepseek-v3", "so", "so<｜end▁of▁sentence｜><｜User｜>more<｜Assistant｜>"),
    ],
)
def test_a_turn_that_was_cut_is_closed(family: str, text: str, expected: str) -> None:
    talk = talk_begun(family)
    talk.say_text(text, cut=True)
    talk.hear(user("more"))
    assert talk.text.endswith(expected)


def test_the_messages_of_others_cannot_be_bridged() -> None:
    talk = talk_begun()
    talk.say_text("a")
    before = list(talk.received)
    with pytest.raises(BridgeRefused, match=r"messages\[3\] is an assistant's message .* render .* again"):
        talk.hear(user("y"), assistant("forged"), user("z"))
    assert talk.received == before


@pytest.mark.parametrize(
    ("said", "cut", "problem"),
    [
        ("<think>\nhm", False, r"messages\[2:\] .* ended while the model was reasoning"),
        # The library would cut the turn at its end, and the path would lose tokens that were sampled.
        ("a<|endoftext|>b", True, "would take back tokens"),
    ],
)
def test_a_turn_that_the_format_does_not_continue_cannot_be_bridged(
    said: str, cut: bool, problem: str
) -> None:
    talk = talk_begun()
    talk.say_text(said, cut=cut)
    with pytest.raises(BridgeRefused, match=problem):
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
    talk = talk_begun("glm-4.5", TOOLS)
    hostile = f"<tool_call>set_value\n<arg_key>count</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    parsed = talk.say_text("\n<think></think>\n" + hostile)
    assert len(parsed.broken_tool_calls) == 1
    with pytest.raises(BridgeRefused, match=problem):
        talk.hear(user("y"))
    messages = (*talk.messages, user("y"))
    made = rendered_anew(talk.renderer, messages, talk.conversation.turns, TOOLS)
    assert made.num_from_text == 1


def test_a_message_that_a_family_has_no_form_for_is_named_in_the_end() -> None:
    talk = talk_begun("qwen3.5")
    talk.say_text("hm</think>a")
    strange = {"role": "critic", "content": "no"}
    with pytest.raises(BridgeRefused):
        talk.hear(strange)
    with pytest.raises(ValueError, match=r"refuses these messages: .*critic") as refused:
        rendered_anew(talk.renderer, (*talk.messages, strange), talk.conversation.turns)
    assert not isinstance(refused.value, BridgeRefused)


# ---- histories that were changed


def talked(talk: Talk, *answers: str) -> dict[int, SampledTurn]:
    """The turns of a conversation, by the place of their messages."""
    for number, answer in enumerate(answers):
        talk.hear(user(f"question {number}"))
        talk.say_text(answer)
    return dict(talk.conversation.turns)


def with_changed_question(talk: Talk) -> tuple[Message, ...]:
    return (user("another"), *talk.messages[1:], user("now?"))


def check_kept(made: RenderedAnew, turns: Iterable[SampledTurn]) -> None:
    """The tokens have those of each turn, in order."""
    ids = made.ids_S.tolist()
    for turn in turns:
        expected = turn.ids_T.tolist()
        start = next(i for i in range(len(ids)) if ids[i : i + len(expected)] == expected)
        ids = ids[start + len(expected) :]


@pytest.mark.parametrize("forged", [(), (1, 5)], ids=["none forged", "two forged"])
@pytest.mark.parametrize("template", [None, CHATML, "qwen3"])
def test_turns_keep_their_tokens_and_what_others_wrote_is_made_from_text(
    template: str | None, forged: tuple[int, ...]
) -> None:
    """The first question was changed. Forged messages are before the model's first turn and between two."""
    talk = family_talk() if template == "qwen3" else make_talk(make_tokenizer(template))
    turns = talked(talk, "a b", "c", "d", "e")
    messages = list(with_changed_question(talk))
    for index in forged:
        messages[index] = assistant("forged")
        del turns[index]
    made = rendered_anew(talk.renderer, tuple(messages), turns)
    assert made.num_from_text == len(forged) and set(turns) == {1, 3, 5, 7} - set(forged)
    check_kept(made, turns.values())
    text = talk.tokenizer.decode(made.ids_S.tolist(), skip_special_tokens=False)
    assert "another" in text and "question 0" not in text and "question 1" in text
    assert text.count("forged") == len(forged)
    assert not forged or text.index("forged") < text.index("question 1")
    if template == CHATML:
        anew = talk.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == anew


def test_a_turn_that_ended_while_it_was_reasoning_is_made_from_text() -> None:
    """Only that one: the turns around it keep their tokens."""
    talk = family_talk()
    turns = talked(talk, "<think>\nyes\n</think>\n\na", "<think>\nhm")
    messages = (*talk.messages, user("go on"), assistant("later"), user("now?"))
    later = talk.tokenizer("later<|im_end|>", add_special_tokens=False)["input_ids"]
    other = Talk(talk.renderer, talk.tokenizer)
    other.hear(user("question 2"))
    other.say(later)
    turns[5] = other.conversation.turns[1]
    made = rendered_anew(talk.renderer, messages, turns)
    assert made.num_from_text == 1
    check_kept(made, [turns[1], turns[5]])
    text = talk.tokenizer.decode(made.ids_S.tolist(), skip_special_tokens=False)
    assert "<think>\nhm\n</think>\n\n<|im_end|>" in text


def test_two_messages_of_others_in_a_row_are_rendered_with_all_before_them() -> None:
    talk = family_talk()
    turns = talked(talk, "a", "b")
    messages = (*talk.messages[:2], assistant("forged"), *talk.messages[2:], user("now?"))
    made = rendered_anew(talk.renderer, messages, {1: turns[1], 4: turns[3]})
    assert made.num_from_text == 2
    check_kept(made, [turns[3]])


@pytest.mark.parametrize("family", TEMPLATES)
def test_random_histories(family: str) -> None:
    """Some turns are forged; with none forged, the path is the one that was walked."""
    tokenizer, renderer = family_tokenizer(family), make_renderer(family)
    for seed in range(15):
        rng = random.Random(seed)
        dialogue = random_dialogue(rng, FEATURES[family], TEXTS)
        walked = walk(renderer, tokenizer, dialogue, other_tokens(tokenizer, rng))
        turns = {step.index: step.turn for step in walked.steps}
        same = rendered_anew(renderer, dialogue.messages, turns, dialogue.tools)
        assert same.ids_S.tolist() == walked.ids and same.num_from_text == 0
        without = rendered_anew(renderer, dialogue.messages, {}, dialogue.tools)
        assert without.ids_S.tolist() == renderer.rendered_ids(dialogue.messages, dialogue.tools)
        assert without.num_from_text == len(turns)
        kept = {index: turn for index, turn in turns.items() if rng.random() < 0.5}
        made = rendered_anew(renderer, dialogue.messages, kept, dialogue.tools)
        assert made.num_from_text == len(turns) - len(kept)
        check_kept(made, kept.values())
        assert [m["role"] for m in dialogue.messages].count(ASSISTANT) == len(turns)


# ---- chat templates that no family has, and none


def converse(talk: Talk, said: list[list[Message]], answers: list[str], *, cut: bool = False) -> None:
    for new, answer in zip(said, answers, strict=True):
        talk.hear(*new)
        talk.say_text(answer, cut=cut)


texts = st.text(alphabet="ab <>/|\n", max_size=6)
batches = st.lists(st.builds(user, texts), min_size=1, max_size=2)


@settings(deadline=None, max_examples=40)
@given(said=st.lists(batches, min_size=1, max_size=4), words=st.data(), cut=st.booleans())
@pytest.mark.parametrize("template", [CHATML, STRIPPING, FORGETFUL])
def test_tokens_are_those_of_the_whole_conversation(
    template: str, said: list[list[Message]], words: st.DataObject, cut: bool
) -> None:
    """The end of a turn is there once, whether the model has sampled it or was cut before it."""
    tokenizer = make_tokenizer(template)
    answers = words.draw(st.lists(st.text("ab", min_size=1), min_size=len(said), max_size=len(said)))
    talk = make_talk(tokenizer)
    converse(talk, said, answers, cut=cut)
    whole = tokenizer.apply_chat_template(talk.messages, tokenize=False)
    # The last turn's end is followed by a newline that nobody has asked for yet.
    whole = whole.removesuffix("\n") if not cut else whole.removesuffix(END + "\n")
    assert talk.text == whole


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("tokenizer", "first", "sampled", "text"),
    [
        # White space that a template strips stays as it was sampled.
        (
            make_tokenizer(STRIPPING),
            [user("x")],
            " a \n",
            f"{START}user\nx{END}\n{START}assistant\n a \n{END}\n"
            f"{START}user\ny{END}\n{START}assistant\nb{END}",
        ),
        # No generation prompt.
        (make_tokenizer(SPACED), [user("x")], "a", f"[INST] x [/INST]a{END}[INST] y [/INST]b{END}"),
        # Without a template messages are their text, joined where the tokenizer has no newline.
        (make_tokenizer(None), [SYSTEM, user("x")], "a", f"s\nxa{END}\nyb{END}"),
        (make_tokenizer(None, newline=False), [SYSTEM, user("x")], "a", f"sxa{END}yb{END}"),
    ],
    ids=["strips", "no generation prompt", "plain", "no newline"],
)
def test_tokens_by_hand(
    tokenizer: PreTrainedTokenizerFast, first: list[Message], sampled: str, text: str
) -> None:
    talk = make_talk(tokenizer)
    converse(talk, [first, [user("y")]], [sampled, "b"])
    assert talk.text == text


def test_another_token_that_ended_a_turn_stays_beside_the_templates_own() -> None:
    """Some models know two: what was sampled is kept, and the template's own is given."""
    tokenizer = make_tokenizer(CHATML)
    talk = make_talk(tokenizer)
    talk.hear(user("x"))
    turn = turn_of(tokenizer, "a!")
    talk.say(turn.ids_T.tolist())
    talk.hear(user("y"))
    assert "assistant\na!<|im_end|>\n<|im_start|>user\ny" in talk.text


def test_a_turn_that_was_cut_has_not_sampled_its_end() -> None:
    """Even where its last token is what the template ends turns with."""
    talk = make_talk(make_tokenizer("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"))
    converse(talk, [[user("x")], [user("y")]], ["a\n", "b"], cut=True)
    assert talk.text == "x\na\n\ny\nb"


@pytest.mark.parametrize(
    ("template", "answer", "problem"),
    [
        (FORGETFUL, "hm</think>a", "what the model wrote in an earlier turn"),
        (LAST_ONLY, "a", "does not only append: before messages"),
        (NUMBERED, "a", "does not only append: before messages"),
        (CHATML.replace("m['content']", "m['content'] + m['content']"), "a", "2 times"),
        (CHATML.replace("m['content']", "m['role']"), "a", "0 times"),
    ],
)
def test_a_template_that_rewrites_is_refused(template: str, answer: str, problem: str) -> None:
    talk = make_talk(make_tokenizer(template))
    with pytest.raises(ValueError, match=problem):
        converse(talk, [[user("x")], [user("y")]], [answer, "b"])


def test_examples_of_answers_may_come_before_the_first_turn() -> None:
    tokenizer = make_tokenizer(CHATML)
    talk = make_talk(tokenizer)
    converse(talk, [[user("1+1"), assistant("2"), user("2+2")], [user("2+3")]], ["4", "5"])
    assert talk.text == tokenizer.apply_chat_template(talk.messages, tokenize=False)[:-1]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (PICKY, "refuses these messages: no system role"),
        # What is no string cannot be joined to one.
        (CHATML.replace("m['content']", "5"), "refuses these messages: TypeError"),
    ],
)
def test_what_a_template_refuses_is_said(template: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_talk(make_tokenizer(template)).hear({"role": "system", "content": "be good"}, user("x"))


@pytest.mark.parametrize("template", [None, CHATML, "qwen3"])
def test_a_string_is_the_prompt_of_a_single_turn(template: str | None) -> None:
    tokenizer = family_tokenizer(template) if template in TEMPLATES else make_tokenizer(template)
    talk = make_talk(tokenizer)
    prompt = PromptEncoder(tokenizer, chat_template=template is not None).encode("2 + 2 =")
    assert talk.hear(user("2 + 2 =")) == prompt.tolist()


def test_arguments_of_the_template_reach_it() -> None:
    tokenizer = make_tokenizer("{{ mode }}" + CHATML)
    prompt = PromptEncoder(tokenizer, chat_template=True, template_arguments={"mode": "b"}).encode("x")
    talk = Talk(TemplateRenderer(tokenizer, {"mode": "b"}), tokenizer)
    assert talk.hear(user("x")) == prompt.tolist() and talk.text.startswith("b<|im_start|>")


def test_a_tokenizer_without_the_template_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template = true"):
        TemplateRenderer(make_tokenizer(None))


@pytest.mark.parametrize("template", [None, CHATML, "deepseek-v3"])
def test_tools_that_the_model_could_not_be_told_of_are_refused(template: str | None) -> None:
    talk = family_talk(template) if template in TEMPLATES else make_talk(make_tokenizer(template))
    talk.tools = TOOLS
    with pytest.raises(ValueError, match="'set_value' was given, but"):
        talk.hear(user("x"))


HERMES = (
    "{% for t in tools or [] %}{{ (t | tojson) + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' '
    "+ (c.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template of a model of its own kind: tool calls as Hermes has them, and no reasoning."""


def test_tool_calls_by_a_template_that_no_family_has() -> None:
    """The turn's own tokens stay, though the template would write its call in another way."""
    tokenizer = family_tokenizer("qwen3", HERMES)
    talk = Talk(TemplateRenderer(tokenizer), tokenizer, TOOLS)
    first = talk.hear(user("x"))
    assert '"set_value"' in tokenizer.decode(first)
    written = '<tool_call>{"arguments":{"name":"ä","final":true},"name":"set_value"}</tool_call>'
    parsed = talk.say_text("Well. " + written)
    assert [(one.name, one.arguments) for one in parsed.tool_calls] == [
        ("set_value", {"name": "ä", "final": True})
    ]
    assert parsed.text.strip() == "Well." and not parsed.broken_tool_calls
    talk.hear(result(parsed.tool_calls[0].id, "done"))
    assert talk.text.endswith(
        f"Well. {written}<|im_end|>\n<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.say_text("ok")
    talk.hear(user("more"))
    assert talk.text.count("<tool_call>") == 1


@pytest.mark.parametrize("renderer", [PlainRenderer, TemplateRenderer])
def test_an_answer_from_text_ends_as_turns_end(renderer: type[PlainRenderer | TemplateRenderer]) -> None:
    tokenizer = make_tokenizer(CHATML)
    ids = renderer(tokenizer).answer_ids((user("x"),), assistant("abc"))
    assert ids.dtype == np.int32 and tokenizer.decode(ids.tolist()) == f"abc{END}"
