"""MCP server for a shop's stock, and questions that can only be answered with it.

The environment of configs/mcp_cpu.yaml starts a server for every episode:

    python -m examples.agents.stock
"""

import random
from typing import Any

ITEMS = (
    "apples",
    "beans",
    "cups",
    "dates",
    "eggs",
    "figs",
    "grapes",
    "hats",
    "inks",
    "jars",
    "kites",
    "lamps",
)
NUM_SHELVES = 9
"""Number of shelves; each shelf has a different number of every item."""


def num_in_stock(shelf: int, item: str) -> int:
    """Return the number of an item on a shelf, which is random and so cannot be guessed."""
    return random.Random(f"{shelf} {item}").randint(0, 99)


def problems(split: str, seed: int) -> list[dict[str, Any]]:
    """Return the questions of a split, shuffled by the seed; every fifth question is held out."""
    pairs = [(shelf, item) for shelf in range(1, NUM_SHELVES + 1) for item in ITEMS]
    records = [
        {"question": question(shelf, item), "answer": str(num_in_stock(shelf, item))}
        for number, (shelf, item) in enumerate(pairs)
        if (number % 5 == 0) == (split == "held_out")
    ]
    random.Random(seed).shuffle(records)
    return records


def question(shelf: int, item: str) -> str:
    """Return the question about an item on a shelf."""
    return f"How many {item} are on shelf {shelf}?"


def main() -> None:
    """Serve MCP over standard input and output."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("stock")

    @server.tool()
    def stock(item: str, shelf: int) -> str:
        """Say how many of an item are on a shelf."""
        if item not in ITEMS or not 1 <= shelf <= NUM_SHELVES:
            raise ToolError(f"no {item!r} on shelf {shelf}; shelves are 1 to {NUM_SHELVES}")
        return str(num_in_stock(shelf, item))

    server.run("stdio")


if __name__ == "__main__":
    main()
