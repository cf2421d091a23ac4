"""What users call keeps working: fields and parameters of public names are added with defaults, and stay."""

import pytest

from tests.support.public_signatures import HOW_TO_RECORD, RECORD, broken, public_signatures, read, shown


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
