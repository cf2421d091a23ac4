"""Whether two mathematical answers are equal, by math-verify. For the processes of verifiers only.

math-verify's own limits rest on signal.alarm: they cannot stop one long C call, such as raising an integer to
an integer power. So nothing here has a limit; ``forgeasync.scoring.worker`` kills the process that takes too
long.
"""

import itertools
import logging
import re
from typing import Any, Literal

from math_verify import parse

from forgeasync.rollouts import Score
from forgeasync.scoring.final_answer import (
    after_reasoning,
    ends_in_variable,
    ends_unfinished,
    final_special_number,
    keep_last_letter,
    last_boxed,
    plain_notation,
    scientific_as_product,
)
from forgeasync.scoring.math_repairs import equal, repair
from forgeasync.scoring.verifier import MathProblem

MAX_UNBOXED_CHARS = 2000
"""Length of the end of a response that is searched for an answer if the response has no box."""

_GSM8K_MARK = "####"
# People write "#4" for 4, in which math-verify finds no number. The hash after a letter or digit is part of
# something else. Repeats are bounded: hostile text is long.
_SIGN = r"(?<![\w#\\])\\?#{1,6}[ \t]{0,4}(?=[-+]?(?:\\?\$)?[-+.]?\d|\\[dt]?frac|\\sqrt)"
_NUMBER_SIGN = re.compile(_SIGN)
# In a sentence "#4" names something ("rule #4"), so there only the last word or the first of a line counts.
_FINAL_NUMBER_SIGN = re.compile(rf"^[ \t]{{0,8}}{_SIGN}|{_SIGN}(?=\S{{1,80}}\s{{0,20}}\Z)", re.MULTILINE)


def _parse_boxed(content: str, *, is_reference: bool = False) -> list[Any]:
    # The box is math-verify's marker for "all of this is the answer". A box that it cannot read is no reason
    # to look for another number in it; references are not guesses.
    mode: Literal["any_match", "first_match"] = "any_match" if is_reference else "first_match"
    content = _NUMBER_SIGN.sub("", content)
    return parse(f"\\boxed{{{content}}}", parsing_timeout=None, extraction_mode=mode)


def _reference_content(answer: str) -> str:
    boxed = last_boxed(answer)
    # GSM8K's references are a solution, "####" and the result.
    content = (answer.rpartition(_GSM8K_MARK)[2] if boxed is None else boxed).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        wrapped = content.startswith(opening) and content.endswith(closing)
        if wrapped and len(content) > len(opening) + len(closing):
            content = content[len(opening) : -len(closing)].strip()
            break
    return plain_notation(content)


def judge_answer(response: str, answer: str) -> Score:
    """1.0, and correct, where the final answer of ``response`` equals ``answer``; else 0.0. Has no limit."""
    reference = _reference_content(answer)
    stated = after_reasoning(response)
    boxed = last_boxed(stated)
    # The tail holds the final answer, and math-verify's patterns backtrack badly on long text.
    tail = stated[-MAX_UNBOXED_CHARS:]
    if boxed is None and ends_unfinished(tail):
        boxed = ""
    content = final_special_number(tail) if boxed is None else boxed
    if content is None:
        tail = scientific_as_product(_FINAL_NUMBER_SIGN.sub("", tail))
        found = parse(tail, parsing_timeout=None)
    else:
        content = plain_notation(content)
        if ends_in_variable(reference):
            content = keep_last_letter(content)
        found = _parse_boxed(content)
    if ends_in_variable(reference):
        reference = keep_last_letter(reference)
    references = _parse_boxed(reference, is_reference=True)
    is_correct = any(equal(one, other) for one, other in itertools.product(references, found))
    return Score(float(is_correct), is_correct, has_answer=bool(found))


_WARM_UP = (
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    ("the answer is 4", "4"),
    (r"\boxed{5}", "4"),
    (r"\boxed{x^2 - \sqrt{2}}", r"(x+1)^2"),
    (r"\boxed{\{1, 2\}}", "[1, 2)"),
    (r"\boxed{1.5\sin 1}", r"\sqrt{2}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\boxed{x = 1}", "x = 2"),
)


class MathVerifier:
    """Verifies final answers against the references of their tasks."""

    def __init__(self) -> None:
        # It would warn about the absent time limits that processes of verifiers replace.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # Builds math-verify's patterns and parser tables, and imports what sympy imports late, so that no
        # answer pays for them.
        repair()
        for response, answer in _WARM_UP:
            judge_answer(response, answer)

    def load(self, problem: MathProblem) -> str:
        """The reference: nothing has to be prepared."""
        return problem.answer

    def score(self, answer: str, response: str) -> Score:
        """1.0, and correct, where the final answer of ``response`` equals ``answer``; else 0.0."""
        return judge_answer(response, answer)
