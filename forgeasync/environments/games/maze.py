"""Walking through a maze by commands."""

import random
from collections import deque

from forgeasync.config import Maze
from forgeasync.environments.games.game import HOW_TO_MOVE, Reply

STEPS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}

Cell = tuple[int, int]
"""Column from the west and row from the north, both from 0."""


class MazeGame:
    """One maze: a spanning tree of its cells, so that one way leads from any cell to any other."""

    def __init__(self, section: Maze, seed: int) -> None:
        rng = random.Random(seed)
        self._width, self._height = section.width, section.height
        self._open = self._grow(rng)
        cells = [(column, row) for row in range(self._height) for column in range(self._width)]
        self._at, self._goal = rng.sample(cells, 2)
        self._num_left = self._num_steps(self._at, self._goal) + section.spare_moves

    @property
    def opening(self) -> str:
        return (
            "Walk through this maze from S to G. Walls are #, and every cell is a dot.\n"
            f"{self.map()}\nMove one cell at a time: north is up, west is left. {HOW_TO_MOVE}: [north], "
            f"[south], [west] or [east]. You have {self._num_left} moves."
        )

    def play(self, move: str) -> Reply:
        step = STEPS.get(move.lower())
        if step is None:
            return Reply(text="That is none of north, south, west and east.", is_legal=False)
        self._num_left -= 1
        there = (self._at[0] + step[0], self._at[1] + step[1])
        is_open = frozenset((self._at, there)) in self._open
        if is_open:
            self._at = there
        if self._at == self._goal:
            return Reply(text="You have reached G.", is_over=True, value=1.0)
        told = "" if is_open else "There is a wall. "
        told += f"You are in column {self._at[0] + 1}, row {self._at[1] + 1}. "
        if not self._num_left:
            return Reply(text=told + "That was your last move.", is_over=True)
        return Reply(text=told + f"Moves left: {self._num_left}.")

    def map(self) -> str:
        """Draw the maze as it stands: cells lie between walls, at odd columns and rows."""
        lines = [["#"] * (2 * self._width + 1) for _ in range(2 * self._height + 1)]
        for column in range(self._width):
            for row in range(self._height):
                lines[2 * row + 1][2 * column + 1] = "."
        for pair in self._open:
            (column, row), (other_column, other_row) = pair
            lines[row + other_row + 1][column + other_column + 1] = " "
        for (column, row), mark in ((self._at, "S"), (self._goal, "G")):
            lines[2 * row + 1][2 * column + 1] = mark
        return "\n".join("".join(line) for line in lines)

    def _grow(self, rng: random.Random) -> frozenset[frozenset[Cell]]:
        """Return the pairs of neighbours without a wall between them, by a depth-first walk."""
        found: set[frozenset[Cell]] = set()
        stack: list[Cell] = [(rng.randrange(self._width), rng.randrange(self._height))]
        seen = {stack[0]}
        while stack:
            column, row = stack[-1]
            around = [(column + east, row + south) for east, south in STEPS.values()]
            new = [
                (east, south)
                for east, south in around
                if 0 <= east < self._width and 0 <= south < self._height and (east, south) not in seen
            ]
            if not new:
                stack.pop()
                continue
            there = rng.choice(new)
            found.add(frozenset((stack[-1], there)))
            seen.add(there)
            stack.append(there)
        return frozenset(found)

    def _num_steps(self, start: Cell, goal: Cell) -> int:
        """Return the length of the way from one cell to another."""
        steps = {start: 0}
        waiting = deque([start])
        while goal not in steps:
            column, row = cell = waiting.popleft()
            for east, south in STEPS.values():
                there = (column + east, row + south)
                if there not in steps and frozenset((cell, there)) in self._open:
                    steps[there] = steps[cell] + 1
                    waiting.append(there)
        return steps[goal]
