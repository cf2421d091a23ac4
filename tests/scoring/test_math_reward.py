"""Math rewards: which answers count, and that no expression can stall or break the verifier."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forgeasync.config import ScorerSection
from forgeasync.rollouts import Score
from forgeasync.scoring import MathProblem, MathVerifierChoice, VerifierPool, math_reward


@pytest.fixture(scope="module")
def impatient() -> Iterator[VerifierPool]:
    section = ScorerSection(num_workers=1, answer_limit_s=2.0, answer_memory_mib=256)
    pool = VerifierPool(MathVerifierChoice(), section)
    yield pool
    pool.close()


def verify(pool: VerifierPool, response: str, answer: str) -> Score:
    return pool.score(MathProblem(answer=answer), response)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"So we get \boxed{42}.", "42", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac{2}{4}}", "1/2", 1.0),
        (r"\boxed{-3}", "-3", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"$\boxed{x^2+2x+1}$", "(x+1)^2", 1.0),
        (r"\boxed{42}", "$42$", 1.0),
        (r"\boxed{42}", "$$42$$", 1.0),
        (r"\boxed{\{1, 2\}}", r"\(\{2, 1\}\)", 1.0),
        (r"\boxed{7}", r"\boxed{7}", 1.0),
        (r"first \boxed{1}, no: \boxed{2}", "2", 1.0),
        (r"The final answer is $1$. I hope so. \boxed{2}", "2", 1.0),
        (r"\boxed{4 no, it is \boxed{5}", "5", 1.0),
        ("The answer is 42.", "42", 1.0),
        ("3 + 4 = 7, then 7 * 2 = 14", "14", 1.0),
        ("Final answer: -1,234", "-1234", 1.0),
        (r"hence $x = \frac{3}{4}$", "0.75", 1.0),
        ("the sum is 9\n" * 20_000 + "so the answer is 8", "8", 1.0),
        (r"\boxed{41}", "42", 0.0),
        (r"\boxed{42} or rather \boxed{41}", "42", 0.0),
        (r"It is 42: \boxed{unknown}", "42", 0.0),
        (r"42 \boxed{}", "42", 0.0),
        (r"\boxed{3}", "-3", 0.0),
        (r"\boxed{1}", "1,000", 0.0),
        (r"\boxed{41, 42}", "42", 0.0),
        ("first 42, then 43", "42", 0.0),
        ("no number at all", "42", 0.0),
        ("", "42", 0.0),
        ("42", "", 0.0),
        (r"\boxed{5} and then it was cut: \boxed{6", "5", 0.0),
        # One place holds the final answer.
        (r"\boxed{4} then \boxed{", "4", 0.0),
        (r"\boxed{4} then \boxed{\frac{1}{2}", "4", 0.0),
        (r"\boxed{4 \text{ or } \boxed{3}}", "3", 0.0),
        (r"\boxed{x=\boxed{3}}", "3", 1.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed 5", "5", 1.0),
        (r"$\boxed 5$, not 6", "5", 1.0),
        (r"\boxed {\frac{1}{2}} and not 3", "0.5", 1.0),
        (r"\boxed{\left\{1\right\}} and not 3", r"\{1\}", 1.0),
        (r"\boxed{4}, no: \boxed\frac{1}{2} it is", "0.5", 1.0),
        (r"} } \boxed{4} and not 3", "4", 1.0),
        (r"\boxedtext{5} but 6", "5", 0.0),
        (r"\boxed{1} \boxed", "1", 0.0),
        (r"\boxed{4} no, \boxed 5", "4", 0.0),
        (r"\boxed{5} is it, not 6.", "5", 1.0),
        (r"We get $4$. Then the result is $\frac{$", "4", 0.0),
        (r"the answer is 4, or $\frac{1}{2", "4", 0.0),
        ("The answer is 7 (2+5)", "7", 1.0),
        ("She pays $5 and $6, so in total $11", "11", 1.0),
        ("the answer is 6e-3.", "0.006", 1.0),
        ("the answer is 6e23", "6", 0.0),
        ("so it is $100_{2}$.", "100_2", 1.0),
        ("so it is 100_3", "100", 0.0),
        # What closed reasoning held is no answer.
        (r"<think>maybe \boxed{2}</think> it is 3", "2", 0.0),
        (r"<think>maybe \boxed{2}</think> it is 3", "3", 1.0),
        (r"<think>\boxed{2}</think>\boxed{3}", "3", 1.0),
        (r"<think>\boxed{2}</think>", "2", 0.0),
        (r"\boxed{2}</think> I do not know.", "2", 0.0),
        (r"<think>the answer is 3</think>", "3", 0.0),
        (r"<think>a</think> \boxed{3} <think>b</think> \boxed{2}", "3", 0.0),
        (r"[THINK]\boxed{2}[/THINK] It is 3.", "2", 0.0),
        # Reasoning that was not closed is all that there is.
        (r"<think>so \boxed{2}", "2", 1.0),
        # Signs before a number.
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
def test_one_place_holds_the_final_answer(response: str, answer: str, reward: float) -> None:
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
