"""What messages add to a path by a chat template or without one, against transformers' own rendering."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from forgeasync.environments import (
    TOOLS,
    Conversation,
    Message,
    PlainRenderer,
    TemplateRenderer,
    assistant,
    call,
    message_of,
    result,
    user,
)
from forgeasync.rollouts import PromptEncoder
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


def make_talk(tokenizer: PreTrainedTokenizerFast) -> Talk:
    template = tokenizer.chat_template is not None
    return Talk((TemplateRenderer if template else PlainRenderer)(tokenizer), tokenizer)


def converse(talk: Talk, said: list[list[Message]], answers: list[str], *, cut: bool = False) -> None:
    for new, answer in zip(said, answers, strict=True):
        talk.hear(*new)
        talk.say_text(answer, cut=cut)


texts = st.text(alphabet="ab <>/|\n", max_size=6)
batches = st.lists(st.builds(user, texts), min_size=1, max_size=2)


@settings(deadline=None, max_examples=40)
@given(said=st.lists(batches, min_size=1, max_size=4), words=st.data(), cut=st.booleans())
@pytest.mark.parametrize("template", [CHATML, STRIPPING])
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


@pytest.mark.parametrize(
    ("template", "said", "answers", "text"),
    [
        # White space that a template strips stays as it was sampled.
        (
            STRIPPING,
            [[user("x")], [user("y")]],
            [" a \n", "b"],
            f"{START}user\nx{END}\n{START}assistant\n a \n{END}\n"
            f"{START}user\ny{END}\n{START}assistant\nb{END}",
        ),
        # No generation prompt.
        (SPACED, [[user("x")], [user("y")]], ["a", "b"], f"[INST] x [/INST]a{END}[INST] y [/INST]b{END}"),
        # Without a template messages are their text.
        (
            None,
            [[{"role": "system", "content": "s"}, user("x")], [user("y")]],
            ["a", "b"],
            f"s\nxa{END}\nyb{END}",
        ),
    ],
)
def test_tokens_by_hand(
    template: str | None, said: list[list[Message]], answers: list[str], text: str
) -> None:
    talk = make_talk(make_tokenizer(template))
    converse(talk, said, answers)
    assert talk.text == text


def test_without_a_template_nor_a_newline_messages_are_joined() -> None:
    talk = make_talk(make_tokenizer(None, newline=False))
    converse(talk, [[{"role": "system", "content": "s"}, user("x")], [user("y")]], ["a", "b"])
    assert talk.text == f"sxa{END}yb{END}"


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


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # It forgets reasoning, and there is none.
        (FORGETFUL, [[user("x")], [user("y")]]),
        # Examples of answers before the first turn.
        (CHATML, [[user("1+1"), assistant("2"), user("2+2")], [user("2+3")]]),
    ],
)
def test_tokens_are_those_of_the_template(template: str, said: list[list[Message]]) -> None:
    tokenizer = make_tokenizer(template)
    talk = make_talk(tokenizer)
    converse(talk, said, ["4", "5"])
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


@pytest.mark.parametrize("template", [None, CHATML])
def test_tools_that_the_model_could_not_be_told_of_are_refused(template: str | None) -> None:
    talk = make_talk(make_tokenizer(template))
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


def test_a_message_of_a_turn_is_what_was_read_of_it() -> None:
    tokenizer = family_tokenizer("qwen3", HERMES)
    renderer = TemplateRenderer(tokenizer)
    said = assistant("", call("call_0_0", "ping"))
    ids = renderer.answer_ids((user("x"),), said, TOOLS).tolist()
    before = renderer.added_ids(Conversation(turns={}), (user("x"),), TOOLS).tolist()
    parsed = renderer.parse(before, turn_of(tokenizer, tokenizer.decode(ids)), TOOLS)
    assert message_of(parsed) == said
