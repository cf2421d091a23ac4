"""The house is as docs/architecture.md draws it: which room imports which, and how large a file may be."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

MAX_LINES = 700

_ROW = re.compile(
    r"^\| `(?P<room>apps|forgeasync/[\w.]+)/?` \| [^|]+ \| (?P<imports>[^|]*) \|$", re.MULTILINE
)


def drawn() -> dict[str, set[str]]:
    """What each room imports, by the table."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {
        row["room"].removeprefix("forgeasync/").removesuffix(".py"): set(
            re.findall(r"\w+", row["imports"].replace(".py", ""))
        )
        - {"nothing"}
        for row in _ROW.finditer(text)
    }


def real() -> dict[str, set[str]]:
    """What each room imports, by its files."""
    found: dict[str, set[str]] = {}
    for file in sources():
        room = room_of(file.relative_to(REPOSITORY).with_suffix("").parts)
        others = found.setdefault(room, set())
        others |= {room_of(tuple(name.split("."))) for name in imported(ast.parse(file.read_text()))} - {
            room,
            "forgeasync",
        }
    return found


def sources() -> Iterator[Path]:
    for folder in ("forgeasync", "apps"):
        yield from (REPOSITORY / folder).rglob("*.py")


def room_of(parts: tuple[str, ...]) -> str:
    if parts[0] == "apps":
        return "apps"
    # Files beside the rooms, such as forgeasync/training.py, are rooms of their own.
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else "forgeasync"


def imported(node: ast.AST) -> Iterator[str]:
    """Our own modules; imports for type checkers alone cost nothing and do not count."""
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            continue
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            if child.module.partition(".")[0] in ("forgeasync", "apps"):
                yield child.module
        elif isinstance(child, ast.Import):
            yield from (
                one.name for one in child.names if one.name.partition(".")[0] in ("forgeasync", "apps")
            )
        else:
            yield from imported(child)


def test_rooms_import_what_the_table_says() -> None:
    found = {room: names for room, names in real().items() if room != "forgeasync"}
    assert drawn() == found


def test_no_room_leads_back_to_itself() -> None:
    rooms = real()
    # forgeasync.training runs the app as a process, by its name.
    assert list(TopologicalSorter(rooms).static_order()), "raises CycleError where there is a circle"


def test_no_file_is_too_long_for_one_sitting() -> None:
    lengths = {
        str(file.relative_to(REPOSITORY)): len(file.read_text(encoding="utf-8").splitlines())
        for file in sources()
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}
