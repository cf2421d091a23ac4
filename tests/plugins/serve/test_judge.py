"""What a judge is asked, and which of its answers count."""

import asyncio
import itertools
from typing import Any

import pytest

from forgeasync.environments import ContextFull, Turn
from forgeasync.plugins.serve import MAX_CHARACTERS, exchanges, judge_session, read_answer
from forgeasync.testing import ScriptedAgent, scripted_turn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ours(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "num_tokens": 3}


def test_which_replies_are_judged() -> None:
    """Those of ours that the person has answered, and those that branches share only once."""
    shared = [user("hi"), ours("hello"), user("2 + 2?")]
    theirs = {"role": "assistant", "content": "written by the client"}
    tool = {"role": "tool", "content": "1"}
    branches = [
        [*shared, ours("5"), user("no"), ours("4")],
        [*shared, ours("4"), user("thanks"), theirs, user("more"), ours("?"), tool],
    ]
    assert exchanges(branches) == [("hello", "2 + 2?"), ("5", "no"), ("4", "thanks")]


@pytest.mark.parametrize(
    ("text", "value"),
    [("good", 1.0), ("bad", 0.0), (" Good.\n", 1.0), ("BAD", 0.0)]
    + [(text, None) for text in ("", "good or bad", "goodbad", "not bad", "1", "good" + " " * 40, "gut")],
)
def test_which_answers_count(text: str, value: float | None) -> None:
    assert read_answer(text) == value


def test_a_judge_rates_each_reply() -> None:
    replies = [[user(text), ours(number)] for text, number in zip("abcd", "1234", strict=True)]
    branch = [*itertools.chain.from_iterable(replies), user("e")]

    class Judge(ScriptedAgent):
        async def respond(self, *arguments: Any, **options: Any) -> Turn:
            turn = await super().respond(*arguments, **options)
            if turn.text == "full":
                raise ContextFull
            return turn

    judge = Judge(scripted_turn("good"), scripted_turn("well"), scripted_turn("full"), scripted_turn("bad"))
    assert asyncio.run(judge_session(judge, [branch])) == [1.0, None, None, 0.0]
    assert "<reply>\n2\n</reply>\n\n<next_message>\nc\n</next_message>" in judge.heard[1][0]["content"]
    assert asyncio.run(judge_session(Judge(), [branch[:2]])) == []


def test_long_texts_are_cut_in_the_middle() -> None:
    judge = ScriptedAgent(scripted_turn("good"))
    reply = "x" * MAX_CHARACTERS + "y" * MAX_CHARACTERS
    asyncio.run(judge_session(judge, [[user("a"), ours(reply), user("b" * 10 * MAX_CHARACTERS)]]))
    content = judge.heard[0][0]["content"]
    assert len(content) < 2 * MAX_CHARACTERS + 1000 and "x\n[...]\ny" in content
