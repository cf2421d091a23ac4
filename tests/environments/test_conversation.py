"""What messages add to a trajectory, against the whole conversation as transformers renders it."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from forgeasync.environments.agent import EpisodeAgent
from forgeasync.environments.conversation import MessageRenderer
from forgeasync.environments.environment import ContextFull, Turn
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.rollout import FinishReason
from tests.support.chat import (
    CHATML,
    END,
    FORGETFUL,
    LAST_ONLY,
    NUMBERED,
    PICKY,
    SPACED,
    STRIPPING,
    ScriptedModel,
    make_tokenizer,
)


def make_agent(
    model: ScriptedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_turn_tokens: int = 1000,
    max_context_length: int = 4000,
) -> EpisodeAgent:
    return EpisodeAgent(
        model,
        MessageRenderer(tokenizer, chat_template=tokenizer.chat_template is not None),
        max_turn_tokens=max_turn_tokens,
        max_context_length=max_context_length,
    )


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def converse(
    agent: EpisodeAgent, said: list[list[dict[str, str]]]
) -> tuple[list[dict[str, str]], Turn]:
    """One turn for each batch of new messages; all messages, the last turn included."""
    messages: list[dict[str, str]] = []
    for new in said:
        messages += new
        turn = await agent.respond(messages)
        messages.append(turn.message)
    return messages, turn


texts = st.text(alphabet="ab <>/|\n", max_size=6)
batches = st.lists(st.builds(user, texts), min_size=1, max_size=2)


@settings(deadline=None, max_examples=60)
@given(said=st.lists(batches, min_size=1, max_size=4), words=st.data(), cut=st.booleans())
@pytest.mark.parametrize("template", [CHATML, STRIPPING])
def test_tokens_are_those_of_the_whole_conversation(
    template: str, said: list[list[dict[str, str]]], words: st.DataObject, cut: bool
) -> None:
    """The end of a turn is there once, whether the model has sampled it or was cut before it."""
    tokenizer = make_tokenizer(template)
    answers = words.draw(st.lists(st.text("ab", min_size=1), min_size=len(said), max_size=len(said)))
    model = ScriptedModel(tokenizer, answers, cut=cut)
    messages, _ = asyncio.run(converse(make_agent(model, tokenizer), said))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    # The last turn's end is followed by a newline that nobody has asked for yet.
    whole = whole.removesuffix("\n") if not cut else whole.removesuffix(END + "\n")
    assert tokenizer.decode(model.ids) == whole


def test_white_space_that_a_template_strips_stays_as_it_was_sampled() -> None:
    tokenizer = make_tokenizer(STRIPPING)
    model = ScriptedModel(tokenizer, [" a \n", "b"])
    asyncio.run(converse(make_agent(model, tokenizer), [[user("x")], [user("y")]]))
    assert "assistant\n a \n<|im_end|>\n<|im_start|>user\ny" in tokenizer.decode(model.ids)


def test_a_template_without_generation_prompt() -> None:
    tokenizer = make_tokenizer(SPACED)
    model = ScriptedModel(tokenizer, ["a", "b"])
    asyncio.run(converse(make_agent(model, tokenizer), [[user("x")], [user("y")]]))
    assert tokenizer.decode(model.ids) == f"[INST] x [/INST]a{END}[INST] y [/INST]b{END}"


def test_another_token_that_ended_a_turn_stays_beside_the_templates_own() -> None:
    """Some models know two: what was sampled is kept, and the template's own is given."""
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedModel(tokenizer, ["a", "b"])
    tokenizer.eos_token = "!"
    asyncio.run(converse(make_agent(model, tokenizer), [[user("x")], [user("y")]]))
    assert "assistant\na!<|im_end|>\n<|im_start|>user\ny" in tokenizer.decode(model.ids)


def test_a_turn_that_was_cut_has_not_sampled_its_end() -> None:
    """Even where its last token is what the template ends turns with."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    model = ScriptedModel(tokenizer, ["a\n", "b"], cut=True)
    asyncio.run(converse(make_agent(model, tokenizer), [[user("x")], [user("y")]]))
    assert tokenizer.decode(model.ids) == "x\na\n\ny\nb"


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
    tokenizer = make_tokenizer(template)
    agent = make_agent(ScriptedModel(tokenizer, [answer, "b"]), tokenizer)
    with pytest.raises(ValueError, match=problem):
        asyncio.run(converse(agent, [[user("x")], [user("y")]]))


def test_a_template_that_forgets_reasoning_serves_turns_without_any() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    model = ScriptedModel(tokenizer, ["a", "b"])
    messages, _ = asyncio.run(converse(make_agent(model, tokenizer), [[user("x")], [user("y")]]))
    assert tokenizer.decode(model.ids) == tokenizer.apply_chat_template(messages, tokenize=False)[:-1]


def test_what_a_template_refuses_is_said() -> None:
    tokenizer = make_tokenizer(PICKY)
    agent = make_agent(ScriptedModel(tokenizer, ["a"]), tokenizer)
    with pytest.raises(ValueError, match=r"refuses these messages: no system role"):
        asyncio.run(agent.respond([{"role": "system", "content": "be good"}, user("x")]))


def test_examples_of_answers_may_be_given_before_the_first_turn() -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedModel(tokenizer, ["4", "5"])
    shots = [user("1+1"), {"role": "assistant", "content": "2"}]
    messages, _ = asyncio.run(converse(make_agent(model, tokenizer), [[*shots, user("2+2")], [user("2+3")]]))
    assert tokenizer.decode(model.ids) == tokenizer.apply_chat_template(messages, tokenize=False)[:-1]


@pytest.mark.parametrize(("newline", "between"), [(True, "\n"), (False, "")])
def test_without_a_template_messages_are_their_text(newline: bool, between: str) -> None:
    tokenizer = make_tokenizer(None, newline=newline)
    model = ScriptedModel(tokenizer, ["a", "b"])
    said = [[{"role": "system", "content": "s"}, user("x")], [user("y")]]
    asyncio.run(converse(make_agent(model, tokenizer), said))
    assert tokenizer.decode(model.ids) == f"s{between}xa{END}{between}yb{END}"


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_string_is_the_prompt_of_a_single_turn(template: str | None) -> None:
    tokenizer = make_tokenizer(template)
    model = ScriptedModel(tokenizer, ["a"])
    asyncio.run(make_agent(model, tokenizer).respond("2 + 2 ="))
    prompt = PromptEncoder(tokenizer, chat_template=template is not None).encode("2 + 2 =")
    assert model.ids[: len(prompt)] == prompt.tolist()


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (
            [user("z"), {"role": "assistant", "content": "a"}, user("y")],
            r"messages\[0\] is .*'z'.* has .*'x'",
        ),
        ([user("x"), {"role": "assistant", "content": "b"}, user("y")], r"messages\[1\] is"),
        ([user("x"), {"role": "assistant", "content": "a"}], "none is new"),
        ([user("x")], "none is new"),
        ("another", r"messages\[0\] is"),
        (
            [user("x"), {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "c"}],
            r"messages\[2\], the last one, has role 'assistant'",
        ),
        (
            [user("x"), {"role": "assistant", "content": "a"}, {"role": "user"}],
            r"messages\[2\]: its 'content'",
        ),
        ([user("x"), {"role": "assistant", "content": "a"}, "y"], r"messages\[2\] is 'y'; must read"),
        (user("x"), "must be a list of messages"),
        (None, "must be a list of messages"),
    ],
)
def test_messages_that_do_not_continue_are_named_and_change_nothing(later: object, problem: str) -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedModel(tokenizer, ["a", "b"])

    async def go() -> None:
        agent = make_agent(model, tokenizer)
        messages = [user("x")]
        first = await agent.respond(messages)
        # What was said is what was passed then, whatever becomes of these objects.
        messages[0]["content"] = "forged"
        before = list(model.ids)
        with pytest.raises(ValueError, match=problem):
            await agent.respond(later)
        assert model.ids == before
        await agent.respond([user("x"), first.message, user("y")])

    asyncio.run(go())


def test_turns_are_bounded_by_their_own_limit_and_by_the_room_that_is_left() -> None:
    """By hand: one token a character, and one for the end of a turn that is not cut."""
    tokenizer = make_tokenizer(None)
    model = ScriptedModel(tokenizer, ["abc", "abcd", "ab"])

    async def go() -> None:
        agent = make_agent(model, tokenizer, max_turn_tokens=6, max_context_length=18)
        messages, turn = await converse(agent, [[user("123")], [user("45")]])
        assert model.max_tokens == [6, 6] and turn.num_tokens == 5
        # 3 + 4 + (1 + 2) + 5 = 15 tokens so far.
        with pytest.raises(ContextFull, match=r"18 tokens before turn 3 .* model.max_context_length = 18"):
            await agent.respond([*messages, user("67")])
        # A shorter message still has room for one token.
        await agent.respond([*messages, user("6")])
        assert model.max_tokens == [6, 6, 1] and agent.num_turns == 3

    asyncio.run(go())


def test_one_turn_after_the_other() -> None:
    tokenizer = make_tokenizer(CHATML)

    class Slow(ScriptedModel):
        async def __call__(self, given_ids: np.ndarray, max_tokens: int) -> object:
            await asyncio.sleep(0.01)
            return await super().__call__(given_ids, max_tokens)

    async def go() -> None:
        agent = make_agent(Slow(tokenizer, ["a"]), tokenizer)
        first = asyncio.create_task(agent.respond("x"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="await each turn before the next call"):
            await agent.respond("x")
        assert (await first).finish_reason is FinishReason.STOP

    asyncio.run(go())


def test_a_prompt_without_tokens_is_refused() -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(ValueError, match="has no tokens"):
        asyncio.run(make_agent(ScriptedModel(tokenizer, ["a"]), tokenizer).respond(""))


def test_a_tokenizer_without_the_template_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template = true"):
        MessageRenderer(make_tokenizer(None), chat_template=True)
