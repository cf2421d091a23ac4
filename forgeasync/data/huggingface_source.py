"""Problems from a Hugging Face data set, by hub id or from local files."""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetsError

from forgeasync.config.schema import HuggingFaceSource
from forgeasync.data.split import HELD_OUT_SEED, SplitSource
from forgeasync.data.task import Task

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Reader of ``datasets`` for each kind of local file."""


def read_field(record: dict[str, Any], path: str, *, name: str) -> str:
    """The text at dotted ``path`` (keys and list indices) in ``record``; numbers become text.

    Raises ValueError naming the config field ``name`` if nothing, or no text, is there.
    """
    value: Any = record
    walked: list[str] = []
    for part in path.split("."):
        here = ".".join(walked) or "the record"
        if isinstance(value, dict):
            if part not in value:
                raise ValueError(f"{name}: {path!r} does not exist; {here} has {_list_names(part, value)}")
            value = value[part]
        elif isinstance(value, list):
            if not part.isdecimal() or int(part) >= len(value):
                raise ValueError(
                    f"{name}: {path!r} does not exist; {here} is a list of {len(value)} and has no {part!r}"
                )
            value = value[int(part)]
        else:
            raise ValueError(f"{name}: {path!r} does not exist; {here} is a {type(value).__name__}")
        walked.append(part)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name}: {path!r} is no text or number but a {type(value).__name__}")
    return str(value)


def _list_names(wanted: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(wanted, names, n=1)
    return ", ".join(map(repr, names)) + (f" (did you mean {near[0]!r}?)" if near else "")


def _load(source: HuggingFaceSource) -> datasets.Dataset:
    path = Path(source.path)
    suffix = path.suffix.lower()
    looks_local = path.is_absolute() or source.path.startswith(".") or suffix in FORMATS
    if looks_local and not path.exists():
        raise ValueError(f"data.source.path: no file or folder {source.path!r}")
    if path.is_file() and suffix not in FORMATS:
        raise ValueError(f"data.source.path: {source.path!r} is none of {', '.join(FORMATS)}")
    try:
        if path.is_file():
            return datasets.load_dataset(FORMATS[suffix], data_files=str(path), split=source.split)
        return datasets.load_dataset(source.path, split=source.split)
    # Not found, not reachable, broken or without this split: each has its own type, all name the cause.
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"data.source.path: cannot load split {source.split!r} (data.source.split) of "
            f"{source.path!r}: {error}"
        ) from error


def _tasks(records: datasets.Dataset, rows: Iterable[int], source: HuggingFaceSource) -> Iterator[Task]:
    for row in rows:
        record = records[int(row)]
        where = f"(record {row} of {source.path!r})"
        question = read_field(record, source.question_field, name=f"data.source.question_field {where}")
        answer = read_field(record, source.answer_field, name=f"data.source.answer_field {where}")
        yield Task(
            task_id=f"{source.split}/{row}",
            prompt=question + source.instruction,
            answer=answer,
            source_index=int(row),
            source=source.path,
        )


def split_records(source: HuggingFaceSource, *, num_train: int, num_held_out: int, seed: int) -> SplitSource:
    """Draw distinct held-out problems by a fixed seed, then distinct training problems by ``seed``.

    A text that is held out is never trained on, also where another record repeats it. Raises ValueError
    naming the config field that asks for something the data set does not have.
    """
    records = _load(source)
    size = len(records)
    if num_train + num_held_out > size:
        raise ValueError(
            f"data.num_train + data.num_held_out: {num_train} + {num_held_out} problems wanted, but split "
            f"{source.split!r} of {source.path!r} has {size}"
        )
    # Other columns may hold images or long solutions that are slow to decode.
    roots = {source.question_field.split(".")[0], source.answer_field.split(".")[0]}
    if roots <= set(records.column_names):
        records = records.select_columns(sorted(roots))

    held_out: dict[str, Task] = {}
    for task in _tasks(records, np.random.default_rng(HELD_OUT_SEED).permutation(size), source):
        held_out.setdefault(task.prompt, task)
        if len(held_out) == num_held_out:
            break
    else:
        raise ValueError(
            f"data.num_held_out: {num_held_out} problems wanted, but {source.path!r} has only "
            f"{len(held_out)} distinct ones"
        )

    train: dict[str, Task] = {}
    num_skipped = num_repeats = 0
    for task in _tasks(records, np.random.default_rng(seed).permutation(size), source):
        if task.prompt in held_out:
            num_skipped += 1
        elif task.prompt in train:
            # Published sets repeat problems (DAPO-Math-17k a hundredfold): chance must not weight them.
            num_repeats += 1
        else:
            train[task.prompt] = task
        if len(train) == num_train:
            break
    else:
        raise ValueError(
            f"data.num_train: {num_train} problems wanted, but only {len(train)} of the {size} in "
            f"{source.path!r} are distinct and not held out"
        )
    return SplitSource(
        train=list(train.values()),
        held_out=list(held_out.values()),
        num_skipped_held_out=num_skipped,
        num_skipped_repeats=num_repeats,
    )
