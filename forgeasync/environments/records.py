"""Problems from records: a Hugging Face data set by its hub id, local files, or your own code."""

import difflib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgeasync.config import HuggingFaceSource, PythonSource
from forgeasync.environments.sources import HELD_OUT_SEED, DrawnProblems, most_candidates, refusal
from forgeasync.rollouts import Task
from forgeasync.schema import build_code

if TYPE_CHECKING:
    import datasets

Record = dict[str, object]


def read_json_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the place ("line 8", "record 7") and the value of each record; blank lines are skipped.

    The file has one object per line, or one list of objects. ``datasets`` is not used here, because its
    errors name no lines, and it rejects numbers above 64 bits and files whose records have different keys.

    Raises:
        ValueError: The file has something else. The error names the place and the value.
    """
    data = path.read_bytes().removeprefix(_MARK)
    if data.lstrip().startswith(b"["):
        records = _parse(data, "")
        assert isinstance(records, list), "what begins with [ is a list, or no JSON"
        found: Iterable[tuple[str, object]] = ((f"record {index}", one) for index, one in enumerate(records))
    else:
        lines = ((f"line {number}", line) for number, line in enumerate(data.split(b"\n"), start=1))
        found = ((where, _parse(line, where)) for where, line in lines if line.strip())
    for where, value in found:
        if not isinstance(value, dict):
            remedy = 'must be an object such as {"question": ...}'
            raise ValueError(f"{where} holds {type(value).__name__} {value!r:.40}; {remedy}")
        yield where, value


_MARK = b"\xef\xbb\xbf"
"""Byte order mark, with which some editors begin UTF-8 files."""


def _parse(text: bytes, where: str) -> object:
    """Parse a line, or a whole file if ``where`` is empty."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where or 'the file'} is not UTF-8 text: {error.reason} (byte {error.start})"
        ) from None
    except json.JSONDecodeError as error:
        place = f"{where}, column {error.colno}" if where else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place} is not valid JSON: {error.msg}{_excerpt(error.doc, error.pos)}") from None
    except RecursionError:
        raise ValueError(f"{where or 'the file'} is nested too deeply") from None
    except ValueError as error:
        # Integers of thousands of digits.
        raise ValueError(f"{where or 'the file'} is not valid JSON: {error}") from None


def _excerpt(text: str, position: int) -> str:
    found = text[max(0, position - 30) : position + 10].strip()
    return f" near {found!r}" if found else ""


_INTEGERS = range(-(2**63), 2**63)
"""Integers that checkpoint files can store."""


_MAX_DEPTH = 32

_LEFT_OUT = object()


def json_like(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a copy of a record that has only JSON values.

    Lists and mappings are copied recursively, tuples become lists, and integers of more than 64 bits become
    text. Values that JSON cannot hold (images, bytes, NaN, halves of surrogate pairs) are left out with their
    keys.
    """
    plain = _plain(record, 0)
    return plain if isinstance(plain, dict) else {}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value) if _is_whole_text(value) else _LEFT_OUT
    if isinstance(value, int):
        return int(value) if value in _INTEGERS else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _LEFT_OUT
    if depth >= _MAX_DEPTH:
        return _LEFT_OUT
    if isinstance(value, Mapping):
        items = {str(key): _plain(item, depth + 1) for key, item in value.items() if _is_key(key)}
        return {key: item for key, item in items.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        plain = [_plain(item, depth + 1) for item in value]
        # Leaving out one item would change the indices of the others.
        return _LEFT_OUT if any(item is _LEFT_OUT for item in plain) else plain
    return _LEFT_OUT


def _is_key(key: object) -> bool:
    return isinstance(key, str) and _is_whole_text(key)


def _is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Reader of ``datasets`` for each kind of local file. Single JSON files are read by ``read_json_records``."""


MAX_RECORDS_READ = 200_000
"""Maximum number of records of a table that is read completely; larger tables are read on demand."""


def read_field(record: dict[str, Any], path: str, *, field: str, where: str) -> str:
    """Return the text at dotted ``path`` (keys and list indices) in ``record``; numbers become decimals.

    Raises:
        ConfigError: The value is missing, empty, or neither text nor number. The error names ``field``, the
            config's key of the path, and ``where``, the place of the record.
    """
    value: Any = record
    walked: list[str] = []
    for part in path.split("."):
        here = ".".join(walked) or "the record"
        if isinstance(value, dict):
            if part not in value:
                raise refusal(
                    field, path, f"does not exist in {where}; {here} has {_list_names(part, value)}"
                )
            value = value[part]
        elif isinstance(value, list):
            if not part.isdecimal() or int(part) >= len(value):
                remedy = f"does not exist in {where}; {here} is a list of {len(value)} and has no {part!r}"
                raise refusal(field, path, remedy)
            value = value[int(part)]
        else:
            raise refusal(field, path, f"does not exist in {where}; {here} is a {type(value).__name__}")
        walked.append(part)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise refusal(field, path, f"is empty ({value!r}) in {where}; every problem must have one")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            remedy = f"contains {half}, half of a character, in {where}; must be valid Unicode"
            raise refusal(field, path, remedy) from None
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        remedy = f"is a {type(value).__name__} in {where}: {value!r:.60}; must be text or a number"
        raise refusal(field, path, remedy)
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(field, path, f"is {value} in {where}; must be a finite number")
    # Without exponent, and with the fewest digits that identify the number.
    return str(value) if isinstance(value, int) else format(Decimal(repr(value)), "f")


def _list_names(wanted: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(wanted, names, n=1)
    return ", ".join(map(repr, names)) + (f" (did you mean {near[0]!r}?)" if near else "")


def is_local(source: HuggingFaceSource) -> bool:
    """Whether the path is a file or folder of this machine rather than a hub id."""
    path = Path(source.path)
    looks_local = path.is_absolute() or source.path.startswith(".") or path.suffix.lower() in FORMATS
    return looks_local or path.exists()


def _read(source: HuggingFaceSource) -> Sequence[Task]:
    """Return all problems in the order of the data set; more than ``MAX_RECORDS_READ`` are read on demand."""
    path = Path(source.path)
    suffix = path.suffix.lower()
    if is_local(source) and not path.exists():
        raise refusal("source.path", source.path, "no file or folder of this name")
    if path.is_file() and suffix not in FORMATS:
        raise refusal("source.path", source.path, f"is none of {', '.join(FORMATS)}")
    if path.is_file() and FORMATS[suffix] == "json":
        return _read_json_file(source, path)
    table = _Table(_load(source, path), source)
    return table if len(table) > MAX_RECORDS_READ else list(table)


def _task(row: int, record: dict[str, Any], where: str, source: HuggingFaceSource) -> Task:
    where = f"{where} of {source.path!r}"
    question = read_field(record, source.question_field, field="source.question_field", where=where)
    return Task(
        task_id=f"{source.split}/{row}",
        prompt=question + source.instruction,
        answer=read_field(record, source.answer_field, field="source.answer_field", where=where),
        source_index=row,
        source=source.path,
        record=json_like(record),
    )


def _read_json_file(source: HuggingFaceSource, path: Path) -> Sequence[Task]:
    import datasets

    try:
        records = list(read_json_records(path))
    except (OSError, ValueError) as error:
        raise refusal("source.path", source.path, f"cannot load it: {error}") from None
    if not records:
        raise refusal("source.path", source.path, "has no records; must have at least one")
    try:
        (part,) = datasets.ReadInstruction.from_spec(source.split).to_absolute({"train": len(records)})
    except (AssertionError, KeyError, ValueError) as error:
        remedy = f"cannot be read from {source.path!r}, a file with 'train' as its only split: {error}"
        raise refusal("source.split", source.split, remedy) from None
    drawn = records[part.from_ : part.to]
    return [_task(row, record, where, source) for row, (where, record) in enumerate(drawn)]


def _load(source: HuggingFaceSource, path: Path) -> "datasets.Dataset":
    """Load a data set by ``datasets``."""
    import datasets

    try:
        if path.is_file():
            kind = FORMATS[path.suffix.lower()]
            return datasets.load_dataset(kind, data_files=str(path), split=source.split)
        return datasets.load_dataset(source.path, split=source.split)
    except Exception as error:
        # datasets raises dozens of types, even KeyError and StopIteration, when a data set is not found, not
        # reachable, broken or without this split. The first cause names the place.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}" if str(cause).strip() else type(cause).__name__
        if path.is_dir():
            reason = _broken_json(path) or reason
        remedy = f"cannot load split {source.split!r} (data.source.split): {' '.join(reason.split())}"
        raise refusal("source.path", source.path, remedy) from error


def _broken_json(folder: Path) -> str | None:
    """Describe the first JSON file of a folder that cannot be read."""
    for file in sorted(file for file in folder.rglob("*.json*") if file.suffix.lower() in FORMATS):
        try:
            if not sum(1 for _ in read_json_records(file)):
                return f"{file.relative_to(folder)} has no records"
        except ValueError as error:
            return f"{file.relative_to(folder)}: {error}"
    return None


def _is_plain(feature: object) -> bool:
    """Whether a column of ``datasets`` holds only texts, numbers, and lists and mappings of them."""
    import datasets

    match feature:
        case datasets.Value(dtype=dtype):
            return "binary" not in dtype
        case datasets.ClassLabel():
            return True
        case datasets.List(feature=inner) | datasets.LargeList(feature=inner):
            return _is_plain(inner)
        case dict():
            return all(map(_is_plain, feature.values()))
    return False


class _Table(Sequence[Task]):
    """The problems of a data set, read from disk on demand."""

    def __init__(self, records: "datasets.Dataset", source: HuggingFaceSource) -> None:
        # Other columns may hold images or sounds, which are slow to decode and cannot be written as JSON.
        roots = {source.question_field.split(".")[0], source.answer_field.split(".")[0]}
        plain = {name for name, feature in records.features.items() if _is_plain(feature)}
        records = records.select_columns([name for name in records.column_names if name in plain | roots])
        self._records = records
        self._source = source

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: Any) -> Any:
        try:
            record = self._records[row]
        except Exception as error:
            # Decoding a cell can fail in different ways for every type of column.
            remedy = f"record {row} cannot be read: {type(error).__name__}: {error}"
            raise refusal("source.path", self._source.path, remedy) from error
        return _task(row, record, f"record {row}", self._source)

    def __iter__(self) -> Iterator[Task]:
        for row, record in enumerate(self._records):
            yield _task(row, record, f"record {row}", self._source)


class HuggingFaceProblems(DrawnProblems):
    """Problems of one data set. Records with the same question are one problem.

    Published data sets repeat problems (DAPO-Math-17k a hundredfold), and repeats must not count more.
    """

    may_repeat = False

    def __init__(self, source: HuggingFaceSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        """Read the data set.

        Raises:
            ConfigError: The data set lacks something that the config requests, or a record is wrong. The
                error names the field, and the line or record.
        """
        super().__init__(repr(source.path), num_train=num_train, num_held_out=num_held_out, seed=seed)
        self._source = source
        self._problems = _read(source)
        size = len(self._problems)
        if num_train + num_held_out > size:
            raise refusal(
                "num_train + data.num_held_out",
                num_train + num_held_out,
                f"{num_train} + {num_held_out} problems wanted, but split {source.split!r} of "
                f"{source.path!r} has {size}",
            )

    def candidates(self, *, held_out: bool) -> Iterator[Task]:
        """See ``DrawnProblems``."""
        seed = HELD_OUT_SEED if held_out else self._seed
        for row in map(int, np.random.default_rng(seed).permutation(len(self._problems))):
            yield self._problems[row]


TRAIN, HELD_OUT = "train", "held_out"

QUESTION, ANSWER = "question", "answer"


class PythonProblems(DrawnProblems):
    """Problems of a function ``(split, seed)`` that returns finitely or infinitely many records."""

    def __init__(self, source: PythonSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        """Import and build the function.

        Raises:
            ConfigError: It cannot be imported or built. The message names ``data.source.factory``.
        """
        super().__init__(source.factory, num_train=num_train, num_held_out=num_held_out, seed=seed)
        self._source = source
        try:
            self._records = build_code(source, ("split", "seed"))
        except Exception as error:
            # The user's class may raise anything when it is built.
            kind = "" if isinstance(error, ValueError) else f"raised {type(error).__name__}: "
            reason = f"{kind}{error}"
            raise refusal("source.factory", source.factory, reason) from error

    def candidates(self, *, held_out: bool) -> Iterator[Task]:
        """See ``DrawnProblems``."""
        split, seed = (HELD_OUT, HELD_OUT_SEED) if held_out else (TRAIN, self._seed)
        most = most_candidates(self._num_held_out if held_out else self._num_train)
        group = HELD_OUT if held_out else f"{TRAIN}/seed{seed}"
        for index, record in enumerate(itertools.islice(self._raw(split, seed), most)):
            where = f"record {index} of {split!r} of {self._source.factory}"
            if not isinstance(record, Mapping):
                remedy = (
                    f"gave {record!r:.80} for {where}; must give mappings such as "
                    "{'question': '1 + 1 =', 'answer': '2'}"
                )
                raise refusal("source.factory", self._source.factory, remedy)
            plain = dict(record)
            yield Task(
                task_id=f"{group}/{index}",
                prompt=read_field(plain, QUESTION, field="source.factory", where=where),
                answer=read_field(plain, ANSWER, field="source.factory", where=where),
                source_index=index,
                source=self._source.factory,
                record=json_like(plain),
            )

    def _raw(self, split: str, seed: int) -> Iterator[Any]:
        try:
            records = self._records(split, seed)
            # The user's function may have returned anything.
            yield from records  # type: ignore[misc]
        except Exception as error:
            # Show the user every exception of their code.
            remedy = f"raised {type(error).__name__}: {error}, called with ({split!r}, {seed})"
            raise refusal("source.factory", self._source.factory, remedy) from error
