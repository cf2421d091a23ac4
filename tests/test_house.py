"""The house is as docs/architecture.md draws it: who imports whom, through fronts, and how large rooms are.

A room's front is its ``__init__``, and ``__init__.pyi`` lists its names. A module behind a front can move
without an edit in other rooms and in tests.
"""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

MAX_LINES = 700

MAX_DEEP_IMPORTS = 65
"""Imports past a front, in tests, benchmarks and examples: they patch a module or use a private name. Lower
this number when you remove one; never raise it."""

MAX_NAMES_FOR_TESTS = 451
"""Names that only tests import from a front. Lower this number when you remove one; never raise it: test what
other rooms can see."""

MAX_CODE = {
    "algorithms": 1008,
    "buffer": 1889,
    "config": 2632,
    "controller": 4090,
    "environments": 6694,
    "generator": 3236,
    "isolation": 2450,
    "models": 2575,
    "observability": 2661,
    "planning": 2272,
    "plugins": 4906,
    "rollouts": 2178,
    "runtime": 6257,
    "scoring": 2346,
    "trainer": 4358,
    "weights": 1744,
}
"""Lines of code of each room, without blanks, comments and docstrings. Lower a number when a room shrinks.
To raise one, say in docs/architecture.md what the lines bring."""

MAX_FILES = 300
"""Python files of forgeasync/."""

_ROW = re.compile(
    r"^\| `(?P<room>apps|forgeasync/[\w./]+?)/?` \| [^|]+ \| (?P<imports>[^|]*) \|$", re.MULTILINE
)


def drawn() -> dict[str, set[str]]:
    """What each room imports, by the table."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {
        row["room"].removeprefix("forgeasync/").removesuffix(".py").replace("/", "."): set(
            re.findall(r"[\w.]+", row["imports"].replace(".py", ""))
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
    """The dotted name of a module's room; every plug-in is one: plugins.<name>."""
    if parts[0] == "apps":
        return "apps"
    if parts[1:2] == ("plugins",) and len(parts) > 2:
        return f"plugins.{parts[2]}" if parts[2] != "__init__" else "forgeasync"
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


def test_the_core_imports_no_plugin() -> None:
    """Only apps, tests, benchmarks and examples do: a plug-in can be removed, also without the others."""
    for room, names in real().items():
        if room != "apps":
            assert not {name for name in names if name.partition(".")[0] == "plugins"}, room


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


def code_lines(file: Path) -> int:
    """Lines of a file without blanks, comments and docstrings."""
    source = file.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, node.value.end_lineno + 1)
    }
    lines = (line.strip() for line in source.splitlines())
    return sum(
        bool(line) and not line.startswith("#") and number not in documented
        for number, line in enumerate(lines, 1)
    )


def test_rooms_stay_within_their_budgets() -> None:
    package = REPOSITORY / "forgeasync"
    files = list(package.rglob("*.py"))
    assert len(files) <= MAX_FILES
    found = dict.fromkeys(MAX_CODE, 0)
    for file in files:
        room = file.relative_to(package).parts[0]
        if not room.endswith(".py"):
            found[room] += code_lines(file)
    assert not {room: num for room, num in found.items() if num > MAX_CODE[room]}


def rooms() -> set[str]:
    """Dotted names of the folders of forgeasync/ that have a front."""
    package = REPOSITORY / "forgeasync"
    fronts = (*package.glob("*/__init__.pyi"), *package.glob("plugins/*/__init__.pyi"))
    return {".".join(file.parent.relative_to(package).parts) for file in fronts}


def folder_of(room: str) -> Path:
    return REPOSITORY.joinpath("forgeasync", *room.split("."))


def room_and_module(name: str) -> tuple[str, str]:
    """The room of a module of forgeasync, and the module's name behind the front or ""."""
    room = room_of(tuple(name.split(".")))
    return room, name.removeprefix(f"forgeasync.{room}").removeprefix(".")


def imports_of_rooms(file: Path) -> Iterator[tuple[str, str, str]]:
    """The names that a file imports from other rooms: room, module behind the front or "", name."""
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    own = room_of(parts) if parts[0] == "forgeasync" else ""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            room, module = room_and_module(node.module)
            if node.module.startswith("forgeasync.") and room in rooms() and room != own:
                yield from ((room, module, one.name) for one in node.names)
        elif isinstance(node, ast.Import):
            for one in node.names:
                room, module = room_and_module(one.name)
                if one.name.startswith("forgeasync.") and module and room != own:
                    yield room, module, ""


def past_the_front(file: Path) -> Iterator[str]:
    """What a file imports from behind a front, but for workarounds of packages, which apply on import."""
    for room, module, name in imports_of_rooms(file):
        is_module = not module and name not in front(room)
        if (module or is_module) and not module.startswith("workarounds"):
            yield f"{file.relative_to(REPOSITORY)}: {room}.{module or name}"


_BY_ROOMS, _BY_TESTS = "by rooms", "by tests"


@functools.cache
def front(room: str) -> dict[str, tuple[str, str]]:
    """Each name of a front, with its module, and who imports it."""
    text = (folder_of(room) / "__init__.pyi").read_text(encoding="utf-8")
    first, _, second = text.partition("# Only tests import these.")
    names = {}
    for block, users in ((first, _BY_ROOMS), (second, _BY_TESTS)):
        imported_names = re.findall(r"^from \.([\w.]+) import (\w+) as \2$", block, re.MULTILINE)
        names |= {name: (module, users) for module, name in imported_names}
        names |= {name: ("__init__", users) for name in re.findall(r"^(\w+): ", block, re.MULTILINE)}
    return names


def files_of(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (REPOSITORY / folder).rglob("*.py")


def test_rooms_import_fronts_alone() -> None:
    assert not [found for file in sources() for found in past_the_front(file)]


def test_tests_import_fronts_but_for_what_is_left() -> None:
    found = [one for file in files_of("tests", "benchmarks", "examples") for one in past_the_front(file)]
    assert len(found) <= MAX_DEEP_IMPORTS, "\n".join(found)


def test_fronts_list_what_others_import() -> None:
    wanted = {
        (room, name)
        for file in files_of("forgeasync", "apps", "benchmarks", "examples")
        for room, module, name in imports_of_rooms(file)
        if not module and name in front(room)
    }
    public = (REPOSITORY / "forgeasync" / "__init__.pyi").read_text(encoding="utf-8")
    wanted |= set(re.findall(r"^from \.([\w.]+) import (\w+) as", public, re.MULTILINE))
    listed = {(room, name, users) for room in rooms() for name, (_, users) in front(room).items()}
    assert {(room, name) for room, name, users in listed if users == _BY_ROOMS} == {
        (room, name) for room, name in wanted if room in rooms()
    }
    assert sum(users == _BY_TESTS for *_, users in listed) <= MAX_NAMES_FOR_TESTS


def test_names_of_fronts_are_defined_where_they_say() -> None:
    for room in rooms():
        for name, (module, _) in front(room).items():
            path = folder_of(room).joinpath(*module.split("."))
            file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            assert name in defined(ast.parse(file.read_text(encoding="utf-8"))), f"{room}: {name}"
            # A module of the same name would take its place once it is imported.
            same = folder_of(room) / name
            assert not same.is_dir() and (module == name or not same.with_suffix(".py").exists()), name


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines, or takes from other packages."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name for node in tree.body if isinstance(node, definitions)}
    found |= {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return found | {
        one.asname or one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }
