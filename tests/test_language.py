"""The language of the pages, of metrics and config keys, and of messages: short sentences and plain words.

CONTRIBUTING.md has the words to avoid, with what to write instead.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.build_site import API_FOLDER, LINKED_FOLDER, site_pages

REPOSITORY = Path(__file__).resolve().parents[1]

MAX_WORDS = 32
"""Words of a sentence, or of its part up to a colon or semicolon. Code counts as one word."""

MIN_WORDS = 3
"""Shorter string literals are names, not messages."""

_AVOIDED_TABLE = re.compile(r"^\| do not write \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)|(?<!\\)\||<br>")


def avoided() -> re.Pattern[str]:
    """The words that CONTRIBUTING.md says to avoid. ``is no`` is fine after ``there``."""
    table = _AVOIDED_TABLE.search((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert table is not None
    words = [word.strip() for row in table[1].splitlines() for word in row.split("|")[1].split(",")]
    return re.compile(rf"(?<!there )\b(?:{'|'.join(words)})\b", re.IGNORECASE)


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs, list items and table cells of a page, with code as one word."""
    prose = _AVOIDED_TABLE.sub("", page)
    prose = re.sub(r"!?\[((?:[^\]`]|`[^`]*`)*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", prose)
    prose = re.sub(r"`[^`]+`(?: or `[^`]+`)*", "CODE", prose)
    for block in _BLOCK.split(prose):
        yield " ".join(block.split())


def literals(path: Path) -> Iterator[str]:
    """Messages of a module: its string literals, without docstrings. A formatted value is one word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
    parts |= {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        match one:
            case ast.Constant(value=str(text)) if id(one) not in parts:
                yield text
            case ast.JoinedStr(values=values):
                yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in values)


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Each text that a user reads, with the page or module that has it."""
    found = []
    for name, content in site_pages().items():
        if name.endswith(".md") and not name.startswith((API_FOLDER, LINKED_FOLDER, "examples/")):
            found += [(name, paragraph) for paragraph in paragraphs(content.decode())]
    for folder in ("apps", "forgeasync"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            messages = (text for text in literals(path) if len(text.split()) >= MIN_WORDS)
            found += [(str(path.relative_to(REPOSITORY)), " ".join(text.split())) for text in messages]
    return found


def long_sentences(text: str) -> list[str]:
    """The sentences of a text that are too long."""
    return [one for one in re.split(r"(?<=[.!?:;])\s+", text) if len(one.split()) > MAX_WORDS]


def test_sentences_are_short(texts: list[tuple[str, str]]) -> None:
    assert [(place, one) for place, text in texts for one in long_sentences(text)] == []


def test_words_are_plain(texts: list[tuple[str, str]]) -> None:
    words = avoided()
    assert [(place, found, text) for place, text in texts if (found := words.findall(text))] == []


def test_faults_are_found(tmp_path: Path) -> None:
    page = "Nobody came.\n\n```\nprocs\n```\n- `procs` is no file: [so many](a.md)\n| there is no | b |\n"
    words = avoided()
    assert words.findall(" ".join(paragraphs(page))) == ["Nobody", "is no", "so many"]
    module = tmp_path / "m.py"
    module.write_text(
        '"""Nobody."""\nraise ValueError(f"{1} of {2}, and nobody " "came")\n', encoding="utf-8"
    )
    assert list(literals(module)) == ["X of X, and nobody came"]
    assert long_sentences("word " * MAX_WORDS + "last. A short one.") == ["word " * MAX_WORDS + "last."]
