"""Math rewards: which answers count, and that no expression can stall or break the verifier."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forgeasync.config import ScorerSection
from forgeasync.rollouts import Score
from forgeasync.scoring import MathProblem, MathVerifierChoice, VerifierPool, last_boxed, math_reward


@pytest.fixture(scope="module")
def impatient() -> Iterator[VerifierPool]:
    section = ScorerSection(num_workers=1, answer_limit_s=2.0, answer_memory_mib=256)
    pool = VerifierPool(MathVerifierChoice(), section)
    yield pool
    pool.close()


def verify(pool: VerifierPool, response: str, answer: str) -> Score:
    return pool.score(MathProblem(answer=answer), response)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So we get \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{\dfrac{2}{4}}", "1/2"),
        (r"\boxed{-3}", "-3"),
        (r"\boxed{1000}", "1,000"),
        (r"\boxed{1,000}", "1000"),
        (r"$\boxed{x^2+2x+1}$", "(x+1)^2"),
        (r"\boxed{42}", "$42$"),
        (r"\boxed{42}", "$$42$$"),
        (r"\boxed{\{1, 2\}}", r"\(\{2, 1\}\)"),
        (r"\boxed{7}", r"\boxed{7}"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"The final answer is $1$. I hope so. \boxed{2}", "2"),
        (r"\boxed{4 no, it is \boxed{5}", "5"),
        ("The answer is 42.", "42"),
        ("3 + 4 = 7, then 7 * 2 = 14", "14"),
        ("Final answer: -1,234", "-1234"),
        (r"hence $x = \frac{3}{4}$", "0.75"),
        ("the sum is 9\n" * 20_000 + "so the answer is 8", "8"),
    ],
)
def test_right_answers_score_one(response: str, answer: str) -> None:
    assert math_reward(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{41}", "42"),
        (r"\boxed{42} or rather \boxed{41}", "42"),
        (r"It is 42: \boxed{unknown}", "42"),
        (r"42 \boxed{}", "42"),
        (r"\boxed{3}", "-3"),
        (r"\boxed{1}", "1,000"),
        (r"\boxed{41, 42}", "42"),
        ("first 42, then 43", "42"),
        ("no number at all", "42"),
        ("", "42"),
        ("42", ""),
        (r"\boxed{5} and then it was cut: \boxed{6", "5"),
    ],
)
def test_wrong_answers_score_zero(response: str, answer: str) -> None:
    assert math_reward(response, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("#4", "4", 1.0),
        ("# 4", "4", 1.0),
        ("#### 4", "4", 1.0),
        ("####4", "4", 1.0),
        ("#### -1,234", "-1234", 1.0),
        ("#### $4", "4", 1.0),
        ("3 + 1 = 4\n#### 4", "4", 1.0),
        (r"\boxed{#4}", "4", 1.0),
        (r"\boxed{\#4}", "4", 1.0),
        (r"\boxed{#### 4}", "4", 1.0),
        (r"#### \frac{1}{2}", "0.5", 1.0),
        ("The answer is #4.", "4", 1.0),
        ("The answer is **#4**", "4", 1.0),
        ("4", "#4", 1.0),
        ("4", "#### 4", 1.0),
        ("1,000", "Half of 2000 is 2000 / 2 = 1000.\n#### 1,000", 1.0),
        (r"\frac{2}{3}", "From a = 3 follows a / 4.5.\n#### 2/3", 1.0),
        (r"\frac{2}{3}", "a=3\n#### 2/3", 1.0),
        # The hash is no sign, and no licence either.
        ("#5", "4", 0.0),
        (r"\boxed{#5}", "4", 0.0),
        ("#### 5", "4", 0.0),
        ("5", "4 + 1 = 5\n#### 4", 0.0),
        # Where "#4" names something, the number before it stays the answer.
        ("The answer is 8 (by rule #4 above)", "8", 1.0),
        ("## 3. Sum\n5 + 3 = 8", "8", 1.0),
    ],
)
def test_number_signs_before_a_number_mean_nothing(response: str, answer: str, reward: float) -> None:
    assert math_reward(response, answer) == reward


@pytest.mark.parametrize(
    "expression",
    [r"\Gamma(1000000000)", pytest.param(r"\prod_{k=1}^{1000000000} k", marks=pytest.mark.exhaustive)],
    ids=["gamma", "product"],
)
def test_endless_expressions_are_cut_off_and_counted(impatient: VerifierPool, expression: str) -> None:
    before = impatient.counts
    assert verify(impatient, f"\\boxed{{{expression}}}", "42") == Score(value=0.0, is_correct=False)
    after = impatient.counts
    assert after.num_timeouts == before.num_timeouts + 1
    assert verify(impatient, r"\boxed{42}", "42") == Score(value=1.0, is_correct=True)


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" + "(" * 20_000 + "42" + ")" * 20_000 + "}",
        "\\boxed{" * 150_000 + "42",
        "\\boxed{" + "{" * 5_000 + "42" + "}" * 5_000 + "}",
        "\\boxed{" + "1" * 1_000_000 + "}",
        "\\boxed{" + "1+" * 500_000 + "1}",
        "$" * 1_000_000,
        "\\frac" * 200_000,
        "answer: " * 130_000,
        "\x00\ud800\n" * 1000,
    ],
    ids=["nesting", "open boxes", "braces", "digits", "sum", "dollars", "fractions", "anchors", "surrogates"],
)
def test_monstrous_strings_score_zero(impatient: VerifierPool, response: str) -> None:
    assert not verify(impatient, response, "41").is_correct
    assert verify(impatient, r"\boxed{42}", "42").is_correct


def test_threads_get_their_own_answers() -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        pairs = [(f"\\boxed{{{i}}}", str(i if i % 3 else i + 1)) for i in range(60)]
        rewards = list(pool.map(lambda pair: math_reward(*pair), pairs))
    assert rewards == [1.0 if i % 3 else 0.0 for i in range(60)]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x=\boxed{3}}", "x={3}"),
        (r"\boxed{4 \text{ or } \boxed{3}}", r"4 \text{ or } {3}"),
        (r"\boxed{\boxed{1} \boxed{2}}", "{1} {2}"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", ""),
        (r"\boxed{1} \boxed{\frac{1}{2}", ""),
        (r"\boxed{1} \boxed{\boxed{", ""),
        (r"\boxed{1} \boxed", ""),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\fbox{5}", "5"),
        (r"\boxed 5.", "5"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{4}, no: \boxed\frac{1}{2} it is", r"\frac{1}{2}"),
        (r"} } \boxed{4}", "4"),
        (r"\boxed{5", ""),
        (r"\boxedtext{5}", None),
        ("none", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
