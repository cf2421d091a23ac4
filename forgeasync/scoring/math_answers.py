"""Whether two mathematical answers are equal, by math-verify. For the processes of verifiers only.

math-verify's own limits rest on signal.alarm: they cannot stop one long C call, such as raising an integer to
an integer power. So nothing here has a limit; ``forgeasync.scoring.worker`` kills the process that takes too
long.
"""

import logging
import re
from typing import Any

from math_verify import parse, verify

from forgeasync.rollouts.score import Score
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
_BOX_TOKENS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The content of the complete ``\boxed{...}`` that starts last in ``text``; None without one."""
    # One pass with a stack: matching braces anew from every box would be quadratic in hostile text.
    open_braces: list[int | None] = []
    best_start, best = -1, None
    for token in _BOX_TOKENS.finditer(text):
        symbol = token.group()
        if symbol.startswith("\\boxed"):
            open_braces.append(token.end())
        elif symbol == "{":
            open_braces.append(None)
        elif symbol == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and start > best_start:
                best_start, best = start, text[start : token.start()]
    return best


def _parse_boxed(content: str) -> list[Any]:
    # The box is math-verify's marker for "all of this is the answer".
    return parse(f"\\boxed{{{_NUMBER_SIGN.sub('', content)}}}", parsing_timeout=None)


def _parse_reference(answer: str) -> list[Any]:
    boxed = last_boxed(answer)
    # GSM8K's references are a solution, "####" and the result.
    content = (answer.rpartition(_GSM8K_MARK)[2] if boxed is None else boxed).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        wrapped = content.startswith(opening) and content.endswith(closing)
        if wrapped and len(content) > len(opening) + len(closing):
            content = content[len(opening) : -len(closing)].strip()
            break
    return _parse_boxed(content)


def judge(response: str, answer: str) -> Score:
    """1.0, and correct, where the final answer of ``response`` equals ``answer``; else 0.0. Has no limit."""
    boxed = last_boxed(response)
    if boxed is None:
        # The tail holds the final answer, and math-verify's patterns backtrack badly on long text.
        tail = _FINAL_NUMBER_SIGN.sub("", response[-MAX_UNBOXED_CHARS:])
        found = parse(tail, parsing_timeout=None)
    else:
        found = _parse_boxed(boxed)
    is_correct = bool(verify(_parse_reference(answer), found, timeout_seconds=None))
    return Score(float(is_correct), is_correct, has_answer=bool(found))


_WARM_UP = (
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    ("the answer is 4", "4"),
    (r"\boxed{5}", "4"),
    (r"\boxed{x^2 - \sqrt{2}}", r"(x+1)^2"),
    (r"\boxed{\{1, 2\}}", "[1, 2)"),
)


class MathVerifier:
    """Verifies final answers against the references of their tasks."""

    def __init__(self) -> None:
        # It would warn about the absent time limits that processes of verifiers replace.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # Builds math-verify's patterns and parser tables, and imports what sympy imports late, so that no
        # answer pays for them.
        for response, answer in _WARM_UP:
            judge(response, answer)

    def load(self, problem: MathProblem) -> str:
        """The reference: nothing has to be prepared."""
        return problem.answer

    def score(self, answer: str, response: str) -> Score:
        """1.0, and correct, where the final answer of ``response`` equals ``answer``; else 0.0."""
        return judge(response, answer)
