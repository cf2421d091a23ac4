"""Runs OpenEnv environments for ``kind: remote`` (docs/remote.md).

    .venv-openenv/bin/python examples/remote/openenv_bridge.py 9000 --url http://127.0.0.1:8000

It runs in a Python environment with OpenEnv 0.10.0 (requirements/openenv.lock), and does not import
forgeasync. Every episode gets a session of the OpenEnv server at ``--url``. The bridge drives the
conversation: each turn of the model is an action, and the next message is the observation.
"""

import argparse
import asyncio
import contextlib
import json
import math
import socket

import httpx
import jsonschema
import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from websockets.exceptions import WebSocketException

ENDINGS = {"too_many_turns": "max_turns", "context_length_exceeded": "length"}
"""Endings by the error code with which a session refuses a turn."""


class Ended(Exception):
    """Ends an episode without a score; the arguments are the ending and a description of the problem."""


class Bridge:
    """Runs episodes in the environments of one OpenEnv server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.http = httpx.AsyncClient(timeout=None, trust_env=False)
        self.running: dict[str, asyncio.Task] = {}

    async def health(self, request: Request) -> JSONResponse:
        """Forward the health check to the OpenEnv server."""
        reply = await self.http.get(f"{self.options.url}/health")
        return JSONResponse({"status": reply.text}, status_code=reply.status_code)

    async def post(self, request: Request) -> JSONResponse:
        asked = await request.json()
        running = self.running[asked["episode"]] = asyncio.create_task(self.run(asked))
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            del self.running[asked["episode"]]
        return JSONResponse({"ending": "environment_crash"} if running.cancelled() else running.result())

    async def delete(self, request: Request) -> JSONResponse:
        if running := self.running.get(request.path_params["episode"]):
            running.cancel()
        return JSONResponse({})

    async def run(self, asked: dict) -> dict:
        """Run one episode; return the reply."""
        try:
            async with self.client() as session:
                first = await self.reset(session, asked["task"])
                session._ensure_connected = stay_connected
                return await self.play(asked, session, first)
        except Ended as error:
            ending, problem = error.args
        except (WebSocketException, httpx.HTTPError, OSError) as error:
            ending, problem = "infrastructure", f"a connection is lost: {type(error).__name__}: {error}"
        except Exception as error:
            # An error of the environment ends only this episode.
            is_full = has_code(error, "CAPACITY_REACHED")
            ending = "infrastructure" if is_full else "environment_crash"
            problem = f"{type(error).__name__}: {error}"
        return {"ending": ending, "problem": problem}

    def client(self) -> GenericEnvClient:
        # No deadline here: a step may take long and block the server meanwhile. The run's deadlines apply.
        limits = {"connect_timeout_s": self.options.open_s, "message_timeout_s": math.inf}
        return GenericEnvClient(
            self.options.url, **limits, max_message_size_mb=16.0, websocket_ping_interval_s=None
        )

    async def reset(self, session: GenericEnvClient, task: dict) -> StepResult:
        """Reset the environment for a task; wait up to ``--open_s`` while all server sessions are in use."""
        needed = [*self.options.reset_fields, *["prompt"] * (self.options.opening != "observation")]
        if missing := [name for name in needed if name not in task]:
            raise Ended("environment_crash", f"environment.task_fields must have {', '.join(missing)} too")
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self.options.open_s
        while True:
            try:
                return await session.reset(**{name: task[name] for name in self.options.reset_fields})
            except RuntimeError as error:
                if loop.time() > give_up_s or not has_code(error, "CAPACITY_REACHED"):
                    raise
            await session.disconnect()
            await asyncio.sleep(0.5)

    async def play(self, asked: dict, session: GenericEnvClient, first: StepResult) -> dict:
        options = self.options
        tools = await self.tools(session)
        opening = [] if options.opening == "observation" else [asked["task"]["prompt"]]
        opening += [] if options.opening == "prompt" else [self.cut(self.shown(first.observation))]
        messages = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
        messages.append({"role": "user", "content": "\n\n".join(opening)})
        rewards, parts, is_done = [], {"failed_calls": 0.0, "unused_calls": 0.0}, first.done
        for _ in range(options.max_rounds):
            if is_done:
                break
            message = await self.turn(asked, messages, tools)
            messages.append(message)
            attempts = self.attempts(message, tools)
            if not attempts:
                break
            for answer, action in attempts:
                if is_done:
                    parts["unused_calls"] += 1.0
                    continue
                try:
                    result = None if isinstance(action, str) else await session.step(action)
                except RuntimeError as error:
                    if not has_code(error, "VALIDATION_ERROR"):
                        raise
                    result, action = None, f"this is no action of the environment: {self.wrong(action)}"
                if result is None:
                    has_failed, text = True, f"Error: {action}"
                else:
                    is_done = result.done
                    rewards += [] if result.reward is None else [result.reward]
                    has_failed, text = self.told(result.observation)
                parts["failed_calls"] += has_failed
                messages.append(answer | {"content": self.cut(text)})
        if is_done and not rewards:
            # OpenEnv also encodes NaN as null.
            raise ValueError("the episode has ended, but no step had a reward that is a number")
        score = math.fsum(rewards) if options.reward == "sum" else float([0.0, *rewards][-1])
        return {"score": score, "parts": parts}

    async def turn(self, asked: dict, messages: list[dict], tools: dict[str, dict]) -> dict:
        """Sample the model's next turn; return its message."""
        body = {"model": asked["model"], "messages": messages}
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools.values()]
        headers = {"Authorization": f"Bearer {asked['api_key']}"}
        reply = await self.http.post(f"{asked['base_url']}/chat/completions", json=body, headers=headers)
        if reply.status_code != 200:
            endings = [ending for code, ending in ENDINGS.items() if f'"{code}"' in reply.text]
            problem = f"the session refuses a turn: {reply.status_code}: {reply.text}"
            raise Ended([*endings, "environment_crash"][0], problem)
        message = reply.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}

    async def tools(self, session: GenericEnvClient) -> dict[str, dict]:
        """Return the tools that the model can call, by name."""
        if self.options.action_kind == "text":
            return {}
        if self.options.action_kind == "step":
            properties = {**self.schema["properties"]}
            properties.pop("metadata", None)
            text = self.schema.get("description", "Take an action in the environment.")
            parameters = {**self.schema, "properties": properties}
            return {"step": {"name": "step", "description": text, "parameters": parameters}}
        listed = (await session.step({"type": "list_tools"})).observation.get("tools")
        if not listed:
            raise ValueError("the environment lists no tools; --action.kind must be step or text")
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        return {tool["name"]: {names[key]: tool[key] for key in names} for tool in listed}

    def attempts(self, message: dict, tools: dict[str, dict]) -> list[tuple[dict, dict | str]]:
        """Return the actions of a turn, each as the reply message without content, and the action.

        An invalid action is replaced by an error text. The list is empty if the model has stopped acting.
        """
        if self.options.action_kind == "text":
            return [({"role": "user"}, {self.options.action_field: message.get("content", "")})]
        attempts: list[tuple[dict, dict | str]] = []
        for call in message.get("tool_calls", ()):
            name, action = call["function"]["name"], json_object(call["function"]["arguments"])
            if name not in tools:
                action = f"there is no tool {name!r}; tools: {', '.join(sorted(tools))}"
            elif action is None:
                action = "the arguments are not a JSON object"
            elif self.options.action_kind == "tools":
                action = {"type": "call_tool", "tool_name": name, "arguments": action}
            attempts.append(({"role": "tool", "tool_call_id": call["id"]}, action))
        return attempts

    def wrong(self, action: dict) -> str:
        """Return the errors of an action by the server's schema, which the OpenEnv client does not report."""
        errors = jsonschema.Draft202012Validator(self.schema).iter_errors(action)
        return "; ".join(f"{'.'.join(map(str, one.path))}: {one.message}" for one in errors)

    def told(self, observation: dict) -> tuple[bool, str]:
        """Return whether a call has failed, and the text of the observation for the model."""
        if self.options.action_kind != "tools":
            return False, self.shown(observation)
        if error := observation.get("error"):
            return True, f"Error: {error['message']}"
        if self.options.observation_field is not None:
            return False, self.shown(observation)
        result = observation.get("result")
        if not isinstance(result, dict) or not isinstance(result.get("content"), list):
            return False, as_text(result)
        parts = [one.get("text", "[no text: cannot be shown]") for one in result["content"]]
        return bool(result.get("is_error")), "\n".join(parts)

    def shown(self, observation: dict) -> str:
        field = self.options.observation_field
        if field is None:
            return as_text({name: one for name, one in observation.items() if name != "metadata"})
        if field not in observation:
            raise ValueError(f"--observation_field {field}, but the observation has {', '.join(observation)}")
        return as_text(observation[field])

    def cut(self, text: str) -> str:
        # Tokenizers reject lone surrogates.
        text, most = text.encode(errors="replace").decode(), self.options.max_result_characters
        return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters were cut]"

    async def check(self) -> None:
        """Check that the server has the fields and tools that the options name.

        Raises:
            ValueError: it lacks one of them.
        """
        schemas = (await self.http.get(f"{self.options.url}/schema")).raise_for_status().json()
        self.schema = schemas["action"]
        fields = {"action": self.options.action_field}
        if self.options.action_kind == "tools":
            async with self.client() as session:
                await self.tools(session)
        else:
            fields["observation"] = self.options.observation_field
        for part, name in fields.items():
            known = schemas[part]["properties"]
            if name not in (None, *known):
                raise ValueError(f"{name} is no field of an {part}; known: {', '.join(known)}")


async def stay_connected() -> None:
    """Replaces a client's reconnection, because a new connection would have a session without a reset."""


def has_code(error: Exception, code: str) -> bool:
    """Return whether a client's error has this error code of the server."""
    return str(error).endswith(f"(code: {code})")


def json_object(text: str) -> dict | None:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    return None


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs environments of OpenEnv for kind: remote.")
    add = parser.add_argument
    add("port", type=int, help="where to listen on 127.0.0.1; 0: any free port")
    add("--url", required=True, help="the OpenEnv server: http://127.0.0.1:8000")
    add("--action.kind", dest="action_kind", choices=["step", "tools", "text"], default="step")
    add("--action.field", dest="action_field", help="field of an action that is the turn's text")
    add("--observation_field", help="field of an observation that the model is told; default: all, as JSON")
    add("--reset_fields", nargs="*", default=["seed"], help="fields of the task that reset gets")
    add("--opening", choices=["prompt", "observation", "both"], default="both", help="the first message")
    add("--system_prompt")
    add("--max_rounds", type=int, default=50, help="most turns of the model")
    add("--max_result_characters", type=int, default=20_000, help="most of an observation that is told")
    add("--open_s", type=float, default=30.0, help="time to get a session of the server")
    add("--reward", choices=["sum", "last"], default="sum", help="what of the steps' rewards is the score")
    options = parser.parse_args()
    options.url = options.url.rstrip("/")
    if (options.action_kind == "text") != (options.action_field is not None):
        parser.error("--action.kind text needs --action.field, and the other kinds have none")
    return options


async def main() -> None:
    bridge = Bridge(read_options())
    try:
        await bridge.check()
    except Exception as error:
        raise SystemExit(f"{bridge.options.url} cannot be used: {type(error).__name__}: {error}") from None
    routes = [
        Route("/health", bridge.health),
        Route("/episodes", bridge.post, methods=["POST"]),
        Route("/episodes/{episode}", bridge.delete, methods=["DELETE"]),
    ]
    listener = socket.create_server(("127.0.0.1", bridge.options.port))
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main())
