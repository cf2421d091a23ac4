"""A profile from the files of a run: made-up files of a synchronous run whose times are known."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.profile import main
from forgeasync.buffer import Dropped, DropReason, Started, Submitted
from forgeasync.config import RunConfig, dump_config, load_config
from forgeasync.models import read_model_facts
from forgeasync.observability import Line, Opened, Span, State, encode
from forgeasync.planning import pair_cost
from forgeasync.plugins.simulator import (
    Clock,
    DecodeTable,
    Engine,
    ProfiledRun,
    profile_run,
    read_profile,
)
from forgeasync.rollouts import padded_length, plan_rows
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config, write_tiny_model
from tests.plugins.simulator.made_engines import decode_table, engine_cost, made_group, play
from tests.support.ledgers import ledger_text, opened
from tests.support.viewer_runs import finished_group, trained

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 60, 6, 4
STEP_S, SEQUENCE_S, PROMPT_S = 0.004, 0.0004, 1e-4
ROW_S, TOKEN_S = 0.05, 2e-4
SCORE_S, WAIT_S, PUBLISH_S, FETCH_S, READY_S, SWAP_S, BETWEEN_S = 0.1, 0.01, 0.02, 0.03, 0.01, 0.005, 0.004
BEGIN_S = 1.8e9

STEPS_S = {(num, 0): STEP_S + num * SEQUENCE_S for num in (1, 64)}
LIMITS = {"max_num_seqs": 32, "max_kv_tokens": 10**6, "kv_block_tokens": 128}
COST = engine_cost(decode_table(STEPS_S), prefill_s=PROMPT_S, **LIMITS)


def sampled_s(groups: dict[int, tuple[int, list[int]]]) -> dict[int, float]:
    """How long one engine takes for groups that come at once: tokens of the prompt and of each response."""
    clock, ends = Clock(), dict[int, float]()
    engine = Engine(0, COST, clock, lambda one: ends.__setitem__(one.group.group_id, clock.now_s))
    for number, (num_prompt, lengths) in groups.items():
        engine.add(made_group(number, lengths, num_prompt=num_prompt).sequences)
    play(clock)
    return ends


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("model")
    file = folder / "run.yaml"
    file.write_text(dump_config(tiny_config(write_tiny_model(folder / "model"))))
    overrides = [
        *(f"max_steps={NUM_STEPS}", "max_off_policy_steps=0", "generator.num_replicas=2"),
        *(f"algorithm.groups_per_step={NUM_GROUPS}", f"algorithm.group_size={GROUP_SIZE}"),
        *(
            "trainer.share_prefixes=true",
            "sampling.max_response_tokens=100",
            "scorer.num_workers=64",
            "payload.capacity_gib=1",
        ),
    ]
    return load_config(file, overrides)


def _cost(row: list[tuple[int, int, int]], of_pair: float) -> float:
    """Tokens and pairs of rollouts by group, prompt and response; a row has the prompt of a group once."""
    spans = {(0, prompt, group) for group, prompt, _ in row}
    branches = [(prompt, prompt + own) for _, prompt, own in row]
    depths = [depth for begin, end, *_ in [*spans, *branches] for depth in range(begin, end)]
    return padded_length(len(depths)) + of_pair * sum(depth + 1 for depth in depths)


def write_run(
    folder: Path,
    config: RunConfig,
    *,
    has_lengths: bool = True,
    num_filtered: int = 0,
    took: Callable[[dict[int, tuple[int, list[int]]]], dict[int, float]] = sampled_s,
) -> Path:
    """Write the files of a run whose steps sample, score, train and publish, one after the other."""
    rng, now_s = random.Random(7), BEGIN_S + 20.0
    of_pair = pair_cost(read_model_facts(config.model.path))
    traces: dict[str, list[Line]] = {
        name: [Opened(at_s=BEGIN_S, proc=name, pid=1, host="here", state=State.STARTING)]
        for name in ("controller", "generator-0", "generator-1", "scorer-0")
    }

    def span(name: str, at_s: float, took_s: float, what: str, **facts: int | str) -> None:
        traces[name].append(Span(begin_s=at_s, took_s=took_s, name=what, facts=facts))

    events, metrics = [opened(NUM_GROUPS)], list[dict[str, float]]()
    sampling_s, busy_s = now_s, 0.0
    for step in range(1, NUM_STEPS + 1):
        first = (step - 1) * NUM_GROUPS
        batch = {
            number: (rng.randrange(20, 40), [rng.randrange(5, 90) for _ in range(GROUP_SIZE)])
            for number in range(first, first + NUM_GROUPS)
        }
        ends_s = [0.0]
        for rank in (0, 1):
            for number, took_s in took({one: batch[one] for one in batch if one % 2 == rank}).items():
                lengths = {"response_tokens": " ".join(map(str, batch[number][1]))} if has_lengths else {}
                facts: dict[str, int | str] = {"group": number, "prompt_tokens": batch[number][0], **lengths}
                span(f"generator-{rank}", sampling_s, took_s, "sample group", **facts)
                ends_s.append(took_s)
        for number in batch:
            events.append(Submitted(prompt=number, source="chain_sum", task_id=str(number)))
            events.append(Started(prompt=number, attempt=0, group=number))
            events += finished_group(number)
        events.append(trained(step, range(first, first + NUM_GROUPS)))
        sampled_at_s = sampling_s + max(ends_s)
        for index in range(NUM_GROUPS * GROUP_SIZE):
            span("scorer-0", sampled_at_s, SCORE_S, "score", task=str(index), first=index)
        sizes = [(number, prompt, own) for number, (prompt, found) in batch.items() for own in found]
        plan = plan_rows(
            [prompt + own for _, prompt, own in sizes],
            tokens_per_row=config.trainer.tokens_per_row,
            num_ranks=2,
            prefixes=[[(number, prompt)] for number, prompt, _ in sizes],
            pair_cost=of_pair,
        )
        costs = ([_cost([sizes[one] for one in row], of_pair) for row in rows] for rows in plan)
        train_s = ROW_S * len(plan) + TOKEN_S * sum(map(max, costs))
        wait_s = sampled_at_s + SCORE_S - now_s
        span("controller", now_s, wait_s, "wait for a batch", step=step)
        published_s = now_s + wait_s + train_s + WAIT_S
        for rank in (0, 1):
            begin_s = published_s + PUBLISH_S
            for what, took_s in (("fetch", FETCH_S), ("make ready", READY_S), ("swap", SWAP_S)):
                span(f"generator-{rank}", begin_s, took_s, what, version=step)
                begin_s += took_s
        busy_s += 2 * max(ends_s)
        num_trained = sum(map(sum, (found for _, found in batch.values())))
        step_s = wait_s + train_s + WAIT_S
        now_s = published_s + BETWEEN_S
        sampling_s = published_s + PUBLISH_S + FETCH_S + READY_S + SWAP_S
        times = {"elapsed_s": now_s - BEGIN_S - 20.0, "step_s": step_s, "eval_s": 0.0}
        times |= {"wait_for_batch_s": wait_s, "train_s": train_s, "publish_weights_s": WAIT_S}
        line = {f"time/{name}": seconds for name, seconds in times.items()} | {"step": step}
        line |= {"throughput/train_tokens_per_s": num_trained / step_s, "generator/num_healthy": 2}
        metrics.append(line | {"generator/busy_s": busy_s, "weights/max_publish_s": WAIT_S + PUBLISH_S})
    num = NUM_STEPS * NUM_GROUPS
    for prompt in range(num, num + num_filtered):
        events += [
            Submitted(prompt=prompt, source="chain_sum", task_id=str(prompt)),
            Started(prompt=prompt, attempt=0, group=prompt),
            Dropped(prompt=prompt, group=prompt, reason=DropReason.FILTERED, again=False),
        ]
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "ledger.jsonl").write_bytes(ledger_text(events))
    for name, lines in traces.items():
        (folder / "logs" / f"{name}-1.trace.jsonl").write_bytes(b"".join(map(encode, lines)))
    return folder


@pytest.fixture(scope="module")
def found(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> ProfiledRun:
    return profile_run(write_run(tmp_path_factory.mktemp("runs") / "run", config))


def test_decode_steps_and_prompts_are_told_from_how_long_groups_took(found: ProfiledRun) -> None:
    table = DecodeTable(found.profile.decode)
    for num in (1, 4, 12, 32):
        assert table.step_s(num, 50) == pytest.approx(STEP_S + num * SEQUENCE_S, rel=0.1)
    assert 1.0 / found.profile.prefill_tokens_per_s == pytest.approx(PROMPT_S, rel=0.3)


def test_a_token_of_a_response_takes_no_less_than_one_of_a_prompt(config: RunConfig, tmp_path: Path) -> None:
    """Also in a run whose times only its prompts explain."""
    run = write_run(
        tmp_path / "run",
        config,
        took=lambda groups: {number: 1e-3 * prompt for number, (prompt, _) in groups.items()},
    )
    profile = profile_run(run).profile
    table = DecodeTable(profile.decode)
    assert (table.step_s(32, 50) - table.step_s(1, 50)) / 31 >= 0.99 / profile.prefill_tokens_per_s


def test_other_times_are_those_of_the_files(found: ProfiledRun) -> None:
    profile = found.profile
    assert len(profile.train) == 2, "the run warms up in 10 steps"
    assert profile.train[0].cost < profile.train[1].cost
    for point in profile.train:
        expected_s = ROW_S * point.num_rows + TOKEN_S * point.cost
        # Rows are whole.
        assert point.step_s == pytest.approx(expected_s, abs=ROW_S / 2)
    weights = profile.weights
    means_s = [one.mean for one in (weights.wait_s, weights.publish_s, weights.fetch_s, weights.swap_s)]
    assert means_s == pytest.approx([WAIT_S, PUBLISH_S, FETCH_S + READY_S, SWAP_S], abs=1e-5)
    assert profile.between_steps_s.mean == pytest.approx(BETWEEN_S, abs=1e-5)
    assert profile.score_s.mean == pytest.approx(SCORE_S)
    assert profile.start_s == pytest.approx(20.0)
    (lengths,) = profile.lengths.values()
    assert list(profile.lengths) == ["chain_sum"] and lengths.prompt_share < 0.2
    assert 5 <= lengths.response.quantiles[0] and lengths.response.quantiles[-1] < 90
    assert profile.filtered_share == 0.0
    assert profile.hardware == "here"


def test_a_simulation_of_the_same_run_takes_as_long(found: ProfiledRun) -> None:
    assert found.run.num_replicas == 2 and found.run.num_steps == NUM_STEPS
    assert found.simulated_s == pytest.approx(found.measured_s, rel=0.1)


def test_filtered_groups_are_told_from_the_ledger(config: RunConfig, tmp_path: Path) -> None:
    filtered = profile_run(write_run(tmp_path / "filtered", config, num_filtered=20)).profile
    assert filtered.filtered_share == pytest.approx(20 / (20 + NUM_STEPS * NUM_GROUPS))


def test_the_app_writes_the_profile_and_refuses_what_is_no_run(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    assert main(["--run", str(write_run(tmp_path / "run", config)), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "steps of the run took" in said and "simulated with this profile" in said
    assert "saves" in said and said.endswith(f"wrote {out}\n")
    assert read_profile(out).measured_at and not read_profile(out).sources
    assert main(["--run", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "none/config.yaml" in capsys.readouterr().err
    assert main(["--run", str(tmp_path / "run"), "--out", str(tmp_path / "none" / "profile.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    for arguments, words in (
        (["--run", "run"], "needs --run with --out, or --plan"),
        (["--run", "run", "--out", "p", "--config", "c"], "--config, overrides, --gpus"),
        (["--plan", "--config", "c"], "--plan: needs --config, --gpus"),
        (["--plan", "--config", "c", "--gpus", "2", "--profile", "p", "--out", "p"], "omit --plan"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err


def test_a_run_that_lacks_what_a_profile_needs_is_refused(config: RunConfig, tmp_path: Path) -> None:
    without = write_run(tmp_path / "without", config, has_lengths=False)
    trace, metrics = without / "logs" / "controller-1.trace.jsonl", without / "metrics.jsonl"
    first_line = metrics.read_text().splitlines(keepends=True)[0]
    for change, problem in (
        (lambda: None, r"without/logs: must have traces with the tokens of sampled groups"),
        (trace.unlink, r"without/logs: must have the controller's trace"),
        (lambda: metrics.write_text(first_line), r"metrics\.jsonl: must have the lines of more steps"),
        (metrics.unlink, r"metrics\.jsonl: cannot be read: No such file"),
    ):
        change()
        with pytest.raises(ConfigError, match=problem):
            profile_run(without)
