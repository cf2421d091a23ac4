"""What the server answers, refuses and never lets through."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from forgeasync.plugins import viewer
from forgeasync.plugins.viewer import RunReader, application
from tests.support.ledgers import ledger_text
from tests.support.viewer_runs import asked, eventful_ledger, read, rollout_of, write_run

HOSTILE = '</script><img src=x onerror="alert(1)">\u202e\x1b[2J\u0000\ud800'


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[RunReader]:
    """Two runs that differ in their seeds, and one that was resumed and has a hostile text."""
    parent = tmp_path_factory.mktemp("runs")
    seeds = [write_run(parent / f"seed{seed}", num_steps=5, seed=seed) for seed in (0, 1)]
    other = write_run(parent / "other", num_steps=2)
    (other / "config.yaml").write_text("max_steps: 2\nlr: 3\n")
    (other / "ledger.jsonl").write_bytes(ledger_text(eventful_ledger()))
    record = rollout_of(2, 2, 0, HOSTILE) | {"steps": [[9, 0.5], [len(HOSTILE), None]], HOSTILE: HOSTILE}
    (other / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    return [read(folder) for folder in (*seeds, other)]


def client_of(*runs: RunReader) -> TestClient:
    return TestClient(TestServer(application(runs)))


async def test_every_question_is_answered(runs: list[RunReader]) -> None:
    answers = {}
    async with client_of(*runs) as client:
        for path in (
            *("runs", "glossary", "settings", "faults?run=1", "group?run=2&group=2"),
            *("groups?run=2&fate=undone", "rollouts?step=3", "rollout?number=0", "lanes", "worst?step=1"),
        ):
            response = await client.get(f"/api/{path}")
            assert response.status == 200, path
            answers[path.partition("?")[0]] = await response.json()
    assert [one["metrics"]["grad_norm"]["step"] for one in answers["runs"]["runs"]] == [5, 5, 2]
    assert "gradient" in answers["runs"]["meanings"]["grad_norm"]
    glossary = {one["key"] for topic in answers["glossary"]["topics"] for one in topic["metrics"]}
    assert {"loss", "eval/accuracy"} <= glossary
    assert answers["settings"]["differing"]["lr"] == ["(not there)", "(not there)", "3"]
    assert answers["settings"]["all"]["lr"] == [None, None, "3"]
    assert answers["lanes"]["lanes"] == [], "the run has no traces"
    assert [one["fate"] for one in answers["group"]["histories"]] == ["skipped", "undone"]
    assert answers["group"]["task_id"] == "sums/1"
    assert [one["fate"] for one in answers["group"]["attempts"]] == ["dropped", "undone", "skipped"]
    assert (answers["groups"]["num_groups"], len(answers["groups"]["groups"])) == (2, 2)
    assert answers["rollouts"]["num_rollouts"] == 4
    events = answers["group"]["histories"][1]["events"]
    assert [one["what"] for one in events] == ["submitted", "started", "sampled", "scored", "ended", "undone"]


async def test_pages_of_groups_follow_each_other(runs: list[RunReader]) -> None:
    script = (Path(viewer.__file__).parent / "static" / "groups.js").read_text()
    found = []
    async with client_of(*runs) as client:
        for skip in (0, 4, 8):
            answer = await (await client.get(f"/api/groups?skip={skip}&limit=4")).json()
            assert answer["num_groups"] == 10
            assert set(re.findall(r"\bgroup\.(\w+)", script)) <= answer["groups"][0].keys() | {"events"}
            found += [one["group"] for one in answer["groups"]]
    assert found == list(range(9, -1, -1))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/nothing", 404, "there is no /api/nothing; there are runs"),
        ("/../apps/view.py", 404, "Not Found"),
        ("/%2e%2e%2fserver.py", 404, "there is no"),
        ("/api/group", 400, "group is missing; must be a whole number from 0"),
        ("/api/group?group=99", 404, "group = 99: no line read so far names it"),
        ("/api/group?group=1&group=2", 400, "group is given 2 times"),
        ("/api/group?group=1&run=3", 400, "run = '3'; must be a whole number from 0 to 2"),
        ("/api/groups?fate=lost", 400, "fate = 'lost'; must be one of sampling, scoring"),
        ("/api/groups?reason=x", 400, "reason = 'x'; must be one of stale"),
        ("/api/groups?limit=100000", 400, "limit = '100000'; must be a whole number from 0 to 200"),
        ("/api/rollout?number=9999", 404, "there is no rollout 9999; those read so far are 0 to 19"),
        ("/api/lanes?first=-1", 400, "first = '-1'; must be a whole number"),
    ],
)
def test_what_is_wrong_is_said(runs: list[RunReader], path: str, status: int, words: str) -> None:
    found_status, answer = asked(runs, path)
    assert found_status == status
    assert words in answer["error"]


async def test_texts_of_models_are_data_and_cannot_hide_anything(runs: list[RunReader]) -> None:
    async with client_of(*runs) as client:
        response = await client.get("/api/rollout?run=2&number=0")
        assert response.content_type == "application/json"
        record = (await response.json())["rollout"]
    for shown in (record["response"], next(key for key in record if "script" in key)):
        assert shown == '</script><img src=x onerror="alert(1)">\\u202e\\x1b[2J\\x00\\ud800'
    assert record["response_parts"][0] == {"text": "</script>", "value": 0.5}
    assert "".join(part["text"] for part in record["response_parts"]) == record["response"]


async def test_every_answer_forbids_what_the_page_does_not_need(runs: list[RunReader]) -> None:
    async with client_of(*runs) as client:
        for path in ("/", "/main.js", "/style.css", "/api/runs", "/api/nothing", "/none", "/a/b"):
            headers = (await client.get(path)).headers
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy, path
            assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_is_the_packages_own_and_asks_nobody_else() -> None:
    static = Path("forgeasync/plugins/viewer/static")
    texts = {file.name: file.read_text() for file in static.iterdir()}
    for name, text in texts.items():
        addresses = text.replace("http://www.w3.org/2000/svg", "")
        assert "//cdn" not in text and "https://" not in addresses and "http://" not in addresses, name
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc"):
            assert sink not in text, f"{name} has {sink}"


def test_only_the_names_of_this_machine_are_answered(runs: list[RunReader]) -> None:
    for host in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", ""):
        status, answer = asked(runs, "/api/runs", Host=host)
        assert (status, list(answer)) == (403, ["error"]), host
    for host in ("localhost", "localhost:99", "127.0.0.1:8420"):
        assert asked(runs, "/api/glossary", Host=host)[0] == 200, host


async def test_what_a_run_writes_is_shown_without_being_asked_to(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", num_steps=1)
    async with client_of(RunReader(folder)) as client:
        await until(client, lambda answer: answer["runs"][0]["step"] == 1)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2}\n')
        answer = await until(client, lambda answer: answer["runs"][0]["step"] == 2)
    assert answer["failure"] is None


async def test_a_fault_of_the_viewer_itself_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: RunReader) -> bool:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(RunReader, "read_some", fails)
    async with client_of(RunReader(write_run(tmp_path / "made", num_steps=1))) as client:
        answer = await until(client, lambda answer: answer["failure"] is not None)
    assert answer["failure"] == "the viewer has stopped reading: ZeroDivisionError: by zero"


async def until(client: TestClient, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask until an answer is right; another thread reads the files meanwhile."""
    while not is_so(answer := await (await client.get("/api/runs")).json()):
        await asyncio.sleep(0.01)
    return answer
