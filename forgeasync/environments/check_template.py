"""Proves for a model's folder that agents can rely on how its conversations become tokens.

    python -m forgeasync.environments.check_template --model PATH [--renderer NAME]

Takes the renderer of the model through fixed and random conversations, prints a table of what was checked,
and ends with status 1 and the first contradiction if there is one. A run with an environment refuses a model
that fails it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from forgeasync.config import DataSection, RendererName
from forgeasync.environments.rendering.build import ChosenRenderer, choose_renderer
from forgeasync.environments.rendering.check import CheckRow, check_renderer
from forgeasync.schema import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_RANDOM = 200
"""Random conversations of the command, by default."""


def check_template(tokenizer: "PreTrainedTokenizerBase", data: DataSection) -> list[Problem]:
    """Check the renderer that a run with an environment and this section would use."""
    try:
        chosen = choose_renderer(
            tokenizer,
            chat_template=data.chat_template,
            name=data.renderer,
            template_arguments=data.template_arguments,
        )
    except ValueError as error:
        return [Problem(field="data", remedy=str(error))]
    rows = check_renderer(tokenizer, chosen.renderer)
    first = next((row for row in rows if row.contradiction is not None), None)
    if first is None:
        return []
    remedy = f"{_words(chosen)} fails the check {first.name!r}: {first.contradiction}"
    field, value = ("renderer", data.renderer.value) if data.chat_template else ("chat_template", False)
    return [Problem(field=f"data.{field}", value=value, remedy=remedy)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the status of the command: 0 if nothing was found."""
    parser = argparse.ArgumentParser(
        prog="python -m forgeasync.environments.check_template",
        description="Proves how a model's conversations become tokens.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument(
        "--renderer",
        type=RendererName,
        choices=list(RendererName),
        default=RendererName.AUTO,
        metavar="NAME",
        help="as data.renderer: auto, template or a family's name",
    )
    parser.add_argument(
        "--conversations", type=int, default=NUM_RANDOM, metavar="N", help="random conversations"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random conversations")
    options = parser.parse_args(arguments)
    if not options.model.is_dir():
        parser.error(f"--model {options.model}: no such folder")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        chosen = choose_renderer(
            tokenizer, chat_template=tokenizer.chat_template is not None, name=options.renderer
        )
    except ValueError as error:
        print(f"--model {options.model}: {error}", file=sys.stderr)
        return 1
    rows = check_renderer(tokenizer, chosen.renderer, num_random=options.conversations, seed=options.seed)
    return _print(chosen, rows)


def _words(chosen: ChosenRenderer) -> str:
    return f"the renderer {chosen.name!r} ({chosen.reason})"


def _print(chosen: ChosenRenderer, rows: Sequence[CheckRow]) -> int:
    console = Console(highlight=False, markup=False)
    table = Table("check", "conversations", "result", "notes", title=_words(chosen), title_justify="left")
    for row in rows:
        verdict = "ok" if row.contradiction is None else "CONTRADICTION"
        table.add_row(row.name, str(row.num_cases), verdict, "\n".join(row.notes))
    console.print(table)
    first = next((row for row in rows if row.contradiction is not None), None)
    if first is None:
        return 0
    console.print(f"{first.name}: {first.contradiction}", soft_wrap=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
