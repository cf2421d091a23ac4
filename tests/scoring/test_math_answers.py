"""Math rewards: where the answer is, what it is equal to, and that no expression can stall the verifier."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgeasync.config import ScorerSection
from forgeasync.rollouts import Score, ScoreStatus, Task
from forgeasync.scoring import MathVerifierChoice, VerifierPool, math_reward

FOUND = [
    ("42", r"So we get \boxed{42}.", "The answer is 42."),
    ("$42$", r"\boxed{42}"),
    ("$$42$$", r"\boxed{42}"),
    (r"\(\{2, 1\}\)", r"\boxed{\{1, 2\}}"),
    (r"\boxed{7}", r"\boxed{7}"),
    ("(x+1)^2", r"$\boxed{x^2+2x+1}$"),
    ("2", r"first \boxed{1}, no: \boxed{2}", r"The final answer is $1$. I hope so. \boxed{2}"),
    ("5", r"\boxed{4 no, it is \boxed{5}"),
    ("14", "3 + 4 = 7, then 7 * 2 = 14"),
    ("-1234", "Final answer: -1,234", "#### -1,234"),
    ("0.75", r"hence $x = \frac{3}{4}$"),
    ("8", "the sum is 9\n" * 20_000 + "so the answer is 8"),
    ("7", "The answer is 7 (2+5)"),
    ("11", "She pays $5 and $6, so in total $11"),
    ("0.006", "the answer is 6e-3."),
    ("100_2", "so it is $100_{2}$."),
    # Boxes without braces, and in others.
    ("3", r"\boxed{x=\boxed{3}}"),
    ("5", r"\fbox{5}", r"\boxed 5", r"$\boxed 5$, not 6", r"\boxed{5} is it, not 6."),
    ("0.5", r"\boxed {\frac{1}{2}} and not 3", r"\boxed{4}, no: \boxed\frac{1}{2} it is"),
    (r"\{1\}", r"\boxed{\left\{1\right\}} and not 3"),
    ("4", r"} } \boxed{4} and not 3"),
    # What closed reasoning held is no answer; reasoning that was not closed is all that there is.
    ("3", r"<think>maybe \boxed{2}</think> it is 3", r"<think>\boxed{2}</think>\boxed{3}"),
    ("2", r"<think>so \boxed{2}"),
    # Signs before a number.
    ("4", "#4", "# 4", "#### 4", "####4", "#### $4", "3 + 1 = 4\n#### 4"),
    ("4", r"\boxed{#4}", r"\boxed{\#4}", r"\boxed{#### 4}", "The answer is #4.", "The answer is **#4**"),
    ("0.5", r"#### \frac{1}{2}"),
    ("#4", "4"),
    ("#### 4", "4"),
    ("Half of 2000 is 2000 / 2 = 1000.\n#### 1,000", "1,000"),
    ("From a = 3 follows a / 4.5.\n#### 2/3", r"\frac{2}{3}"),
    ("a=3\n#### 2/3", r"\frac{2}{3}"),
    # Where "#4" names something, the number before it stays the answer.
    ("8", "The answer is 8 (by rule #4 above)", "## 3. Sum\n5 + 3 = 8"),
]
"""A reference answer, and responses whose final answer it is."""

NOT_FOUND = [
    ("42", r"\boxed{42} or rather \boxed{41}", r"It is 42: \boxed{unknown}", r"42 \boxed{}"),
    ("42", r"\boxed{41, 42}", "first 42, then 43", "no number at all", ""),
    ("1,000", r"\boxed{1}"),
    ("", "42"),
    # One place holds the final answer.
    ("5", r"\boxed{5} and then it was cut: \boxed{6", r"\boxedtext{5} but 6"),
    ("4", r"\boxed{4} then \boxed{", r"\boxed{4} then \boxed{\frac{1}{2}", r"\boxed{4} no, \boxed 5"),
    ("4", r"We get $4$. Then the result is $\frac{$", r"the answer is 4, or $\frac{1}{2"),
    ("3", r"\boxed{4 \text{ or } \boxed{3}}"),
    ("1", r"\boxed{1} \boxed"),
    ("6", "the answer is 6e23"),
    ("100", "so it is 100_3"),
    # What closed reasoning held is no answer.
    ("2", r"<think>maybe \boxed{2}</think> it is 3", r"<think>\boxed{2}</think>"),
    ("2", r"\boxed{2}</think> I do not know.", r"[THINK]\boxed{2}[/THINK] It is 3."),
    ("3", r"<think>the answer is 3</think>", r"<think>a</think> \boxed{3} <think>b</think> \boxed{2}"),
    # The hash is no sign, and no licence either.
    ("4", "#5", r"\boxed{#5}", "#### 5"),
    ("4 + 1 = 5\n#### 4", "5"),
]
"""A reference answer, and responses whose final answer is another one, or that have none."""

RIGHT = [
    (r"\frac{1}{2006!}", r"\frac{1}{2006!}"),
    ("10000!", r"10000 \cdot 9999!"),
    ("2^{100000}", r"2 \cdot 2^{99999}"),
    (r"\binom{2000}{1000}", r"\frac{2000!}{(1000!)^2}"),
    ("10^{10^{10}}", "10^{10000000000}"),
    ("xe^x", r"x\mathrm{e}^{x}"),
    (r"6.02\times 10^{23}", r"6.02 * 10^23"),
    (r"\varnothing", r"\emptyset", r"\{ \}", "∅", r"\left\{\right\}"),
    (r"\frac17", r"0.\overline{142857}"),
    (r"\frac16", r"0.1\bar{6}"),
    ("1.5", "1 1/2"),
    (r"\frac{7x}{2}", r"3\frac{1}{2}x"),
    ("6", "2(3)", "(2)(3)", "6."),
    ("1234567", r"1\,234\,567", "1 234 567", r"1,\!234,\!567"),
    ("-6", "–6"),
    ("1", r"10 \bmod 3"),
    ("3t", "3t"),
    (r"\pi h", r"h\pi"),
    (r"12 \text{ cm}", "12"),
    ("5", r"5\,\mathrm{m}", "x=5"),
    ("100_2", r"(100)_{2}"),
    ("100_{2}", r"100_{\text{two}}"),
    ("1A_{16}", r"\text{1A}_{16}"),
    ("0.1_3", "0.10_{3}"),
    (r"\sqrt{2}", r"1.414214"),
    ("1.41421356", r"\sqrt2"),
    (r"[\sqrt2, 2]", r"[1.414214, 2]"),
    (r"\frac{\sqrt6+\sqrt2}{2}", r"\sqrt{2+\sqrt3}"),
    (r"-\frac12", r"\cos\frac{2\pi}{7}+\cos\frac{4\pi}{7}+\cos\frac{6\pi}{7}"),
    ("0", r"\sqrt2\sqrt3-\sqrt6"),
    (r"\frac{1}{\sqrt{e}}", r"e^{-0.5}"),
    ("2i", r"(1+i)^2"),
    ("-1", r"e^{\mathrm{i}\pi}"),
    ("3+4i", "4i+3"),
    (r"\{1-i,1+i\}", r"\{1+i,1-i\}"),
    (r"\{1,\frac12\}", r"\{0.5, 1\}"),
    (r"\begin{pmatrix}\frac12\\2\end{pmatrix}", r"\begin{pmatrix}0.5\\2\end{pmatrix}"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    ("x=5", "5"),
    ("0.5", r"50\%"),
    ("50", r"50\%"),
    ("yes", r"\text{Yes}"),
    ("A", r"\text{(A)}"),
]
"""A reference answer, and answers that are equal to it."""

WRONG = [
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    (r"\frac{1}{\binom{100}{49}}", r"\frac{1}{\binom{100}{50}}"),
    ("0", "10^{-30}", "e^{-100}"),
    ("e^{-100}", "0"),
    ("10^{-21}", "0.1^{20}"),
    ("0.0000002", "0.0000001"),
    (r"\frac13", "0.333333"),
    ("2^{1000}", "2^{1000}+1"),
    (r"\sqrt{2+10^{-20}}", r"\sqrt{2}"),
    (r"2\cdot10^{-20}\pi", r"10^{-20}\pi"),
    (r"2^{1000}\pi+1", r"2^{1000}\pi"),
    ("10^{200}", r"\sqrt{10^{400}+1}"),
    (r"\sqrt{10^{200}+2}-10^{100}", r"\sqrt{10^{200}+1}-10^{100}"),
    ("1", r"\cos 10^{-9}"),
    (r"\ln 2.0000001", r"\ln 2"),
    (r"\log_3 8", r"\log_2 8"),
    (r"\pi", "3.14", r"\frac{355}{113}"),
    (r"\sqrt{2}", "1.4142"),
    (r"x+\frac{1}{2^{98}}", r"x+\frac{1}{2^{99}}"),
    ("y=2x+1", "y=2x+1.0000000001"),
    ("x^2+1=0", "x^2+4=0"),
    (r"[0,\frac{1}{2^{98}}]", r"[0,\frac{1}{2^{99}}]"),
    (r"\begin{pmatrix}\frac12\\2\end{pmatrix}", r"\begin{pmatrix}0.5000000001\\2\end{pmatrix}"),
    ("(1,2)", "(1,2]", "(2,1)"),
    ("3+4i", r"3+4.0000000001i"),
    ("3", "10^{-30}i+3"),
    ("0.125", r"12.5000000001\%"),
    ("100_{2}", "100_{3}", "100", "4"),
    ("100", "100_{2}"),
    ("2.1_{4}", "2.1_{3}"),
    ("1A_{16}", "26_{16}"),
    (r"\{100_2\}", r"\{100_3\}"),
    ("100_2", "x=100_3"),
    ("5", "2(3)", "2 3"),
    ("6", "2 3"),
    ("3t", "3"),
    ("5 + s", "5 + t"),
    (r"\pi h", r"\pi"),
    (r"\varnothing", r"\{0\}", r"\{\emptyset\}"),
    ("2", r"1 \text{ or } 2"),
    ("42", r"42 \text{ maybe} \frac{"),
]
"""A reference answer, and answers that are not."""


def cases(right: list[tuple[str, ...]], wrong: list[tuple[str, ...]]) -> list[tuple[str, str, float]]:
    """What is judged, the reference answer and the reward."""
    return [
        (one, answer, reward)
        for rows, reward in ((right, 1.0), (wrong, 0.0))
        for answer, *others in rows
        for one in others
    ]


@pytest.mark.parametrize(("response", "answer", "reward"), cases(FOUND, NOT_FOUND))
def test_one_place_holds_the_final_answer(response: str, answer: str, reward: float) -> None:
    assert math_reward(response, answer) == reward


@pytest.mark.parametrize(("found", "answer", "reward"), cases(RIGHT, WRONG))
def test_equal_answers_score_one_and_others_zero(found: str, answer: str, reward: float) -> None:
    assert math_reward(f"so \\boxed{{{found}}}", answer) == reward


@pytest.fixture(scope="module")
def patient() -> Iterator[VerifierPool]:
    pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[VerifierPool]:
    section = ScorerSection(num_workers=1, answer_limit_s=2.0, answer_memory_mib=256)
    pool = VerifierPool(MathVerifierChoice(), section)
    yield pool
    pool.close()


def verify(pool: VerifierPool, response: str, answer: str) -> Score:
    task = Task(task_id="t", prompt="", answer=answer, source_index=0, source="s")
    return pool.score(task, response)


@pytest.mark.parametrize("answer", ["42", "10^{10^{10}+1}", "(10^9+1)!"])
@pytest.mark.parametrize(
    "expression",
    [
        "10^{10^{10}}",
        "(10^9)!",
        "9^{9^{9^{9}}}",
        "((10!)!)!",
        r"\binom{10^{9}}{5 \cdot 10^{8}}",
        r"2^{\frac{10^{9}}{3}}",
        r"\{10^{10^{10}}\}",
        r"1+\frac{1}{10^{10^{10}}}",
        r"\sin(10^{10^{10}})",
        "1E999999999",
    ],
)
def test_huge_numbers_are_other_numbers_at_once(patient: VerifierPool, expression: str, answer: str) -> None:
    score = verify(patient, f"\\boxed{{{expression}}}", answer)
    assert (score.value, score.has_answer, score.status) == (0.0, True, ScoreStatus.SCORED)


@pytest.mark.parametrize(
    "expression",
    [r"\Gamma(1000000000)", pytest.param(r"\prod_{k=1}^{1000000000} k", marks=pytest.mark.exhaustive)],
    ids=["gamma", "product"],
)
def test_endless_expressions_are_cut_off_and_counted(impatient: VerifierPool, expression: str) -> None:
    before = impatient.counts
    assert verify(impatient, f"\\boxed{{{expression}}}", "42") == Score(value=0.0, is_correct=False)
    after = impatient.counts
    assert after["scoring/num_timeouts"] == before["scoring/num_timeouts"] + 1
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


def fraction_latex(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


FRAMES = ["{}", r"({}, 7)", r"\{{ {}, 7 \}}", "x = {}", r"\begin{{pmatrix}} {} \\ 7 \end{{pmatrix}}", "{} x"]

rationals = st.fractions(max_denominator=10**40).filter(bool) | st.builds(
    lambda sign, value, exponent: sign * value * Fraction(10) ** exponent,
    st.sampled_from([-1, 1]),
    st.fractions(min_value=1, max_value=10, max_denominator=10**6),
    st.integers(-60, 60),
)


@settings(max_examples=60, deadline=None)
@given(value=rationals, sign=st.sampled_from([-1, 1]), frame=st.sampled_from(FRAMES))
@example(value=Fraction(1, 3), sign=1, frame="{}")
@example(value=Fraction(1, 2**98), sign=1, frame=r"\{{ {}, 7 \}}")
def test_one_part_in_a_trillion_is_wrong(value: Fraction, sign: int, frame: str) -> None:
    answer = frame.format(fraction_latex(value))
    other = frame.format(fraction_latex(value * (1 + sign * Fraction(1, 10**12))))
    assert math_reward(f"\\boxed{{{other}}}", answer) == 0.0
    assert math_reward(f"\\boxed{{{answer}}}", other) == 0.0
    assert math_reward(f"\\boxed{{{answer}}}", answer) == 1.0


def mixed(whole: int, top: int, bottom: int) -> tuple[str, Fraction]:
    return rf"{whole}\frac{{{top}}}{{{bottom}}}", whole + Fraction(top, bottom)


def decimal_text(digits: int, places: int) -> tuple[str, Fraction]:
    text = str(digits).rjust(places + 1, "0")
    return f"{text[:-places]}.{text[-places:]}", Fraction(digits, 10**places)


def of_fraction(style: str, top: int, bottom: int) -> tuple[str, Fraction]:
    return style.format(top, bottom), Fraction(top, bottom)


digits = st.integers(1, 9)
counts = st.integers(1, 10**12)
written = (
    st.builds(of_fraction, st.sampled_from([r"\frac{}{}", r"\dfrac{}{}", r"\tfrac{} {}"]), digits, digits)
    | st.builds(
        of_fraction,
        st.sampled_from(
            [
                r"\dfrac{{{}}}{{{}}}",
                r"\tfrac{{{}}}{{{}}}",
                r"\cfrac{{{}}}{{{}}}",
                r"\left(\frac{{{}}}{{{}}}\right)",
                "{}/{}",
                r"{} \div {}",
                r"{} \cdot \frac{{1}}{{{}}}",
                r"{} \times {}^{{-1}}",
                r"{}\,/\,{}",
                r"\frac{{\;{}\,}}{{ {}\! }}",
            ]
        ),
        counts,
        counts,
    )
    | st.builds(mixed, st.integers(1, 999), st.integers(1, 999), st.integers(2, 999))
    | st.builds(decimal_text, counts, st.integers(1, 20))
    | st.builds(
        lambda value, mark: (f"{value:,}".replace(",", mark), Fraction(value)),
        counts,
        st.sampled_from([",", "{,}", r",\!", r"\,", r"\ ", "~"]),
    )
    | st.builds(
        lambda value, exponent, style: (style.format(value, exponent), value * Fraction(10) ** exponent),
        digits,
        st.integers(-30, 30),
        st.sampled_from([r"{} \times 10^{{{}}}", r"{}\cdot 10^{{{}}}", "{}e{}", "{}E{}", r"{}*10^{{{}}}"]),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    written=written,
    sign=st.sampled_from(["", "-"]),
    frame=st.sampled_from(["{}", "{}.", "$ {} $", r"\,{}\;"]),
)
def test_numbers_are_equal_in_any_writing(written: tuple[str, Fraction], sign: str, frame: str) -> None:
    text, value = written
    answer = sign + fraction_latex(value)
    assert math_reward(f"\\boxed{{{frame.format(sign + text)}}}", answer) == 1.0
    assert math_reward(f"\\boxed{{{answer}}}", sign + text) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    value=st.fractions(min_value=1, max_value=1000, max_denominator=1000),
    constants=st.sampled_from(
        [
            ["e", r"\mathrm{e}", r"\operatorname{e}", r"\text{e}", r"{\rm e}", r"\exp(1)"],
            [r"\pi", "π", r"\mathrm{\pi}", r"\uppi"],
            [r"\sqrt{2}", r"\sqrt2", r"2^{\frac{1}{2}}", "2^{1/2}", r"\frac{2}{\sqrt 2}"],
            [r"\ln 2", r"\ln(2)", r"\frac12\ln 4", r"\log_e 2"],
        ]
    ),
    data=st.data(),
)
def test_constants_are_equal_in_any_font(value: Fraction, constants: list[str], data: st.DataObject) -> None:
    first, second = data.draw(st.sampled_from(constants)), data.draw(st.sampled_from(constants))
    answer = rf"{fraction_latex(value)} + {first}"
    assert math_reward(rf"\boxed{{{second} + {fraction_latex(value)}}}", answer) == 1.0
    other = fraction_latex(value * (1 + Fraction(1, 10**12)))
    assert math_reward(rf"\boxed{{{second} + {other}}}", answer) == 0.0
