"""What a run says of the first operator that differs, if its generators do not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgeasync.controller import first_different_operator
from forgeasync.testing import VirtualTime

FILE = Path("run/bad_steps/operators-of-version-00000003.npz")
NAMED = "the first operator that differs is lm_head (largest difference 3e-08)"


async def never(_: Path) -> str:
    await asyncio.Event().wait()
    return "nothing"


async def names_it(file: Path) -> str:
    assert file == FILE
    return NAMED


async def has_other_weights(_: Path) -> str:
    raise ValueError("the engine has version 2; must be 3")


async def calls(make: Callable[[], Awaitable[str]]) -> str:
    return await make()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([never, names_it], NAMED),
        ([has_other_weights, names_it], NAMED),
        (
            [never, never],
            "(comparing operators took longer than 7 s; timeouts.generate_s sets this limit)",
        ),
        ([never, has_other_weights], "(the engine has version 2; must be 3)"),
        ([], "(there is none)"),
    ],
)
def test_a_generator_that_does_not_answer_is_not_waited_for(
    answers: list[Callable[[Path], Awaitable[str]]], words: str
) -> None:
    replicas = [
        SimpleNamespace(
            call=calls, actor=SimpleNamespace(first_different_operator=SimpleNamespace(call_one=answer))
        )
        for answer in answers
    ]
    time = VirtualTime()
    said = time.run(first_different_operator(replicas, FILE, limit_s=7.0))  # type: ignore[arg-type]
    assert time.now_s() == 7.0 * answers.count(never)
    if words is NAMED:
        assert said == NAMED
    else:
        assert said == f"no generator could say which operator differs {words}; the trainer's are in {FILE}"
