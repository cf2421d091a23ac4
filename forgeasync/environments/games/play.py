"""The environment of ``kind: game``: plays a task's game with the model, one move in every turn."""

from forgeasync.config import PlayGames
from forgeasync.environments.environment import Agent, Environment
from forgeasync.environments.games.game import HOW_TO_MOVE, read_move
from forgeasync.environments.games.problems import game_of
from forgeasync.environments.messages import Message
from forgeasync.rollouts import Score, Task

NO_MOVE = f"I see no move. {HOW_TO_MOVE}."


class GameEnvironment(Environment):
    """The score is what the game was worth; ``is_correct`` says that it was worth 1.

    ``illegal_moves`` among the penalties counts moves that could not be read or made.
    """

    def __init__(self, section: PlayGames) -> None:
        self._section = section

    async def rollout(self, task: Task, agent: Agent) -> Score:
        game = game_of(task)
        messages: list[Message] = []
        if self._section.system_prompt is not None:
            messages.append({"role": "system", "content": self._section.system_prompt})
        messages.append({"role": "user", "content": task.prompt})
        num_illegal = 0
        while True:
            turn = await agent.respond(messages)
            move = read_move(turn.text)
            reply = None if move is None else game.play(move)
            penalties = {"illegal_moves": float(num_illegal)}
            if reply is not None and reply.is_over:
                return Score(reply.value, reply.value == 1.0, penalties=penalties)
            if reply is None or not reply.is_legal:
                num_illegal += 1
                if num_illegal > self._section.max_illegal_moves:
                    penalties = {"illegal_moves": float(num_illegal)}
                    return Score(0.0, False, penalties=penalties)
            messages += [turn.message, {"role": "user", "content": NO_MOVE if reply is None else reply.text}]
