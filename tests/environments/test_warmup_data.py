"""What the warm-up teaches: right worked examples, guesses that are off, and a lossless tokenizer."""

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from apps.warmup import calls_of, supervised_sequence, texts_of
from forgeasync.config import (
    DataSection,
    PlainCalls,
    PythonTool,
    ReasoningGymReward,
    ReasoningGymSource,
    ScorerSection,
    ShapeSection,
    WarmupSection,
    check_without_model,
    load_config,
    named_sources,
)
from forgeasync.environments import (
    Example,
    Piece,
    PlainForm,
    ToolResult,
    Turn,
    build_source,
    guess,
    mixed_examples,
    tool_example,
    worked_example,
)
from forgeasync.models import UNKNOWN, build_tokenizer, save_tokenizer
from forgeasync.rollouts import FinishReason, PromptEncoder, Task, ToolStatus
from forgeasync.schema import ConfigError
from forgeasync.scoring import VerifierPool, verifier_choice
from forgeasync.trainer import pack_row

REPOSITORY = Path(__file__).parents[2]
CALLS = PlainCalls(call_prefix="[", call_suffix="]", result_suffix=";", error_text="?")
DATA = DataSection(
    source=ReasoningGymSource(
        kind="reasoning_gym",
        task="chain_sum",
        options={"min_terms": 2, "max_terms": 9, "min_digits": 1, "max_digits": 2},
        answer_prefix="#",
    ),
    num_train=60,
    num_held_out=8,
)


def make_scorer() -> VerifierPool:
    (source,) = named_sources(DATA)
    return VerifierPool(verifier_choice(ReasoningGymReward(), source, seed=0), ScorerSection(num_workers=1))


def make_warmup(**mix: float | None) -> WarmupSection:
    shape = dict.fromkeys(ShapeSection.model_fields, 2)
    return WarmupSection(num_steps=1, optimizer={"learning_rate": 1e-3}, shape=shape, **mix)


def worked_steps(worked: str) -> list[tuple[int, int, int]]:
    """What each step begins with, its result, and the exact one."""
    steps = []
    for step in worked.split(";"):
        left, operator, right, result = re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", step).groups()
        exact = int(left) + int(right) if operator == "+" else int(left) - int(right)
        steps.append((int(left), int(result), exact))
    return steps


def error_of(example: Example) -> int:
    """By how much a guess is off."""
    return int(example.response.removeprefix("#")) - int(example.task.answer)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return build_source(DATA, seed=0).train


def test_worked_examples_are_right_step_by_step(tasks: list[Task]) -> None:
    scorer = make_scorer()
    for task in tasks:
        response = worked_example(task)
        assert scorer.score(task, response).is_correct
        assert scorer.score(task, guess(task, error=0)).is_correct
        steps = worked_steps(response.partition("#")[0])
        assert len(steps) == len(re.findall(r" [+-] ", task.prompt))
        assert all(result == exact for _, result, exact in steps)


@pytest.mark.parametrize(("guesses_per_step", "num_guesses"), [(3, 3), (None, 7)])
def test_guesses_weigh_their_share_however_few_they_are(
    tasks: list[Task], guesses_per_step: int | None, num_guesses: int
) -> None:
    mix = {"examples_per_step": 10, "direct_share": 0.7, "guess_error": 2}
    examples = list(
        mixed_examples(tasks[:10], make_warmup(**mix, guesses_per_step=guesses_per_step), Random(0))
    )
    assert [example.task for example in examples] == tasks[:10]
    guesses, worked = examples[:num_guesses], examples[num_guesses:]
    assert [example.response for example in worked] == [
        worked_example(task) for task in tasks[num_guesses:10]
    ]
    assert {example.weight for example in worked} == {1.0}
    assert max(abs(error_of(example)) for example in guesses) <= 2
    weight = sum(example.weight for example in guesses)
    assert weight / (weight + len(worked)) == pytest.approx(0.7)


def test_guesses_are_off_by_every_error_alike(tasks: list[Task]) -> None:
    warmup = make_warmup(examples_per_step=60, direct_share=0.5, guesses_per_step=59, guess_error=1)
    rng, counts = Random(0), Counter[int]()
    for _ in range(20):
        counts.update(map(error_of, list(mixed_examples(tasks, warmup, rng))[:59]))
    # Four standard deviations of a third of 1,180 draws.
    assert counts.keys() == {-1, 0, 1} and all(abs(count - 393) < 65 for count in counts.values())


def test_wrong_steps_are_a_share_of_the_steps_and_go_on_from_what_they_say(tasks: list[Task]) -> None:
    warmup = make_warmup(examples_per_step=60, wrong_step_share=0.3, guess_error=2)
    rng, errors = Random(0), Counter[int]()
    for _ in range(20):
        for example in mixed_examples(tasks, warmup, rng):
            worked, _, answer = example.response.partition("#")
            before = None
            for left, result, exact in worked_steps(worked):
                assert before in (None, left), "the next step begins with the result"
                errors[result - exact] += 1
                before = result
            assert int(answer) == before
    assert errors.keys() == {-2, -1, 0, 1, 2}
    # Several thousand steps, with a standard deviation of less than 0.01.
    assert 1.0 - errors[0] / errors.total() == pytest.approx(0.3, abs=0.04)


def test_wrong_steps_are_refused_where_a_tool_works_them_out() -> None:
    overrides = ["warmup.wrong_step_share=0.2", "warmup.guess_error=2"]
    config = load_config([str(REPOSITORY / "configs/agent_tool_cpu.yaml")], overrides)
    problems = [one for one in check_without_model(config) if one.field == "warmup.wrong_step_share"]
    assert [one.remedy for one in problems] == ["must be 0 with an environment, whose tool makes no errors"]


def test_shown_examples_are_worked_out_behind_a_right_response(tasks: list[Task]) -> None:
    """Beside the shares of the others, in the words of the teacher's prompt, which the tokenizer knows."""
    mix = {"examples_per_step": 60, "shown_per_step": 40, "direct_share": 0.7}
    template = "$sibling;$prompt"
    examples = list(mixed_examples(tasks, make_warmup(**mix), Random(0), shown=template))
    shown = [one for one in examples if ";State" in one.task.prompt or ";Solve" in one.task.prompt]
    plain = [one for one in examples if one not in shown]
    assert len(shown) == 40 and sum(one.response.startswith("#") for one in plain) == 14
    forms = Counter[bool]()
    task_of = {task.task_id: task for task in tasks}
    tokenizer = build_tokenizer(text for task in tasks for text in texts_of(task, None, template))
    for example in shown:
        task = task_of[example.task.task_id]
        sibling = example.task.prompt.removesuffix(f";{task.prompt}")
        assert example.response == worked_example(task) and example.weight == 1.0
        assert sibling in (worked_example(task), guess(task, error=0))
        forms[sibling.startswith("#")] += 1
        assert tokenizer.unk_token_id not in tokenizer(example.task.prompt)["input_ids"]
    assert min(forms.values()) > 8, "both kinds of right responses"


def test_an_examples_weight_reaches_the_trainer(tasks: list[Task]) -> None:
    tokenizer = build_tokenizer(text for task in tasks for text in (task.prompt, worked_example(task)))
    example = Example(task=tasks[0], pieces=(Piece(text=guess(tasks[0], error=1)),), weight=8.5)
    sequence = supervised_sequence(example, PromptEncoder.from_section(tokenizer, DATA), tokenizer)
    assert tokenizer.decode(sequence.response_ids_T) == example.response + tokenizer.eos_token
    assert sequence.weight == 8.5
    assert sequence.is_sampled_T.all()


def test_tool_examples_are_what_the_environment_reads_and_writes(tasks: list[Task]) -> None:
    form = PlainForm(CALLS, tool="python", argument="code")
    for task in tasks:
        *turns, last = tool_example(task, CALLS)
        total = None
        for said, told in zip(turns[::2], turns[1::2], strict=True):
            assert not said.is_given and told.is_given
            text = said.text.removesuffix("]")
            turn = Turn(text=text, num_prompt_tokens=1, num_tokens=1, finish_reason=FinishReason.STOP)
            (call,) = form.read(turn).tool_calls
            code = call.arguments["code"]
            assert total is None or code.startswith(total), "each call goes on from the last result"
            total = str(eval(code))
            result = ToolResult(call_id=call.id, name=call.name, status=ToolStatus.OK, content=total)
            assert told.text == form.answer(result)["content"]
        assert last == Piece(text=f"#{total}") and total == task.answer


def test_what_the_tool_writes_is_given_and_not_learned(tasks: list[Task]) -> None:
    tokenizer = build_tokenizer(text for task in tasks for text in texts_of(task, CALLS))
    warmup = make_warmup(examples_per_step=4, direct_share=0.5, guesses_per_step=1)
    prompts = PromptEncoder.from_section(tokenizer, DATA)
    guessed, *worked = [
        supervised_sequence(example, prompts, tokenizer)
        for example in mixed_examples(tasks[:4], warmup, Random(0), calls=CALLS)
    ]
    assert guessed.is_sampled_T.all()
    for task, sequence in zip(tasks[1:4], worked, strict=True):
        pieces = tool_example(task, CALLS)
        learned = tokenizer.decode(sequence.response_ids_T[sequence.is_sampled_T])
        assert learned == "".join(one.text for one in pieces if not one.is_given) + tokenizer.eos_token
        given = tokenizer.decode(sequence.response_ids_T[~sequence.is_sampled_T])
        assert given == "".join(one.text for one in pieces if one.is_given)
        assert pack_row([sequence]).num_targets == sequence.is_sampled_T.sum()


def test_a_warm_up_for_another_environment_is_refused() -> None:
    config = load_config([REPOSITORY / "configs" / "agent_tool_cpu.yaml"])
    assert calls_of(config) == CALLS
    without_calls = PythonTool(kind="python_tool")
    with pytest.raises(ConfigError, match=r"environment.*kind: python_tool with plain_calls"):
        calls_of(config.model_copy(update={"environment": without_calls}))
    assert calls_of(config.model_copy(update={"environment": None})) is None


def test_another_kind_of_problem_is_refused() -> None:
    task = Task(task_id="x", prompt="What is love?", answer="1", source_index=0, source="s")
    with pytest.raises(ValueError, match="not a chain_sum problem"):
        worked_example(task)


def test_the_tokenizer_gives_back_every_text(tasks: list[Task], tmp_path: Path) -> None:
    texts = [text for task in tasks for text in (task.prompt, worked_example(task))]
    save_tokenizer(build_tokenizer(texts), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("é")["input_ids"]) == [UNKNOWN]


def test_what_is_one_token_and_what_stays_apart(tasks: list[Task]) -> None:
    tokenizer = build_tokenizer(text for task in tasks for text in texts_of(task, CALLS))
    # The mark takes the place of an error.
    assert tokenizer.tokenize("[7+8]?;") == ["[", "7", "+", "8", "]", "?", ";"]
    tokenizer = build_tokenizer([task.prompt for task in tasks])
    tokens = tokenizer.tokenize("State the final answer to the following arithmetic problem: 47 + 8 =")
    assert tokens[0] == "State the final answer to the following arithmetic problem"
    assert tokens[2:] == ["4", "7", " + ", "8", " ="]
