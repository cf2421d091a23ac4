"""The public names: complete, documented, free to import; what users call keeps working."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forgeasync as fa
from tests.support.public_signatures import HOW_TO_RECORD, RECORD, broken, public_signatures, read, shown

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"

HEAVY = ("torch", "vllm", "monarch", "transformers", "numpy", "pydantic")


def test_the_documented_names_are_the_public_ones() -> None:
    documented = re.findall(r"^\| `(\w+)` \|", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(fa.__all__)
    assert set(fa.__all__) <= set(dir(fa))


@pytest.mark.parametrize("name", fa.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(fa, name).__doc__


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError):
        fa.no_such_name  # noqa: B018


def test_importing_it_loads_nothing_heavy() -> None:
    code = f"import sys, forgeasync; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_call_of_a_user_stops_working() -> None:
    problems = list(broken(read(RECORD.read_text(encoding="utf-8")), public_signatures()))
    assert not problems, "\n".join(
        [*problems, "", f"If this is to break the code of users, {HOW_TO_RECORD}, and say so to them."]
    )


def test_everything_public_is_recorded() -> None:
    recorded = RECORD.read_text(encoding="utf-8")
    assert shown(public_signatures()) == recorded, f"the public signatures have changed; {HOW_TO_RECORD}"


RECORDED = "def A(a, b=..., *, c, d=...): ...\ndef B(x): ..."


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (RECORDED, None),
        (RECORDED + "\ndef C(x): ...", None),
        ("def A(a, b=..., e=..., *, c, d=..., f=...): ...\ndef B(x): ...", None),
        ("def A(a=..., b=..., *, c=..., d=...): ...\ndef B(x): ...", None),
        ("def A(a, b=..., *, c, d=..., f): ...\ndef B(x): ...", "A: parameter f is new and required"),
        ("def A(a, b=..., *, c): ...\ndef B(x): ...", "A: parameter d is gone"),
        ("def A(a, b=..., *, c, d2=...): ...\ndef B(x): ...", "A: parameter d is gone or has another name"),
        ("def A(a, b=..., *, c, d): ...\ndef B(x): ...", "A: parameter d has lost its default"),
        ("def A(a, e=..., b=..., *, c, d=...): ...\ndef B(x): ...", "A: parameter b is at another position"),
        ("def A(a, *, b=..., c, d=...): ...\ndef B(x): ...", "A: parameter b is at another position"),
        ("def A(a, b=..., *, c, d=...): ...\ndef B(x, /): ...", "B: parameter x is at another position"),
        ("def A(a, b=..., *, c, d=...): ...", "B: is gone"),
    ],
)
def test_what_breaks_users_is_told_from_what_does_not(after: str, said: str | None) -> None:
    problems = list(broken(read(RECORDED), read(after)))
    assert len(problems) == (said is not None)
    if said is not None:
        assert problems[0].startswith(f"fa.{said}")


def test_the_record_reads_back_as_what_was_recorded() -> None:
    signatures = public_signatures()
    assert list(broken(read(shown(signatures)), signatures)) == []
    assert shown(read(shown(signatures))) == shown(signatures)
    assert {"RowTokens", "Turn", "Score", "RunConfig", "train", "math_reward"} <= signatures.keys()
