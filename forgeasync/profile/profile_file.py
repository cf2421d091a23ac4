"""The file of a profile: JSON, with the version of its format."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from forgeasync.profile.profile import FORMAT_VERSION, Profile
from forgeasync.schema import ConfigError, Problem

MAX_BYTES = 64 * 2**20


def partial_of(file: Path) -> Path:
    """Return the name of a profile's file while it is written."""
    return file.with_name(f"{file.name}.partial")


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile; a file that is there already is replaced once the new one is whole."""
    partial = partial_of(file)
    partial.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def read_profile(file: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, is none of this version, or has impossible numbers; names the
            file and every field.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise _refusal(file, f"has more than {MAX_BYTES:,} bytes; must be a profile of a run")
        data = file.read_bytes()
        values = json.loads(data)
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"is no JSON: {error}") from error
    if not isinstance(values, dict) or "format_version" not in values:
        raise _refusal(file, "has no format_version: it is no profile of a run")
    if values["format_version"] != FORMAT_VERSION or isinstance(values["format_version"], bool):
        remedy = f"must be {FORMAT_VERSION}: measure again with this version of forgeasync"
        raise ConfigError(
            [Problem(field=f"{file}: format_version", value=values["format_version"], remedy=remedy)]
        )
    try:
        return Profile.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ConfigError(_problems(file, error)) from error


def _refusal(file: Path, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=str(file), remedy=remedy)])


def _problems(file: Path, error: ValidationError) -> Iterator[Problem]:
    for details in error.errors(include_url=False):
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        # A rule across fields names them itself, and its value would be the whole section.
        is_own_rule = details["type"] == "value_error"
        remedy = details["msg"].removeprefix("Value error, ") if is_own_rule else details["msg"]
        where = f"{file}: {field.removeprefix('.')}".removesuffix(": ")
        yield Problem(
            field=where,
            value=None if is_own_rule or details["type"] == "missing" else details["input"],
            remedy=remedy,
        )
