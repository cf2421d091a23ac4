"""A run that serves people: what they do trains, and nobody waits for training."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
import yaml

from forgeasync.config import dump_config
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.app_runs import finish, read_lines, start

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


Process = subprocess.Popen[str]
GROUPS_PER_STEP = 4
MAX_AGE = 1
REPORTS_S = 3.0
"""A worker's counts, which it reports once a second, have reached the controller after so long."""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer proc, kept sets and routing replay on, all rollouts written."""
    folder = tmp_path_factory.mktemp("served")
    config = yaml.safe_load(dump_config(tiny_config(write_tiny_model(folder / "model", scale=8.0))))
    config |= {
        "max_steps": 3,
        "max_off_policy_steps": MAX_AGE,
        "data": {"source": {"kind": "served"}, "num_train": 1, "num_held_out": 0},
        "environment": {"kind": "served"},
        "episodes": {"num_workers": 1},
        "evaluation": {"num_problems": 0},
        "sampling": {"max_response_tokens": 12, "top_k": 12, "top_p": 0.9, "temperature": 0.8},
        "algorithm": {"advantage": "reinforce_pp", "group_size": 1, "groups_per_step": GROUPS_PER_STEP},
        "buffer": {"stale_groups": "drop"},
        "logging": {"rollouts_per_step": 100},
        "serving": {"keep_texts": True},
    }
    config["trainer"]["parallel"] = {"num_procs": 1}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def check_files(run_dir: Path, token: str, num_steps: int) -> list[dict[str, float]]:
    """Every token of scored sessions trains once, unless it is too old, and the key is in one file alone."""
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    for line in steps:
        mine = [rollout for rollout in rollouts if rollout["step"] == line["step"]]
        assert len(mine) == GROUPS_PER_STEP
        # A person may take so long that the first tokens of a session are too old when it trains.
        oldest = line["policy_version"] - 1 - MAX_AGE
        spans = [(version, end - start) for one in mine for version, start, end in one["version_spans"]]
        num_young = sum(num_tokens for version, num_tokens in spans if version >= oldest)
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == num_young, "the trained tokens are exactly the sampled ones"
        young_share = num_young / sum(num_tokens for _, num_tokens in spans)
        assert line["off_policy/rejected_token_share"] == pytest.approx(1 - young_share)
        assert line.get("mismatch/fresh_logprob_abs_mean", 0.0) < 1e-5
        assert line["routing/recorded_share"] == 1.0
        assert line["dropped/bad_record"] == line["dropped/episode_failed"] == 0
        assert line["episode/num_rewritten_histories"] == 0
    for rollout in rollouts:
        (branch,) = rollout["episode_record"]["agents"][0]["branches"]
        assert [one["role"] for one in branch][:4] == ["user", "assistant"] * 2
        said = "".join(one["content"] for one in branch[1::2])
        assert rollout["reward"] == len(set(said)), "the person's verdict"
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    assert [file.name for file in files if token.encode() in file.read_bytes()] == ["serving.json"]
    assert steps[-1]["payload/num_bytes_held"] == 0
    return steps


async def use(process: Process, people: People) -> None:
    """Use up all tickets, be served all the same, then come until the run is over."""
    status, body = await people.request("POST", "/sessions", None)
    assert (status, body["error"]["code"]) == (401, "invalid_token")
    tickets, others = [], []
    while len(tickets) < (MAX_AGE + 1) * GROUPS_PER_STEP:
        session = await people.open()
        (tickets if session["trains"] else others).append(session)
        await asyncio.sleep(0.0 if session["trains"] else 0.1)
    others += [await people.open() for _ in range(3)]
    assert not any(session["trains"] for session in others), "the buffer lets no further group start"
    said = await asyncio.gather(*(people.chat(one, 2) for one in (*tickets, *others)))
    first, second = tickets[:2]
    for method, path in (("POST", "/feedback"), ("DELETE", "")):
        path = f"/sessions/{first['id']}{path}"
        assert (await people.request(method, path, second["api_key"], {"score": 1}))[0] == 401
    await asyncio.sleep(REPORTS_S)
    for session, text in zip(tickets, said, strict=False):
        await people.judge(session, float(len(set(text))))
    # Two steps train on these; the third needs visitors, and its metrics have what was reported by then.
    await asyncio.sleep(REPORTS_S)
    onlooker = others[-1]
    visitors = [asyncio.create_task(people.keep_coming(number)) for number in range(4)]
    path, ask = f"/sessions/{onlooker['id']}/v1/models", onlooker["api_key"]
    while (answer := await people.request("GET", path, ask))[0] == 200:
        assert process.poll() is None
        await asyncio.sleep(0.1)
    assert answer[0] == 410 and "the run that served it has ended" in answer[1]["error"]["message"]
    await asyncio.gather(*visitors)


async def serve(
    config_file: Path, run_dir: Path, use: Callable[[Process, People], Awaitable[None]], *overrides: str
) -> tuple[int, str, str, People]:
    """Exit code, stdout and stderr of a run that people use, and the people."""
    process = start(config_file, f"run_dir={run_dir}", *overrides, app="apps.serve")
    try:
        place = await found(run_dir / "serving.json")
        async with aiohttp.ClientSession() as http:
            people = People(place=place, http=http)
            await use(process, people)
    finally:
        code, out, err = finish(process)
    return code, out, err, people


@pytest.mark.exhaustive
async def test_people_are_served_and_trained_on(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err, people = await serve(config_file, run_dir, use)
    assert code == 0, err
    assert f"serving people: POST {people.place.url}/sessions" in out and "no held-out problems" in out
    last = check_files(run_dir, people.place.token, 3)[-1]
    assert last["serving/num_untrained_no_ticket"] >= 3
    assert last["serving/num_feedback"] >= 8 and last["serving/feedback_mean"] > 1
    assert 0 < last["serving/turn_p50_s"] <= last["serving/turn_p99_s"]
    assert last["serving/num_opened"] <= people.opened.total()


async def lose_worker(_: Process, people: People) -> None:
    """Have the worker killed while sessions are open, and be served again at the same address."""
    lost = [await people.open() for _ in range(6)]
    await asyncio.gather(*(people.chat(session, 2) for session in lost))
    worker = people.place.worker
    os.kill(worker, signal.SIGKILL)
    asking = f"/sessions/{lost[0]['id']}/v1/models"
    with pytest.raises(aiohttp.ClientError):
        while True:
            await people.request("GET", asking, lost[0]["api_key"])
    answer = None
    while answer is None:
        with contextlib.suppress(aiohttp.ClientError):
            answer = await people.request("GET", asking, lost[0]["api_key"])
        await asyncio.sleep(0.2)
    assert (answer[0], answer[1]["error"]["code"]) == (404, "session_not_found")
    assert people.place.worker != worker
    await asyncio.gather(*(people.keep_coming(number) for number in range(6)))


@pytest.mark.exhaustive
async def test_a_worker_that_dies_comes_back_at_the_same_address(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err, people = await serve(config_file, run_dir, lose_worker)
    assert code == 0, err
    assert "its episodes run again elsewhere" in out
    assert await found(run_dir / "serving.json") == people.place
    last = check_files(run_dir, people.place.token, 3)[-1]
    assert last["environment/num_restarted_workers"] == 1
    assert last["episode/ended_infrastructure"] >= 1


async def interrupt(process: Process, people: People) -> None:
    session = await people.open()
    await people.chat(session, 1)
    process.send_signal(signal.SIGINT)
    path = f"/sessions/{session['id']}/v1/models"
    while (answer := await people.request("GET", path, session["api_key"]))[0] == 200:
        await asyncio.sleep(0.05)
    assert answer[0] == 410 and "the run that served it has ended" in answer[1]["error"]["message"]
    with pytest.raises(aiohttp.ClientError):
        while (await people.request("GET", path, session["api_key"]))[0] == 410:
            await asyncio.sleep(0.05)


@pytest.mark.exhaustive
async def test_people_are_told_when_a_run_is_interrupted(config_file: Path, tmp_path: Path) -> None:
    """Texts are kept nowhere where the config does not say so."""
    run_dir = tmp_path / "run"
    code, _, err, _ = await serve(config_file, run_dir, interrupt, "serving.keep_texts=false")
    assert code == 130, err
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    assert not [file for file in files if b"1 + 2 =" in file.read_bytes()]
