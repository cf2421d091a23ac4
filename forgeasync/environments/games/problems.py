"""Games as tasks: a game is its section and a seed, which the task's record carries."""

import hashlib
from collections.abc import Iterator, Mapping, Set
from typing import Any

from pydantic import TypeAdapter, ValidationError

from forgeasync.config import GameSection, GameSource, GuessNumber, Maze, TicTacToe
from forgeasync.environments.games.game import Game
from forgeasync.environments.games.guess_number import GuessNumberGame
from forgeasync.environments.games.maze import MazeGame
from forgeasync.environments.games.tic_tac_toe import TicTacToeGame
from forgeasync.environments.sources import HELD_OUT_SEED, TrainingDraw
from forgeasync.environments.stored_tasks import StoredTasks
from forgeasync.rollouts import Task

_SECTION: TypeAdapter[GameSection] = TypeAdapter(GameSection)


def build_game(section: GameSection, seed: int) -> Game:
    """Return a game before its first move."""
    match section:
        case GuessNumber():
            return GuessNumberGame(section, seed)
        case TicTacToe():
            return TicTacToeGame(section, seed)
        case Maze():
            return MazeGame(section, seed)


def game_of(task: Task) -> Game:
    """Return the game of a task before its first move.

    Raises:
        ValueError: the task comes from a source of another kind.
    """
    try:
        seed = task.record["seed"]
        section = _SECTION.validate_python(task.record["game"])
    except (KeyError, ValidationError) as error:
        raise ValueError(f"task {task.task_id!r} is no game: its source must be of kind 'game'") from error
    return build_game(section, seed)


class GameProblems:
    """Draws games by hashed seeds; all of them have different texts, since each names its number."""

    def __init__(self, source: GameSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        self._section = source.game
        self._num_train = num_train
        self._num_held_out = num_held_out
        self._seed = seed

    def held_out(self) -> list[Task]:
        """Draw games by a fixed seed."""
        games = self._games("held_out", HELD_OUT_SEED)
        return [next(games) for _ in range(self._num_held_out)]

    def train(self, never: Set[str]) -> TrainingDraw:
        """Draw games by the run's seed."""
        found = StoredTasks()
        num_skipped = 0
        for task in self._games(f"train/seed{self._seed}", self._seed):
            if len(found) == self._num_train:
                break
            if task.prompt in never:
                num_skipped += 1
            else:
                found.append(task)
        return TrainingDraw(tasks=found, num_skipped_held_out=num_skipped)

    def _games(self, group: str, seed: int) -> Iterator[Task]:
        index = 0
        while True:
            # 48 bits: two games of a run with the same number are next to impossible.
            number = int.from_bytes(hashlib.sha256(f"{group} {seed} {index}".encode()).digest()[:6])
            record: Mapping[str, Any] = {"game": self._section.model_dump(mode="json"), "seed": number}
            yield Task(
                task_id=f"{self._section.kind}/{group}/{index}",
                prompt=f"Game {number}. {build_game(self._section, number).opening}",
                answer="",
                source_index=index,
                source=self._section.kind,
                record=record,
            )
            index += 1
