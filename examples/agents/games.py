"""Multi-turn games: an environment and a data source of your own (configs/game_cpu.yaml).

    environment: {kind: python, factory: examples.agents.games.PlayGame, options: {max_illegal_moves: 2}}
    data:
      source: {kind: python, factory: examples.agents.games.problems, options: {game: maze, width: 6}}

The games are ``guess_number``, ``tic_tac_toe`` and ``maze``. The options and the seed in a task's record
determine its game. The model's move is the last text in square brackets in its turn.
"""

import functools
import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import forgeasync as fa

HOW_TO_MOVE = "Write your move in square brackets"
NO_MOVE = f"I see no move. {HOW_TO_MOVE}."

MAX_READ_CHARACTERS = 20_000
"""Number of characters at the end of a turn that are searched for a move."""

_MOVE = re.compile(r"\[([^\[\]\n]{1,40})\]")
_NUMBER = re.compile(r"-?\d{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply of a game to a move; an illegal move leaves the game unchanged."""

    text: str
    is_legal: bool = True
    is_over: bool = False
    value: float = 0.0
    """Value of the finished game, from 0 to 1."""


class Game(ABC):
    """One game in progress."""

    @property
    @abstractmethod
    def opening(self) -> str:
        """Text with the rules and the state before the first move."""

    @abstractmethod
    def play(self, move: str) -> Reply:
        """Make a move and return the reply; ``move`` is any text of up to 40 characters."""


class GuessNumber(Game):
    """Find a number by guessing; the reply to each guess is "higher" or "lower"."""

    def __init__(self, seed: int, *, low: int = 1, high: int = 100, max_guesses: int = 7) -> None:
        if high <= low:
            raise ValueError(f"high = {high}; must be greater than low = {low}")
        self._low, self._high, self._num_left = low, high, max_guesses
        self._number = random.Random(seed).randint(low, high)

    @property
    def opening(self) -> str:
        return (
            f"I have chosen a whole number from {self._low} to {self._high}. Find it in at most "
            f"{self._num_left} guesses; after each I say whether my number is higher or lower. "
            f"{HOW_TO_MOVE}, such as [{(self._low + self._high) // 2}]."
        )

    def play(self, move: str) -> Reply:
        guess = int(move) if _NUMBER.fullmatch(move) else None
        if guess is None or not self._low <= guess <= self._high:
            return Reply(text=f"That is no whole number from {self._low} to {self._high}.", is_legal=False)
        self._num_left -= 1
        if guess == self._number:
            return Reply(text=f"Yes, {guess} is my number.", is_over=True, value=1.0)
        if not self._num_left:
            return Reply(text="That was your last guess, and it is wrong.", is_over=True)
        hint = "higher" if self._number > guess else "lower"
        return Reply(text=f"My number is {hint} than {guess}. Guesses left: {self._num_left}.")


MODEL, OTHER, FREE = "X", "O", "."

_LINES = (
    *((row, row + 1, row + 2) for row in (0, 3, 6)),
    *((column, column + 3, column + 6) for column in (0, 1, 2)),
    (0, 4, 8),
    (2, 4, 6),
)


class TicTacToe(Game):
    """Tic-tac-toe against a script. A win has value 1, a draw 0.5. The seed decides who begins."""

    def __init__(self, seed: int, *, opponent: str = "random") -> None:
        """``opponent`` is ``random`` or ``perfect``, which never loses."""
        if opponent not in ("random", "perfect"):
            raise ValueError(f"opponent = {opponent!r}; must be random or perfect")
        self._is_perfect = opponent == "perfect"
        self._rng = random.Random(seed)
        self._board = FREE * 9
        if self._rng.random() < 0.5:
            self._answer()

    @property
    def opening(self) -> str:
        return (
            f"Let us play three in a row. You are {MODEL}, I am {OTHER}, and the fields are numbered 1 to 9, "
            f"row by row. {HOW_TO_MOVE}, such as [5].\n{self._shown()}\nIt is your move."
        )

    def play(self, move: str) -> Reply:
        field = int(move) - 1 if move in tuple("123456789") else None
        if field is None or self._board[field] != FREE:
            return Reply(text=f"That is no free field.\n{self._shown()}", is_legal=False)
        self._board = _with(self._board, field, MODEL)
        if winner(self._board) == MODEL:
            return Reply(text=f"{self._shown()}\nYou have won.", is_over=True, value=1.0)
        if FREE in self._board:
            self._answer()
        if winner(self._board) == OTHER:
            return Reply(text=f"{self._shown()}\nI have won.", is_over=True)
        if FREE not in self._board:
            return Reply(text=f"{self._shown()}\nIt is a draw.", is_over=True, value=0.5)
        return Reply(text=f"{self._shown()}\nIt is your move.")

    def _answer(self) -> None:
        fields = free_fields(self._board)
        if self._is_perfect:
            worth = {field: -_worth(_with(self._board, field, OTHER), MODEL) for field in fields}
            fields = [field for field in fields if worth[field] == max(worth.values())]
        self._board = _with(self._board, self._rng.choice(fields), OTHER)

    def _shown(self) -> str:
        return "\n".join(self._board[row : row + 3] for row in (0, 3, 6))


def winner(board: str) -> str | None:
    """Return the mark with three in a row, or None."""
    for one, two, three in _LINES:
        if board[one] != FREE and board[one] == board[two] == board[three]:
            return board[one]
    return None


def free_fields(board: str) -> list[int]:
    """Return the indices of the free fields, 0 to 8."""
    return [field for field, mark in enumerate(board) if mark == FREE]


@functools.cache
def _worth(board: str, to_move: str) -> int:
    """Return the value of the board to the side to move, 1, 0 or -1, under perfect play (negamax)."""
    if winner(board) is not None:
        return -1
    other = OTHER if to_move == MODEL else MODEL
    return max((-_worth(_with(board, field, to_move), other) for field in free_fields(board)), default=0)


def _with(board: str, field: int, mark: str) -> str:
    return board[:field] + mark + board[field + 1 :]


STEPS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}

Cell = tuple[int, int]
"""Column from the west and row from the north, both from 0."""


class Maze(Game):
    """Walk from S to G in a maze whose map is shown. Exactly one path connects any two cells."""

    def __init__(self, seed: int, *, width: int = 4, height: int = 4, spare_moves: int = 10) -> None:
        """``spare_moves`` is the number of moves allowed beyond the length of the path."""
        if not (2 <= width <= 30 and 2 <= height <= 30 and spare_moves >= 0):
            raise ValueError(
                f"width = {width}, height = {height}, spare_moves = {spare_moves}; must be 2 to 30 cells, "
                "and 0 or more moves"
            )
        rng = random.Random(seed)
        self._width, self._height = width, height
        self._open = self._grow(rng)
        cells = [(column, row) for row in range(height) for column in range(width)]
        self._at, self._goal = rng.sample(cells, 2)
        self._num_left = self._num_steps(self._at, self._goal) + spare_moves

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
        """Return the map of the maze, with cells at odd columns and rows and walls between them."""
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
        """Return the pairs of neighbors without a wall: a random spanning tree, by depth-first search."""
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
        """Return the length of the path between two cells."""
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


GAMES: dict[str, Callable[..., Game]] = {"guess_number": GuessNumber, "tic_tac_toe": TicTacToe, "maze": Maze}


def begin(name: str, seed: int, **options: Any) -> Game:
    """Return a new game.

    Raises:
        ValueError: there is no such game, or an option is invalid.
    """
    if name not in GAMES:
        raise ValueError(f"game = {name!r}; must be one of {', '.join(GAMES)}")
    return GAMES[name](seed, **options)


def problems(split: str, seed: int, game: str = "guess_number", **options: Any) -> Iterator[dict[str, Any]]:
    """Yield an infinite sequence of games, each with its own seed, which is part of the prompt."""
    index = 0
    while True:
        # 48 bits, so that two games of a run almost never have the same seed.
        own = int.from_bytes(hashlib.sha256(f"{split} {seed} {index}".encode()).digest()[:6])
        opening = begin(game, own, **options).opening
        # The answer is not used: the environment computes the score.
        record = {"question": f"Game {own}. {opening}", "answer": "won"}
        yield record | {"game": game, "seed": own, "options": options}
        index += 1


class PlayGame(fa.Environment):
    """Plays a task's game with the model, one move per turn. The score is the value of the game.

    The penalty ``illegal_moves`` counts turns without a move and illegal moves.
    """

    def __init__(self, max_illegal_moves: int = 3) -> None:
        """More than ``max_illegal_moves`` illegal moves end the game with score 0."""
        self._max_illegal_moves = max_illegal_moves

    async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
        record = task.record
        if "game" not in record:
            raise ValueError(f"task {task.task_id!r} is no game of examples.agents.games.problems")
        game = begin(record["game"], record["seed"], **record["options"])
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        num_illegal = 0
        while True:
            turn = await agent.respond(messages)
            move = read_move(turn.text)
            reply = None if move is None else game.play(move)
            if reply is None or not reply.is_legal:
                num_illegal += 1
            penalties = {"illegal_moves": float(num_illegal)}
            if num_illegal > self._max_illegal_moves:
                return fa.Score(0.0, False, penalties=penalties)
            if reply is not None and reply.is_over:
                return fa.Score(reply.value, reply.value == 1.0, penalties=penalties)
            messages += [turn.message, {"role": "user", "content": NO_MOVE if reply is None else reply.text}]


def read_move(text: str) -> str | None:
    """Return the last text in square brackets on one line, stripped; None if there is none."""
    found = _MOVE.findall(text[-MAX_READ_CHARACTERS:])
    return found[-1].strip() if found else None
