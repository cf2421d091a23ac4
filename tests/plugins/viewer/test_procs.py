"""What the page is told of processes: bars, shares, spans; of files that grow or are damaged too."""

from pathlib import Path

import pytest

from forgeasync.observability import ORDER, Alive, Changed, Opened, Span, State, encode
from forgeasync.plugins.viewer import RunReader
from tests.support.viewer_runs import STEP_S, TRACE_BEGIN_S, asked, read, write_run, write_traces


@pytest.fixture
def reader(tmp_path: Path) -> RunReader:
    folder = write_run(tmp_path / "made", num_steps=3)
    write_traces(folder, num_steps=3)
    reader = read(folder)
    assert reader.problems == []
    return reader


def ask(reader: RunReader, parameters: str = "") -> dict:
    status, answer = asked([reader], f"/api/lanes?{parameters}")
    assert status == 200
    return answer


def test_the_whole_run_in_bars_of_a_second(reader: RunReader) -> None:
    answer = ask(reader, "width=16")
    assert (answer["begin_s"], answer["end_s"]) == (0.0, 10.0 + 3 * STEP_S)
    assert answer["states"] == [str(state) for state in ORDER]
    loop, generator = answer["lanes"]
    assert [loop["proc"], generator["proc"]] == ["controller", "generator-0"]
    assert generator["pids"] == [2, 3]
    starting, computing, room = map(ORDER.index, (State.STARTING, State.COMPUTING, State.WAITING_FOR_ROOM))
    # It began after a second; between its two processes is a gap.
    assert generator["bars"] == [[1, 3, starting], [4, 7, computing], [12, 1, starting], [13, 3, room]]
    assert generator["shares"][computing] == pytest.approx(0.5)
    assert sum(loop["shares"]) == pytest.approx(1.0)
    assert loop["shares"][ORDER.index(State.WAITING_FOR_BATCH)] == pytest.approx(3 * 0.5 / 16)
    assert answer["steps"] == [[step, 8.0 + 2 * step, 10.0 + 2 * step] for step in (1, 2, 3)]


def test_some_steps_only(reader: RunReader) -> None:
    answer = ask(reader, "width=40&first=2&last=2")
    assert (answer["begin_s"], answer["end_s"]) == (12.0, 14.0)
    (loop, generator) = answer["lanes"]
    waiting, computing = map(ORDER.index, (State.WAITING_FOR_BATCH, State.COMPUTING))
    assert loop["bars"] == [[0, 10, waiting], [10, 30, computing]]
    assert [span["name"] for span in loop["spans"]] == ["wait for a batch", "train"]
    assert generator["spans"] == []
    assert ask(reader, "first=9")["lanes"] == [], "no such step"


def test_a_step_that_was_made_again_is_the_newer_one(reader: RunReader) -> None:
    lines = [
        Opened(at_s=TRACE_BEGIN_S + 50.0, proc="controller", pid=9, host="here", state=State.STARTING),
        Span(begin_s=TRACE_BEGIN_S + 60.0, took_s=1.0, name="train", facts={"step": 3}),
    ]
    (reader.run_dir.logs / "controller-9.trace.jsonl").write_bytes(b"".join(map(encode, lines)))
    reader.read_all()
    assert ask(reader)["steps"] == [[1, 10.0, 12.0], [2, 12.0, 14.0], [3, 60.0, 61.0]]


def test_traces_grow_and_damage_is_told(reader: RunReader) -> None:
    file = reader.run_dir.logs / "generator-0-3.trace.jsonl"
    before = ask(reader)["end_s"]
    with file.open("ab") as out:
        out.write(b"\x00\xff\n" + encode(Alive(at_s=TRACE_BEGIN_S + 40.0, num_lost=5)))
        out.write(encode(Changed(at_s=TRACE_BEGIN_S + 41.0, state=State.SWAPPING))[:-8])
    reader.read_all()
    assert before == 16.0 and ask(reader)["end_s"] == 40.0
    damaged, lost = reader.problems
    assert damaged.startswith("generator-0-3.trace.jsonl: 1 damaged lines were left out; the first: no line")
    assert lost == "generator-0-3.trace.jsonl: the process could not write 5 lines"
