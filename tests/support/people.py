"""People who use a run that serves them, written with aiohttp and the unmodified openai SDK."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil

START_S = 240.0


class RunOver(Exception):
    """The server says that the run has ended, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where people are served."""

    url: str
    token: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def worker(self) -> int:
        """The process that listens there now."""
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                assert connection.pid is not None
                return connection.pid
        raise AssertionError("nobody listens")


async def found(file: Path) -> Place:
    """Wait until a run says where it serves."""
    deadline = time.monotonic() + START_S
    while not file.exists():
        assert time.monotonic() < deadline, "the run does not serve"
        await asyncio.sleep(0.1)
    assert file.stat().st_mode & 0o777 == 0o600
    return Place(**json.loads(file.read_text()))


@dataclass(slots=True, kw_only=True)
class People:
    """Many clients of one run."""

    place: Place
    http: aiohttp.ClientSession
    opened: Counter[bool] = field(default_factory=Counter)
    """By whether they train."""

    async def request(
        self, method: str, path: str, key: str | None, body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with self.http.request(method, self.place.url + path, headers=headers, json=body) as answer:
            return answer.status, await answer.json()

    async def ended(self, method: str, path: str, key: str, body: Any = None) -> None:
        """Make the last request of a session."""
        status, said = await self.request(method, path, key, body)
        if status == 410 and "the run that served it has ended" in said["error"]["message"]:
            raise RunOver
        assert status == 200, said

    async def open(self) -> dict[str, Any]:
        """Open a session as soon as the server can."""
        deadline = time.monotonic() + START_S
        while True:
            assert time.monotonic() < deadline
            status, body = await self.request("POST", "/sessions", self.place.token, {})
            if status == 201:
                self.opened[body["trains"]] += 1
                return body
            if body["error"]["code"] == "run_over":
                raise RunOver
            assert body["error"]["code"] == "starting", body
            await asyncio.sleep(0.2)

    async def chat(self, session: dict[str, Any], num_turns: int) -> str:
        """All that the model said."""
        messages: list[Any] = []
        async with openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=0
        ) as client:
            for number in range(num_turns):
                messages.append({"role": "user", "content": f"{number + 1} + {number + 2} ="})
                answer = await client.chat.completions.create(model="any", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return "".join(one["content"] for one in messages[1::2])

    async def judge(self, session: dict[str, Any], score: float) -> None:
        path = f"/sessions/{session['id']}/feedback"
        await self.ended("POST", path, session["api_key"], {"score": score})

    async def visit(self, number: int) -> None:
        """Open a session, talk for two or three turns, and say how good it was, or leave without a word."""
        session = await self.open()
        said = await self.chat(session, 2 + number % 2)
        if number % 5 == 4:
            await self.ended("DELETE", f"/sessions/{session['id']}", session["api_key"])
        else:
            await self.judge(session, float(len(set(said))))

    async def keep_coming(self, number: int) -> None:
        """Until the run is over."""
        try:
            while True:
                await self.visit(number)
                number += 1
        except (RunOver, aiohttp.ClientError, openai.APIConnectionError):
            return
        except openai.APIStatusError as error:
            assert error.status_code == 410, error
            return
