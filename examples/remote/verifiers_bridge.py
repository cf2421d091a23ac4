"""Runs Verifiers environments for ``kind: remote`` (docs/remote.md).

    .venv-verifiers/bin/python examples/remote/verifiers_bridge.py 9000 env.toml

It runs in a Python environment with Verifiers 0.4.0 (requirements/verifiers.lock), and does not import
forgeasync. ``env.toml`` is a file for ``vf-eval @ env.toml``, of which only the table ``env`` is used. The
harness samples through the episode's session. The score is the sum of the weighted rewards.
"""

import argparse
import asyncio
import math
import os
import re
import socket
import tomllib
from pathlib import Path

import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

# Limits of the parts of a score, as in forgeasync/rollouts/score.py and forgeasync/config/rewards.py.
MAX_PARTS = 64
LARGEST = 1e30
LEFT_OUT = "num_parts_left_out"
"""Part of a score with the number of rewards and metrics that were left out."""
PART_NAME = re.compile(r"[A-Za-z0-9][\w.\-/]{0,99}", re.ASCII)
OTHER_METRICS = {"mean", "std", "scored_mean", "num_retried", "num_failed", "num_deferred", "num_discarded"}
OTHER_METRICS |= {"num_queued", "num_in_flight", "num_early", LEFT_OUT}
"""Names that are reserved for other metrics."""


def failed(problem: str, ending: str = "environment_crash") -> dict:
    """Return the reply for an episode without a score."""
    return {"ending": ending, "problem": " ".join(problem.split())}


class Bridge:
    """Runs episodes in one Verifiers environment."""

    def __init__(self, env: vf.Env) -> None:
        self.env = env
        self.running: dict[str, asyncio.Task] = {}

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def post(self, request: Request) -> JSONResponse:
        asked = await request.json()
        running = self.running[asked["episode"]] = asyncio.create_task(self.run(asked))
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            del self.running[asked["episode"]]
        return JSONResponse(failed("it was cancelled") if running.cancelled() else running.result())

    async def delete(self, request: Request) -> JSONResponse:
        if running := self.running.get(request.path_params["episode"]):
            running.cancel()
        return JSONResponse({})

    async def run(self, asked: dict) -> dict:
        """Run one episode; return the reply."""
        # Verifiers reads keys from environment variables, and does not pass those named API_KEY to harnesses.
        variable = f"FORGEASYNC_API_KEY_{asked['episode']}"
        os.environ[variable] = asked["api_key"]
        try:
            task_type = vf.task_type(self.env.config.taskset.id)
            data = task_type.data_type().model_validate(asked["task"])
            (slot,) = self.env.slots(task_type(data, self.env.config.taskset.task))
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            episode = await self.env.run_slot(slot, vf.ModelContext(model=asked["model"], client=client))
            return reply_of(episode, asked["base_url"])
        except Exception as error:
            # An exception in an environment's code ends only this episode.
            return failed(f"{type(error).__name__}: {error}")
        finally:
            del os.environ[variable]


def reply_of(episode: vf.Episode, base_url: str) -> dict:
    """Return the reply for a finished episode; ``base_url`` is the session that sampled its turns."""
    if not episode.ok:
        return failed(*why_not_ok(episode))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        return failed(f"the episode has {len(trained)} traces that train ({names}); must have one")
    for trace in episode.traces:
        client = trace.agent.config.client
        if not trace.agent.trainable and trace.calls and client is not None and client.base_url == base_url:
            return failed(
                f"agent {trace.agent.name!r}, which does not train, was sampled by the policy; give it a "
                "client of its own in the config of the environment"
            )
    (trace,) = trained
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if not rewards:
        return failed(
            "there is no reward: the task has no function marked as reward, or was not scored (stop "
            f"condition {trace.stop_condition!r})"
        )
    if not math.isfinite(trace.reward):
        return failed(f"the rewards are {rewards}; must be finite")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"score": trace.reward, "parts": parts_of([*rewards.items(), *metrics.items()])}


def why_not_ok(episode: vf.Episode) -> tuple[str, str]:
    """Return a description of an episode's errors, and its ending."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    words = [f"{error.type}: {error.message}" for error in errors[-3:]]
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        words.append("a deadline of Verifiers has passed")
    # Error codes with which a session refuses a turn; Verifiers' errors quote the session's answers.
    for code, ending in (("too_many_turns", "max_turns"), ("context_length_exceeded", "length")):
        if any(f'"{code}"' in error.message for error in errors):
            return "; ".join(words), ending
    return "; ".join(words) or "Verifiers does not say why", "environment_crash"


def parts_of(numbers: list[tuple[str, float]]) -> dict[str, float]:
    """Return the numbers that are valid parts of a score, and the count of the others."""
    parts: dict[str, float] = {}
    for name, value in numbers:
        is_good = PART_NAME.fullmatch(name) and name not in OTHER_METRICS and abs(value) <= LARGEST
        if is_good and name not in parts and len(parts) < MAX_PARTS - 1:
            parts[name] = float(value)
    num_left_out = len(numbers) - len(parts)
    return parts | ({LEFT_OUT: float(num_left_out)} if num_left_out else {})


async def main() -> None:
    parser = argparse.ArgumentParser(description="Runs environments of Verifiers for kind: remote.")
    parser.add_argument("port", type=int, help="where to listen on 127.0.0.1; 0: any free port")
    parser.add_argument("config", type=Path, help="TOML file with a table env, as vf-eval reads it")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    if "env" not in config:
        parser.error(f"{arguments.config} has no table env, such as [env.taskset]")
    env = vf.load_environment(vf.resolve_env_config(config["env"]))
    bridge = Bridge(env)
    routes = [
        Route("/health", bridge.health),
        Route("/episodes", bridge.post, methods=["POST"]),
        Route("/episodes/{episode}", bridge.delete, methods=["DELETE"]),
    ]
    listener = socket.create_server(("127.0.0.1", arguments.port))
    async with env.serving():
        print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main())
