"""The site of docs/: its order of pages, its links, and its reference of config keys."""

import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docs.build_site import CONFIG_PAGE, LINKED_FOLDER, site_pages
from forgeasync.config import RunConfig
from forgeasync.schema import PluginSection

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Text of every page of the site; images are empty."""
    return {name: content.decode() if name.endswith(".md") else "" for name, content in site_pages().items()}


def listed(node: object) -> Iterator[str]:
    """Pages below a node of mkdocs.yml's nav."""
    match node:
        case str():
            yield node
        case list():
            for one in node:
                yield from listed(one)
        case dict():
            yield from listed(list(node.values()))


def test_nav_has_every_page_once(pages: dict[str, str]) -> None:
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    expected = {name for name in pages if name.endswith(".md") and not name.startswith(LINKED_FOLDER)}
    assert sorted(listed(nav)) == sorted(expected)
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} <= expected


def test_links_lead_to_pages(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        for target in re.findall(
            r"\]\((?![a-z]+:|#)([^)#\s]+)", re.sub(r"~~~~~.*~~~~~", "", text, flags=re.S)
        ):
            assert os.path.normpath(PurePosixPath(name).parent / target) in pages, f"{name}: {target}"


def sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Section classes that an annotation allows, and those within them."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for one in get_args(annotation):
        yield from sections(one)


def tables(page: str) -> dict[str, dict[str, str]]:
    """Defaults by key, of each section of the reference by its class."""
    _, *parts = re.split(r"^#+ .*\{ #(\w+) \}$", "{ #RunConfig }\n".join(["## ", page]), flags=re.M)
    row = re.compile(r"^\| `(?:\S+\.)?(\w+)` \| .+? \| (`.*?`|[a-z ]+) \| .* \|$", flags=re.M)
    return {name: dict(row.findall(text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def shown(default: object) -> str:
    """A default as the reference has it."""
    match default:
        case _ if default is PydanticUndefined:
            return "required"
        case BaseModel():
            kind = getattr(default, "kind", None)
            return "its defaults" if kind is None else f"`{kind}`"
        case _:
            return f"`{json.dumps(default)}`"


def test_config_reference_has_every_key_with_its_default(pages: dict[str, str]) -> None:
    found = tables(pages[CONFIG_PAGE])
    for section in set(sections(RunConfig)):
        if issubclass(section, PluginSection):
            # Those that are installed have tables of their own.
            continue
        fields = section.model_fields.items()
        expected = {key: shown(field.get_default(call_default_factory=True)) for key, field in fields}
        assert found[section.__name__] == expected, section
    assert found.keys() > {"CodingAgent", "CodingSource", "ServedEnvironment", "ServedSource"}


def test_every_key_has_a_meaning(pages: dict[str, str]) -> None:
    unexplained = re.findall(r"^\| `(\S+)` .* \|  \|$", pages[CONFIG_PAGE], flags=re.M)
    assert {key for key in unexplained if not key.endswith(".kind")} == set()


def test_config_reference_has_types_bounds_and_meanings(pages: dict[str, str]) -> None:
    page = pages[CONFIG_PAGE]
    assert "| `trainer.parallel.num_procs` | whole number, > 0, ≤ 65536 | `1` | Number of " in page
    assert "| `sampling.top_p` | number, > 0.0, ≤ 1.0 | `1.0` | Smallest total probability " in page
    assert "`reissue`: The group's prompt is submitted again, before all others." in page
