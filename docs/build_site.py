"""Writes the pages from which MkDocs builds the site.

    python -m docs.build_site FOLDER    # `make docs` does this, and calls MkDocs

The site has the pages of docs/, the README as its first page, a page for each example and for each file that
a page links to, a reference of every config key, and the API of each room's front. Links between files of the
repository become links between pages, so that they work in both places. mkdocs.yml has the order of pages.
"""

import ast
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from pydantic_core.core_schema import WithDefaultSchema

from forgeasync.config import RunConfig
from forgeasync.schema import PluginGroup, installed_kinds, section_class

REPOSITORY = Path(__file__).resolve().parents[1]

CONFIG_PAGE = "reference/config.md"

API_FOLDER = "reference/api"

LINKED_FOLDER = "repository"
"""Folder of pages that show other files of the repository that pages link to."""

TESTS_ONLY = "# Only tests import these."

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")

Schema: TypeAlias = Mapping[str, Any]
"""A node of a JSON schema."""


def main() -> None:
    """Replace the folder that the command line names by the pages of the site."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in site_pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def site_pages() -> dict[str, bytes]:
    """Return the content of every page and image of the site, by its path in the site."""
    sources = _sources()
    pages = {CONFIG_PAGE: config_reference().encode(), **_api_pages()}
    waiting = list(sources)
    while waiting:
        source = waiting.pop()
        text = (REPOSITORY / source).read_bytes()
        if source.endswith(".md"):
            text = _with_links(source, text.decode(), sources, waiting.append).encode()
        elif sources[source].endswith(".md"):
            text = _code_page(source, text.decode()).encode()
        pages[sources[source]] = text
    return pages


def _sources() -> dict[str, str]:
    """Return the path in the site of files of the repository."""
    sources = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    for path in sorted((REPOSITORY / "docs").iterdir()):
        if path.suffix in (".md", ".png", ".svg"):
            sources[f"docs/{path.name}"] = path.name
    for path in sorted((REPOSITORY / "examples").glob("*.py")):
        sources[f"examples/{path.name}"] = f"examples/{path.stem}.md"
    return sources


def _with_links(source: str, text: str, sources: dict[str, str], add: Callable[[str], None]) -> str:
    """Return a page with its links to files changed to links to their pages; ``add`` gets new sources."""
    here = PurePosixPath(sources[source]).parent

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / match[1])
        if target not in sources:
            if not (REPOSITORY / target).is_file():
                # Stays as it is, so that MkDocs refuses it.
                return match[1]
            sources[target] = f"{LINKED_FOLDER}/{target}.md"
            add(target)
        return os.path.relpath(sources[target], here)

    return _LINK.sub(link, text)


def _code_page(source: str, code: str) -> str:
    return f"# {source}\n\n~~~~~ {Path(source).suffix[1:]}\n{code}~~~~~\n"


def config_reference() -> str:
    """Return the page of all config keys: their types, bounds, defaults and meanings."""
    return _ConfigReference(RunConfig.model_json_schema(schema_generator=_WithFactories)).page()


class _WithFactories(GenerateJsonSchema):
    """Also has the defaults that a factory makes."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        """Return the schema of a field that has a default."""
        if "default_factory" in schema:
            make: Callable[..., object] = schema["default_factory"]
            schema = core_schema.with_default_schema(schema["schema"], default=make())
        return super().default_schema(schema)


class _ConfigReference:
    """The page of config keys, written from the JSON schema of ``RunConfig``.

    Each section has one table, also if it is allowed in several places; it is named by the first of them.
    """

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._definitions: dict[str, Schema] = dict(schema["$defs"])
        self._enums = {one.__name__: one for one in StrEnum.__subclasses__()}
        self._places: dict[str, str] = {}

    def page(self) -> str:
        """Return the page."""
        intro = (
            "# Config keys\n\nA YAML file has these keys as nested mappings. On the command line write them "
            "with dots: `trainer.tokens_per_row=4096`. `[]` stands for the entries of a list, `NAME` for a "
            "name that you choose. A list can only be given as a whole.\n"
        )
        return "\n".join([intro, *self._section("", self._root)])

    def _section(self, place: str, schema: Schema) -> Iterator[str]:
        """Yield the heading and the table of a section, then those of the sections within it."""
        kind = schema["properties"].get("kind", {}).get("const")
        if place:
            title = f"`{place}`" if kind is None else f"`{place}`, kind `{kind}`"
            level = "##" if "." not in place and kind is None else "###"
            yield f"\n{level} {title} {{ #{self._anchor(schema)} }}\n"
            yield _prose(schema.get("description", "")) + "\n"
        prefix = f"{place}." if place else ""
        inner: dict[str, str] = {}
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for key, node in schema["properties"].items():
            for at, name in self._sections(prefix + key, node):
                inner.setdefault(name, at)
            row = [f"`{prefix}{key}`", self._type(node), self._default(key, schema), self._meaning(node)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        new = {name: at for name, at in inner.items() if name not in self._places}
        self._places |= new
        for name, at in new.items():
            yield from self._section(at, self._definitions[name])

    def _anchor(self, schema: Schema) -> str:
        return next(name for name, one in self._definitions.items() if one is schema)

    def _sections(self, place: str, node: Schema) -> Iterator[tuple[str, str]]:
        """Yield the place and the name of each section that a key may hold."""
        if (name := _reference(node)) is not None and "properties" in self._definitions[name]:
            yield place, name
        for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from self._sections(place, one)
        if "items" in node:
            yield from self._sections(f"{place}[]", node["items"])
        for one in _values(node):
            yield from self._sections(f"{place}.NAME", one)
        group = PluginGroup.SOURCES if place.endswith("source") else PluginGroup.ENVIRONMENTS
        if place.rpartition(".")[2] in ("source", "environment") and "oneOf" in node:
            for name in self._plugins(group):
                yield place, name

    def _plugins(self, group: PluginGroup) -> Iterator[str]:
        """Yield the sections that this repository's plug-ins add to a group, after defining them."""
        for kind, point in installed_kinds(group).items():
            if point.value.startswith("forgeasync.plugins.") and (one := section_class(group, kind)):
                schema = one.model_json_schema(schema_generator=_WithFactories)
                self._definitions = {one.__name__: schema} | schema.get("$defs", {}) | self._definitions
                yield one.__name__

    def _type(self, node: Schema) -> str:
        """Return the type of a key with its bounds."""
        if (name := _reference(node)) is not None:
            found = self._definitions[name]
            if "properties" not in found:
                return " or ".join(f"`{value}`" for value in found["enum"])
            return f"[{found['properties'].get('kind', {}).get('const', 'section')}](#{name})"
        if "anyOf" in node or "oneOf" in node:
            return " or ".join(self._type(one) for one in (*node.get("anyOf", ()), *node.get("oneOf", ())))
        if "const" in node or "enum" in node:
            return " or ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
        words = _WORDS[node["type"]]
        if "items" in node:
            words = f"list of {self._type(node['items'])}"
        elif node["type"] == "object":
            words = " or ".join(f"mapping of names to {self._type(one)}" for one in _values(node)) or words
        return ", ".join([words, *(f"{sign} {node[key]}" for key, sign in _BOUNDS.items() if key in node)])

    def _default(self, key: str, section: Schema) -> str:
        node = section["properties"][key]
        if key in section.get("required", ()):
            return "required"
        value = node["default"]
        if value and isinstance(value, dict) and any(self._sections("", node)):
            # The section's own table has the defaults of its keys.
            return f"`{value['kind']}`" if "kind" in value else "its defaults"
        return f"`{json.dumps(value)}`"

    def _meaning(self, node: Schema) -> str:
        """Return the meaning of a key and, for an enum, of its values."""
        parts = [_prose(node["description"])] if "description" in node else []
        for name in filter(None, map(_reference, (node, *node.get("anyOf", ())))):
            if name in self._enums:
                meanings = attribute_docs(self._enums[name])
                parts += [f"`{value}`: {_prose(text)}" for value, text in meanings.items()]
            elif not parts:
                parts = [_prose(self._definitions[name].get("description", "").partition("\n\n")[0])]
        return "<br>".join(" ".join(part.split()) for part in parts)


_WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "string": "text",
    "array": "list",
    "object": "mapping",
    "null": "`null`",
}

_BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": "≥",
    "exclusiveMaximum": "<",
    "maximum": "≤",
    "multipleOf": "multiple of",
    "minItems": "entries ≥",
    "maxItems": "entries ≤",
    "minLength": "length ≥",
    "maxLength": "length ≤",
}


def _values(node: Schema) -> list[Schema]:
    """Return the schemas of the values of a mapping with names that users choose."""
    others = node.get("additionalProperties")
    return [*node.get("patternProperties", {}).values(), *([others] if isinstance(others, dict) else [])]


def _reference(node: Schema) -> str | None:
    return node["$ref"].rpartition("/")[2] if "$ref" in node else None


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown, with single backticks, and with ``<`` as text."""
    return re.sub(r"<(?=[^`]*(?:`[^`]*`[^`]*)*$)", "&lt;", docstring.replace("``", "`"))


def attribute_docs(enum: type[StrEnum]) -> dict[str, str]:
    """Return the docstring under each member of an enum, by the member's value."""
    body = ast.parse(textwrap.dedent(inspect.getsource(enum))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, text in zip(body.body, body.body[1:], strict=False):
        match one, text:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(doc))):
                found[enum[name].value] = inspect.cleandoc(doc)
    return found


def _api_pages() -> dict[str, bytes]:
    """Return a page for the public names, and one for each room's front, for mkdocstrings."""
    package = REPOSITORY / "forgeasync"
    public = _names(package)
    pages = {"forgeasync": {name: _definition(name, module) for name, module in public.items()}}
    for stub in sorted((*package.glob("*/__init__.pyi"), *package.glob("plugins/*/__init__.pyi"))):
        room = ".".join(stub.parent.relative_to(REPOSITORY).parts)
        pages[room] = {name: f"{room}.{module}.{name}" for name, module in _names(stub.parent).items()}
    shown: set[str] = set()
    written = {}
    for room, names in pages.items():
        lines = [f"# {room}\n", f"`from {room} import ...`\n"]
        if again := {name: path for name, path in names.items() if path in shown}:
            links = ", ".join(f"[`{name}`][{path}]" for name, path in again.items())
            lines.append(f"On [another page](forgeasync.md): {links}.\n")
        lines += [f"::: {path}\n" for path in names.values() if path not in shown]
        shown |= set(names.values())
        written[f"{API_FOLDER}/{room}.md"] = "\n".join(lines).encode()
    return written


def _names(folder: Path) -> dict[str, str]:
    """Return the names of a front, with their modules relative to the folder."""
    text = (folder / "__init__.pyi").read_text(encoding="utf-8").partition(TESTS_ONLY)[0]
    return {name: module for module, name in re.findall(r"^from \.([\w.]*) import (\w+)", text, re.MULTILINE)}


def _definition(name: str, module: str) -> str:
    """Return the dotted name of the definition of a public name, through its room's front."""
    folder = REPOSITORY.joinpath("forgeasync", *module.split("."))
    if module and folder.is_dir():
        return f"forgeasync.{module}.{_names(folder)[name]}.{name}"
    return ".".join(filter(None, ("forgeasync", module, name)))


if __name__ == "__main__":
    main()
