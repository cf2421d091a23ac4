"""Math rewards: which answers count, and that no expression can stall or break the verifier."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forgeasync.scoring.math import DEFAULT_VERIFIER, MathVerifier, math_reward
from forgeasync.scoring.math_worker import last_boxed


@pytest.fixture(scope="module")
def impatient() -> Iterator[MathVerifier]:
    verifier = MathVerifier(time_limit_s=1.0, memory_limit_mib=256)
    yield verifier
    verifier.close()


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
        (r"\boxed{5} and then it was cut: \boxed{6", "5"),
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
    ],
)
def test_wrong_answers_score_zero(response: str, answer: str) -> None:
    assert math_reward(response, answer) == 0.0


@pytest.mark.parametrize(
    "expression",
    ["9^{9^{9^{9}}}", "((10!)!)!", r"\binom{10^{9}}{5 \cdot 10^{8}}"],
    ids=["power tower", "factorial tower", "binomial"],
)
def test_endless_expressions_are_cut_off_and_counted(impatient: MathVerifier, expression: str) -> None:
    before = impatient.num_timeouts
    assert not impatient.verify(f"\\boxed{{{expression}}}", "42")
    assert impatient.num_timeouts == before + 1
    assert impatient.verify(r"\boxed{42}", "42")


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
    ids=[
        "nesting",
        "open boxes",
        "braces",
        "digits",
        "sum",
        "dollars",
        "fractions",
        "anchors",
        "surrogates",
    ],
)
def test_monstrous_strings_score_zero(impatient: MathVerifier, response: str) -> None:
    assert not impatient.verify(response, "41")
    assert impatient.verify(r"\boxed{42}", "42")


def test_timeout_is_counted() -> None:
    verifier = MathVerifier(time_limit_s=0.001)
    assert not verifier.verify("\\boxed{" + "1+" * 100_000 + "1}", "42")
    assert (verifier.num_timeouts, verifier.num_crashes) == (1, 0)
    assert verifier.worker_pid is None


def test_worker_memory_is_limited(impatient: MathVerifier) -> None:
    assert impatient.verify(r"\boxed{42}", "42")
    assert impatient.worker_pid is not None
    soft, _ = resource.prlimit(impatient.worker_pid, resource.RLIMIT_AS)
    assert 0 < soft < 4 * 2**30


def test_start_up_does_not_count_against_the_limit() -> None:
    # Importing sympy alone takes longer than this limit.
    verifier = MathVerifier(time_limit_s=0.25)
    assert verifier.verify(r"\boxed{42}", "42")
    verifier.close()


def test_worker_is_reused_and_replaced_after_death() -> None:
    assert math_reward(r"\boxed{1}", "1") == 1.0
    first = DEFAULT_VERIFIER.worker_pid
    assert first is not None
    assert math_reward(r"\boxed{2}", "2") == 1.0
    assert DEFAULT_VERIFIER.worker_pid == first

    os.kill(first, signal.SIGKILL)
    _wait_until_gone(first)
    assert math_reward(r"\boxed{3}", "3") == 1.0
    assert DEFAULT_VERIFIER.worker_pid not in (None, first)


def test_threads_get_their_own_answers() -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        pairs = [(f"\\boxed{{{i}}}", str(i if i % 3 else i + 1)) for i in range(60)]
        rewards = list(pool.map(lambda pair: math_reward(*pair), pairs))
    assert rewards == [1.0 if i % 3 else 0.0 for i in range(60)]


def test_worker_dies_with_its_parent(tmp_path: Path) -> None:
    script = """
        import os
        from forgeasync.scoring.math import DEFAULT_VERIFIER, math_reward

        assert math_reward("\\\\boxed{1}", "1") == 1.0
        print(DEFAULT_VERIFIER.worker_pid, flush=True)
        os._exit(0)
    """
    # stdout goes to a file, not a pipe: a surviving worker would keep a pipe open.
    with open(tmp_path / "pid", "w+") as output:
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stdout=output, check=True)
        output.seek(0)
        _wait_until_gone(int(output.read()))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"} } \boxed{4}", "4"),
        (r"\boxed{5", None),
        ("none", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def _wait_until_gone(pid: int, *, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            # A dead child stays a zombie until its parent waits for it.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there after {limit_s} s")
