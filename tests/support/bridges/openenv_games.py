"""OpenEnv environments for tests, which run in the environment of requirements/openenv.lock.

    python openenv_games.py PORT

/words: the model says words, as text; /single: the same with one session; /letters: any word has a reward.
/sums: it adds numbers, by actions with a schema. /tools: it adds them by an MCP tool. What goes wrong depends
on what the model does.
"""

import os
import socket
import sys
from typing import Literal

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Environment, MCPEnvironment, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

LAST = 3


class Say(Action):
    message: str = Field(description="What to say")


class Said(Observation):
    echo: str = ""
    num_left: int = 0


class Words(Environment[Say, Said, State]):
    """Three words; each one that is the seed's number is worth 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self._seed, self._state = seed, State(episode_id=episode_id)
        return Said(echo=f"say {seed}", num_left=LAST, metadata={"hidden": "answer"})

    def step(self, action, timeout_s=None, **more):
        match action.message:
            case "raise":
                raise KeyError("no such word")
            case "nan":
                return Said(echo="x", reward=float("nan"), done=True)
            case "die":
                os._exit(3)
            case "flood":
                return Said(echo="x" * 40_000_000)
        self._state.step_count += 1
        num_left = LAST - self._state.step_count
        return Said(
            echo=f"you said {action.message}",
            num_left=num_left,
            reward=float(action.message == str(self._seed)),
            done=num_left == 0,
        )

    @property
    def state(self):
        return self._state


class Letters(Words):
    """Every word is worth the number of its different characters."""

    def step(self, action, timeout_s=None, **more):
        said = super().step(action)
        said.reward = len(set(action.message))
        return said


class Add(Action):
    """Add a number to the sum."""

    amount: int = Field(ge=-9, le=9)
    sign: Literal["plus", "minus"] = "plus"


class Total(Observation):
    total: int = 0
    goal: int = 0


class Sums(Environment[Add, Total, State]):
    """Reach the seed's number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._total, self._goal = 0, 0

    def reset(self, seed=None, episode_id=None, **more):
        self._total, self._goal = 0, seed
        return Total(total=0, goal=seed)

    def step(self, action, timeout_s=None, **more):
        self._total += action.amount if action.sign == "plus" else -action.amount
        is_done = self._total == self._goal
        return Total(total=self._total, goal=self._goal, reward=1.0 if is_done else -0.25, done=is_done)

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    """Find the number by a tool; the sum that is the seed's number ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("sums")

        @mcp.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            if a < 0:
                raise ValueError("a is below zero")
            return a + b

        super().__init__(mcp)
        self._goal = 0

    def reset(self, seed=None, episode_id=None, **more):
        self._goal = seed
        return Observation(metadata={"hidden": seed})

    def _judged(self, action, observation):
        if isinstance(action, CallToolAction) and isinstance(observation, CallToolObservation):
            arguments = action.arguments
            is_done = arguments.get("a", 0) + arguments.get("b", 0) == self._goal
            observation.reward, observation.done = float(is_done), is_done
        return observation

    def step(self, action, timeout_s=None, **more):
        return self._judged(action, super().step(action, timeout_s=timeout_s, **more))

    async def step_async(self, action, timeout_s=None, **more):
        return self._judged(action, await super().step_async(action, timeout_s=timeout_s, **more))

    def _step_impl(self, action, timeout_s=None, **more):
        raise NotImplementedError

    @property
    def state(self):
        return State()


GAMES = {
    "words": ((Words, Say, Said), 8),
    "single": ((Words, Say, Said), 1),
    "letters": ((Letters, Say, Said), 8),
    "sums": ((Sums, Add, Total), 8),
    "tools": ((Tools, CallToolAction, CallToolObservation), 8),
}
"""With the number of sessions that each has at once."""


if __name__ == "__main__":
    app = FastAPI()
    for name, (parts, max_sessions) in GAMES.items():
        app.mount(f"/{name}", create_app(*parts, env_name=name, max_concurrent_envs=max_sessions))
    # It hangs up on clients that do not answer its pings: sooner than by default, so that a test can see it.
    config = uvicorn.Config(app, ws_ping_interval=0.5, ws_ping_timeout=0.5, ws_max_size=2**26)
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run([listener])
