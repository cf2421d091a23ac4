"""Games, played by scripts that know how to win, how to lose and how to cheat."""

import asyncio
import itertools
import random
from collections import deque
from typing import Any

import pytest

import forgeasync as fa
from examples.agents import games
from forgeasync.config import DataSection, PythonSource
from forgeasync.environments import build_source
from forgeasync.testing import ScriptedAgent
from tests.support.buffer_world import make_task


def problems_of(game: str, **options: Any) -> PythonSource:
    return PythonSource(factory="examples.agents.games.problems", options={"game": game} | options)


def test_a_move_is_the_last_text_in_brackets() -> None:
    moves = {"I say [50].": "50", "[1] or rather [ 2 ]": "2", "[[7]]": "7"}
    assert {text: games.read_move(text) for text in moves} == moves
    none = ("no move", "[" * 10_000, "[a\nb]", f"[{'x' * 41}]", "[1]" + " " * games.MAX_READ_CHARACTERS, "[]")
    assert [text for text in none if games.read_move(text) is not None] == []


def test_halving_finds_every_number_in_seven_guesses() -> None:
    for seed in range(300):
        game = games.GuessNumber(seed)
        low, high = 1, 100
        reply = None
        for _ in range(7):
            middle = (low + high) // 2
            reply = game.play(str(middle))
            if reply.is_over:
                break
            low, high = (middle + 1, high) if "higher" in reply.text else (low, middle - 1)
        assert reply is not None and reply.value == 1.0


def test_guesses_run_out_and_nonsense_costs_none() -> None:
    game = games.GuessNumber(5, low=1, high=100, max_guesses=2)
    for nonsense in ("", "x", "101", "-1", "5.0", "1" * 40, "٥", "1_0"):
        assert not game.play(nonsense).is_legal
    wrong = [number for number in range(1, 101) if games.GuessNumber(5).play(str(number)).value == 0]
    assert len(wrong) == 99
    assert not game.play(str(wrong[0])).is_over
    last = game.play(str(wrong[1]))
    assert last.is_over and last.value == 0.0


def board_of(text: str) -> str:
    """The board that a text ends with."""
    marks = {games.MODEL, games.OTHER, games.FREE}
    return "".join(line for line in text.splitlines() if len(line) == 3 and set(line) <= marks)


def play_out(game: games.TicTacToe, rng: random.Random) -> games.Reply:
    """Play at random to the end, checking every board."""
    text = game.opening
    while True:
        before = board_of(text)
        assert len(before) == 9
        field = rng.choice(games.free_fields(before))
        reply = game.play(str(field + 1))
        after = board_of(reply.text)
        assert after[field] == games.MODEL
        changed = [index for index in range(9) if before[index] != after[index]]
        assert len(changed) == 2 - (reply.is_over and after.count(games.OTHER) == before.count(games.OTHER))
        if reply.is_over:
            worth = {games.MODEL: 1.0, games.OTHER: 0.0, None: 0.5}[games.winner(after)]
            assert reply.value == worth
            assert worth != 0.5 or games.FREE not in after
            return reply
        text = reply.text


@pytest.mark.parametrize(("opponent", "values"), [("perfect", {0.0, 0.5}), ("random", {0.0, 0.5, 1.0})])
def test_only_random_opponents_are_beaten_at_random(opponent: str, values: set[float]) -> None:
    rng = random.Random(0)
    assert {play_out(games.TicTacToe(seed, opponent=opponent), rng).value for seed in range(200)} == values


def test_taken_and_unknown_fields_change_nothing() -> None:
    game = games.TicTacToe(1)
    taken = board_of(game.play("5").text)
    for move in ("5", "0", "10", "x", "", "¹"):
        reply = game.play(move)
        assert not reply.is_legal and board_of(reply.text) == taken


def start_of(drawn: str) -> tuple[int, int]:
    (place,) = ((row.index("S"), y) for y, row in enumerate(drawn.splitlines()) if "S" in row)
    return place


def way_through(drawn: str) -> list[str]:
    """The commands from S to G, by a search on the drawn map."""
    lines, start = drawn.splitlines(), start_of(drawn)
    ways: dict[tuple[int, int], list[str]] = {start: []}
    waiting = deque([start])
    while waiting:
        x, y = waiting.popleft()
        if lines[y][x] == "G":
            return ways[(x, y)]
        for name, (east, south) in games.STEPS.items():
            there = (x + 2 * east, y + 2 * south)
            if lines[y + south][x + east] == " " and there not in ways:
                ways[there] = [*ways[(x, y)], name]
                waiting.append(there)
    raise AssertionError("no way leads to G")


@pytest.mark.parametrize(("width", "height"), [(2, 2), (4, 4), (7, 3), (30, 30)])
def test_the_drawn_map_leads_to_the_goal_in_as_many_moves_as_are_allowed(width: int, height: int) -> None:
    for seed in range(5):
        game = games.Maze(seed, width=width, height=height, spare_moves=0)
        *way, last = way_through(game.map())
        assert f"You have {len(way) + 1} moves" in game.opening
        assert not any(game.play(step).is_over for step in way)
        assert game.play(last.upper()) == games.Reply(text="You have reached G.", is_over=True, value=1.0)


def test_walls_cost_a_move_and_nonsense_costs_none() -> None:
    game = games.Maze(3, spare_moves=0)
    num_moves = len(way_through(game.map()))
    drawn = game.map()
    assert not game.play("up").is_legal
    wall = next(step for step in games.STEPS if step not in passages(drawn))
    replies = [game.play(wall) for _ in range(num_moves)]
    assert all("There is a wall" in reply.text for reply in replies)
    assert [reply.is_over for reply in replies] == [False] * (num_moves - 1) + [True]
    assert replies[-1].value == 0.0
    assert game.map() == drawn


def passages(drawn: str) -> set[str]:
    lines, (x, y) = drawn.splitlines(), start_of(drawn)
    return {name for name, (east, south) in games.STEPS.items() if lines[y + south][x + east] == " "}


@pytest.mark.parametrize("game", games.GAMES)
def test_a_source_draws_games_that_differ_and_can_be_built_again(game: str) -> None:
    data = DataSection(source=problems_of(game), num_train=200, num_held_out=50)
    first, second = build_source(data, seed=1), build_source(data, seed=2)
    assert first.held_out == second.held_out
    assert len(first.train) == 200 and len(first.held_out) == 50
    prompts = [task.prompt for task in (*first.train, *first.held_out, *second.train)]
    assert len(set(prompts)) == 450
    assert len({task.task_id for task in (*first.train, *first.held_out)}) == 250
    for task in itertools.islice(first.train, 20):
        assert task.prompt.endswith(games.begin(game, task.record["seed"]).opening)
    assert build_source(data, seed=1).train == first.train


@pytest.mark.parametrize("game", games.GAMES)
def test_moves_of_one_seed_are_the_same_again(game: str) -> None:
    once, again = games.begin(game, 8), games.begin(game, 8)
    for move in ("5", "1", "9"):
        assert once.play(move) == again.play(move)


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("chess", {}),
        ("guess_number", {"low": 3, "high": 3}),
        ("tic_tac_toe", {"opponent": "weak"}),
        ("maze", {"width": 31}),
    ],
)
def test_what_is_no_game_is_refused_with_its_name(game: str, options: dict[str, Any]) -> None:
    data = DataSection(source=problems_of(game, **options), num_train=1, num_held_out=1)
    name = next(iter(options), "game")
    with pytest.raises(ValueError, match=rf"data\.source\.factory.*ValueError: .*{name} = "):
        build_source(data, seed=0)


def play(
    game: str, turns: list[str], *, max_illegal_moves: int = 3, **options: Any
) -> tuple[fa.Score, ScriptedAgent]:
    data = DataSection(source=problems_of(game, **options), num_train=1, num_held_out=1)
    task = build_source(data, seed=0).train[0]
    agent = ScriptedAgent(*turns)
    return asyncio.run(games.PlayGame(max_illegal_moves).rollout(task, agent)), agent


def test_an_episode_is_worth_what_its_game_was() -> None:
    score, agent = play("guess_number", [f"[{number}]" for number in range(1, 101)], max_guesses=100)
    assert (score.value, score.is_correct, dict(score.penalties)) == (1.0, True, {"illegal_moves": 0.0})
    assert [message["role"] for message in agent.heard[0]] == ["user"]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(agent.heard))
    score, _ = play("guess_number", ["[1]"], low=1, high=2, max_guesses=1)
    other, _ = play("guess_number", ["[2]"], low=1, high=2, max_guesses=1)
    assert {score.value, other.value} == {0.0, 1.0}


def test_illegal_moves_are_told_counted_and_end_the_game() -> None:
    score, agent = play("guess_number", ["hm", "[0]", "[x]", "never"], max_illegal_moves=2)
    assert (score.value, score.is_correct, dict(score.penalties)) == (0.0, False, {"illegal_moves": 3.0})
    told = [heard[-1]["content"] for heard in agent.heard[1:]]
    assert told == [games.NO_MOVE, "That is no whole number from 1 to 100."]


def test_other_tasks_are_refused() -> None:
    task = make_task(1)
    with pytest.raises(ValueError, match=f"{task.task_id!r} is no game"):
        asyncio.run(games.PlayGame().rollout(task, ScriptedAgent("[1]")))
