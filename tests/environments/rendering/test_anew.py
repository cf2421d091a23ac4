"""Histories that were changed: what the model said keeps its tokens, everything else is made from text."""

import random

import pytest

from forgeasync.environments import (
    ASSISTANT,
    TEXTS,
    TOOLS,
    FamilyRenderer,
    Message,
    MessageRenderer,
    PlainRenderer,
    RenderedAnew,
    TemplateRenderer,
    assistant,
    other_tokens,
    random_dialogue,
    rendered_anew,
    user,
    walk,
)
from forgeasync.rollouts import SampledTurn
from tests.environments.rendering.test_family import ABILITIES, make_renderer
from tests.support.chat import CHATML, make_tokenizer
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.conversations import Talk


def talked(talk: Talk, *answers: str) -> None:
    for number, answer in enumerate(answers):
        talk.hear(user(f"question {number}"))
        talk.say_text(answer)


def known(talk: Talk) -> dict[int, SampledTurn]:
    return dict(talk.conversation.turns)


def with_changed_question(talk: Talk) -> tuple[Message, ...]:
    return (user("another"), *talk.messages[1:], user("now?"))


def check_kept(made: RenderedAnew, turns: dict[int, SampledTurn]) -> None:
    ids = made.ids_S.tolist()
    assert set(made.starts) <= set(turns)
    for index, start in made.starts.items():
        expected = turns[index].ids_T.tolist()
        assert ids[start : start + len(expected)] == expected


def renderers() -> list[tuple[str, MessageRenderer, Talk]]:
    char = make_tokenizer(CHATML)
    plain = make_tokenizer(None)
    bpe = family_tokenizer("qwen3")
    made = [
        ("plain", PlainRenderer(plain), plain),
        ("template", TemplateRenderer(char), char),
        ("family", FamilyRenderer(bpe, "qwen3"), bpe),
    ]
    return [(name, renderer, Talk(renderer, tokenizer)) for name, renderer, tokenizer in made]


@pytest.mark.parametrize("name", ["plain", "template", "family"])
def test_turns_keep_their_tokens_where_an_earlier_message_was_changed(name: str) -> None:
    renderer, talk = next((renderer, talk) for one, renderer, talk in renderers() if one == name)
    talked(talk, "a b", "c", "d")
    messages = with_changed_question(talk)
    made = rendered_anew(renderer, messages, known(talk))
    assert made.num_from_text == 0 and set(made.starts) == {1, 3, 5}
    check_kept(made, known(talk))
    text = talk.tokenizer.decode(made.ids_S.tolist(), skip_special_tokens=False)
    assert "another" in text and "question 0" not in text and "question 1" in text
    if name == "template":
        assert text == talk.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize("name", ["plain", "template", "family"])
def test_what_others_wrote_is_made_from_text(name: str) -> None:
    """Before the model's first turn, between two, and after the last."""
    renderer, talk = next((renderer, talk) for one, renderer, talk in renderers() if one == name)
    talked(talk, "a", "b", "c", "d")
    turns = known(talk)
    messages = list(with_changed_question(talk))
    for index in (1, 5):
        messages[index] = assistant("forged")
        del turns[index]
    made = rendered_anew(renderer, tuple(messages), turns)
    assert made.num_from_text == 2 and set(made.starts) == {3, 7}
    check_kept(made, turns)
    text = talk.tokenizer.decode(made.ids_S.tolist(), skip_special_tokens=False)
    assert text.count("forged") == 2 and text.index("forged") < text.index("question 1")
    if name == "template":
        assert text == talk.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def test_without_any_turn_of_the_model_it_is_the_first_prompt() -> None:
    renderer = make_renderer("qwen3")
    messages = (user("x"), assistant("forged"), user("y"))
    made = rendered_anew(renderer, messages, {})
    assert made.ids_S.tolist() == renderer.rendered_ids(messages, ())
    assert (made.num_from_text, dict(made.starts)) == (1, {})


def test_a_turn_that_ended_while_it_was_reasoning_is_made_from_text() -> None:
    """Only that one: the turns around it keep their tokens."""
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talked(talk, "<think>\nyes\n</think>\n\na")
    talk.hear(user("question 1"))
    talk.say_text("<think>\nhm")
    turns = known(talk)
    messages = (*talk.messages, user("go on"), assistant("later"), user("now?"))
    later = talk.tokenizer("later<|im_end|>", add_special_tokens=False)["input_ids"]
    other = Talk(talk.renderer, talk.tokenizer)
    other.hear(user("question 2"))
    other.say(later)
    turns[5] = other.conversation.turns[1]
    made = rendered_anew(talk.renderer, messages, turns)
    assert made.num_from_text == 1 and set(made.starts) == {1, 5}
    check_kept(made, turns)
    text = talk.tokenizer.decode(made.ids_S.tolist(), skip_special_tokens=False)
    assert "<think>\nhm\n</think>\n\n<|im_end|>" in text


def test_two_messages_of_others_in_a_row_are_rendered_with_all_before_them() -> None:
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"))
    talked(talk, "a", "b")
    turns = known(talk)
    messages = (*talk.messages[:2], assistant("forged"), *talk.messages[2:], user("now?"))
    moved = {1: turns[1], 4: turns[3]}
    made = rendered_anew(talk.renderer, messages, moved)
    assert made.num_from_text == 2 and set(made.starts) == {4}
    check_kept(made, moved)


@pytest.mark.parametrize("family", TEMPLATES)
def test_random_histories(family: str) -> None:
    """Some turns are forged; with none forged, the path is the one that was walked."""
    tokenizer, renderer = family_tokenizer(family), make_renderer(family)
    for seed in range(15):
        rng = random.Random(seed)
        dialogue = random_dialogue(rng, ABILITIES[family], TEXTS)
        walked = walk(renderer, tokenizer, dialogue, other_tokens(tokenizer, rng))
        turns = {step.index: step.turn for step in walked.steps}
        same = rendered_anew(renderer, dialogue.messages, turns, dialogue.tools)
        assert same.ids_S.tolist() == walked.ids and same.num_from_text == 0
        kept = {index: turn for index, turn in turns.items() if rng.random() < 0.5}
        made = rendered_anew(renderer, dialogue.messages, kept, dialogue.tools)
        assert set(made.starts) == set(kept)
        assert made.num_from_text == len(turns) - len(kept)
        check_kept(made, kept)
        assert [m["role"] for m in dialogue.messages].count(ASSISTANT) == len(turns)


def test_tools_are_told_of_once() -> None:
    talk = Talk(make_renderer("qwen3"), family_tokenizer("qwen3"), TOOLS)
    talked(talk, "a", "b")
    made = rendered_anew(talk.renderer, with_changed_question(talk), known(talk), TOOLS)
    assert talk.tokenizer.decode(made.ids_S.tolist()).count('"ping"') == 1
