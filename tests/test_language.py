"""The language of the pages, metrics, config keys, messages and docstrings: short sentences and plain words.

CONTRIBUTING.md has the words to avoid, with what to write instead. Names that others import have a docstring.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from docs.build_site import API_FOLDER, LINKED_FOLDER, site_pages

REPOSITORY = Path(__file__).resolve().parents[1]

MAX_WORDS = 32
"""Words of a sentence, or of its part up to a colon or semicolon. Code counts as one word."""

MIN_WORDS = 3
"""Shorter string literals are names, not messages."""

_AVOIDED_TABLE = re.compile(r"^\| do not write \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
_CODE_BLOCK = re.compile(r"\n\n(?: {4}.*(?:\n|$)|\n)+")
_SECTION_ITEM = re.compile(r"\n +(?=\w+: )")
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


def docstrings(path: Path) -> Iterator[str]:
    """Paragraphs of a module's docstrings, and of those under its fields, without indented blocks."""
    for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match one:
            case ast.Expr(value=ast.Constant(value=str(text))):
                prose = _CODE_BLOCK.sub("\n\n", inspect.cleandoc(text)).replace("``", "`")
                yield from paragraphs(_SECTION_ITEM.sub("\n\n", prose))


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Each text that a user reads, with the page or module that has it."""
    found = []
    for name, content in site_pages().items():
        if name.endswith(".md") and not name.startswith((API_FOLDER, LINKED_FOLDER, "examples/")):
            found += [(name, paragraph) for paragraph in paragraphs(content.decode())]
    for folder in ("apps", "forgeasync"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            messages = (" ".join(text.split()) for text in literals(path) if len(text.split()) >= MIN_WORDS)
            found += [(str(path.relative_to(REPOSITORY)), text) for text in (*messages, *docstrings(path))]
    return found


def long_sentences(text: str) -> list[str]:
    """The sentences of a text that are too long."""
    return [one for one in re.split(r"(?<=[.!?:;])\s+", text) if len(one.split()) > MAX_WORDS]


def test_sentences_are_short(texts: list[tuple[str, str]]) -> None:
    assert [(place, one) for place, text in texts for one in long_sentences(text)] == []


def test_words_are_plain(texts: list[tuple[str, str]]) -> None:
    words = avoided()
    assert [(place, found, text) for place, text in texts if (found := words.findall(text))] == []


def definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Public names that a module or class defines, their nodes, and whether each has a docstring."""
    for one, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match one:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                has_text = ast.get_docstring(one) is not None
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            case _:
                continue
        if not name.startswith("_"):
            yield name, one, has_text


def of_front(stub: Path) -> Iterator[tuple[Path, str]]:
    """Each name of a front, with the file that defines it; all names of a module that it offers."""
    for module, name in re.findall(r"^from \.([\w.]*) import (\w+)", stub.read_text("utf-8"), re.MULTILINE):
        file = stub.parent.joinpath(*(module or name).split(".")).with_suffix(".py")
        if file.exists():  # otherwise it is a room, which has its own front
            yield file, name if module else ""


def without_docstring(tree: ast.Module, name: str, bases: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """A name of a module, or all of them for "", and methods, that have no docstring and inherit none."""
    for found, node, has_text in definitions(tree.body):
        if name in ("", found):
            if not has_text:
                yield found
            if isinstance(node, ast.ClassDef):
                described = described_methods(node, bases)
                yield from (
                    f"{found}.{method}" for method, is_described in described.items() if not is_described
                )


def described_methods(node: ast.ClassDef, bases: Mapping[str, ast.ClassDef]) -> dict[str, bool]:
    """Methods of a class and its bases, and whether they have or inherit a docstring."""
    found: dict[str, bool] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in bases and base.id != node.name:
            found |= described_methods(bases[base.id], bases)
    for name, method, has_text in definitions(node.body):
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            found[name] = found.get(name, False) or has_text
    return found


def test_public_names_have_docstrings() -> None:
    package = REPOSITORY / "forgeasync"
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in package.rglob("*.py")}
    bases = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    assert [
        (str(file.relative_to(REPOSITORY)), missing)
        for stub in package.rglob("__init__.pyi")
        for file, name in of_front(stub)
        for missing in without_docstring(trees[file], name, bases)
    ] == []


def test_faults_are_found(tmp_path: Path) -> None:
    page = "Nobody came.\n\n```\nprocs\n```\n- `procs` is no file: [so many](a.md)\n| there is no | b |\n"
    words = avoided()
    assert words.findall(" ".join(paragraphs(page))) == ["Nobody", "is no", "so many"]
    module = tmp_path / "m.py"
    module.write_text(
        '"""A file.\n\n    procs = []\n\nArgs:\n    a: A ``b c``.\n"""\nX = 1\n"""Nobody."""\n'
        'raise ValueError(f"{1} of {2}, and nobody " "came")\n',
        encoding="utf-8",
    )
    assert list(literals(module)) == ["X of X, and nobody came"]
    assert list(docstrings(module)) == ["A file.", "Args:", "a: A CODE.", "Nobody."]
    assert long_sentences("word " * MAX_WORDS + "last. A short one.") == ["word " * MAX_WORDS + "last."]
