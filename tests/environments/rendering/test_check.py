"""Which renderer a run gets and why, and its checks: what passes, and one renderer for every way to fail."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from renderers.base import RENDERER_REGISTRY, _populate_registry

from forgeasync.config import RendererName
from forgeasync.controller import check_plan
from forgeasync.environments import (
    CheckRow,
    Conversation,
    Dialogue,
    Difference,
    FamilyRenderer,
    Message,
    PlainRenderer,
    TemplateRenderer,
    ToolSpec,
    Turn,
    assistant,
    check_renderer,
    choose_renderer,
    compare,
    user,
    walk,
)
from forgeasync.environments.check_template import main
from forgeasync.models import character_tokenizer
from forgeasync.rollouts import FinishReason, PromptEncoder, SampledTurn
from forgeasync.schema import ConfigError
from tests.support.chat import CHATML, LAST_ONLY, make_tokenizer
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.config_samples import HF_CONFIG, minimal_config


def test_the_names_are_those_of_the_library() -> None:
    _populate_registry()
    ours = {name.value for name in RendererName} - {"auto", "template"}
    assert ours == set(RENDERER_REGISTRY) - {"default"}


def test_which_renderer_a_tokenizer_gets() -> None:
    """Families that write booleans otherwise are told apart: Qwen3.6 has JSON's words, Qwen3.5 Python's."""
    booleans = TEMPLATES["qwen3.5"].replace("value | string", "value if value is string else value | tojson")
    right, none = "it renders as the chat template does", "no known family has this chat template"
    for tokenizer, name, kind, reason in [
        *((family_tokenizer(family), family, FamilyRenderer, right) for family in TEMPLATES),
        (family_tokenizer("qwen3.5", booleans), "qwen3.6", FamilyRenderer, right),
        (make_tokenizer(CHATML), "template", TemplateRenderer, none),
        (make_tokenizer(None), "plain", PlainRenderer, "data.chat_template is false"),
    ]:
        chosen = choose_renderer(tokenizer, chat_template=tokenizer.chat_template is not None)
        assert (chosen.name, type(chosen.renderer), chosen.reason) == (name, kind, reason)


@pytest.mark.parametrize(
    ("family", "old", "new", "words"),
    [
        ("qwen3", "<|im_start|>user", "<|im_start|> user", "qwen3 renders '"),
        # Shown by the conversations with tool calls alone.
        ("qwen3", "}\n</tool_call>", "} \n</tool_call>", "(a tool call)"),
        ("qwen3.5", "value | string", "value | tojson", "(a tool call)"),
        # By two results in a row.
        ("qwen3", "messages[loop.index0 - 1].role != 'tool'", "true", "(two tool calls)"),
        ("llama-3", "rest %}\n", "rest %}\n{{- '!' }}", "llama-3 renders '"),
        ("glm-4.5", "(m.reasoning_content | trim)", "m.reasoning_content | upper", "after reasoning"),
    ],
)
def test_a_template_of_its_own_is_rendered_by_itself(family: str, old: str, new: str, words: str) -> None:
    template = TEMPLATES[family]
    changed = template.replace(old, new)
    assert changed != template
    chosen = choose_renderer(family_tokenizer(family, changed), chat_template=True)
    assert chosen.name == "template" and isinstance(chosen.renderer, TemplateRenderer)
    assert chosen.reason.startswith("no known family has this chat template; ")
    assert words in chosen.reason


@pytest.mark.parametrize(
    ("family", "change", "given", "words"),
    [
        # The date of the start, or the one that is given.
        ("llama-3", None, {}, datetime.now().strftime("%d %b %Y")),
        ("llama-3", None, {"date_string": "01 Jan 2025"}, "01 Jan 2025"),
        # Without thinking, a family keeps the empty block that the prompt of each turn has written.
        ("qwen3", None, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3.5", None, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        # As the small models of Qwen3.5, which think only if they are told to.
        ("qwen3.5", ("enable_thinking is defined and not", "not"), {}, "</think>"),
    ],
)
def test_what_the_template_gets_reaches_the_family(
    family: str, change: tuple[str, str] | None, given: dict[str, object], words: str
) -> None:
    template = TEMPLATES[family].replace(*change) if change else TEMPLATES[family]
    tokenizer = family_tokenizer(family, template)
    chosen = choose_renderer(tokenizer, chat_template=True, template_arguments=given)
    assert chosen.name == family
    ids = chosen.renderer.added_ids(Conversation(turns={}), (user("x"),)).tolist()
    assert words in tokenizer.decode(ids)
    prompts = PromptEncoder(tokenizer, chat_template=True, template_arguments=given)
    assert (family == "llama-3" and not given) or ids == prompts.encode("x").tolist()


@pytest.mark.parametrize("name", [RendererName.QWEN3, RendererName.TEMPLATE])
def test_a_renderer_that_is_named(name: RendererName) -> None:
    """Even where the template is another: then rollouts have the form of the family that was named."""
    chosen = choose_renderer(family_tokenizer("qwen3", CHATML), chat_template=True, name=name)
    assert (chosen.name, chosen.reason) == (name.value, f"data.renderer = {name.value}")


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (RendererName.LLAMA_3, {}, "data.renderer = llama-3: .*no renderer 'llama-3': .*special"),
        (RendererName.QWEN3, {"effort": 1}, "data.renderer = qwen3: .* Unsupported chat_template_kwargs"),
        # Sampled tokens stay in a path, so nothing can be cleared.
        (RendererName.QWEN3_6, {"preserve_thinking": False}, "data.renderer = qwen3.6: "),
    ],
)
def test_a_named_renderer_that_does_not_fit(name: RendererName, arguments: dict, problem: str) -> None:
    tokenizer = family_tokenizer("qwen3.5")
    with pytest.raises(ValueError, match=f"(?i){problem}"):
        choose_renderer(tokenizer, chat_template=True, name=name, template_arguments=arguments)


# ---- its checks


def contradictions(rows: Sequence[CheckRow]) -> dict[str, str]:
    return {row.name: row.contradiction for row in rows if row.contradiction is not None}


@pytest.mark.parametrize("num_random", [6, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("template", [*TEMPLATES, CHATML, None])
def test_what_is_right_passes(template: str | None, num_random: int) -> None:
    tokenizer = family_tokenizer(template) if template in TEMPLATES else make_tokenizer(template)
    chosen = choose_renderer(tokenizer, chat_template=template is not None)
    rows = check_renderer(tokenizer, chosen.renderer, num_random=num_random)
    assert contradictions(rows) == {} and len(rows) == 5


def test_a_vocabulary_of_a_few_characters_passes() -> None:
    """As that of the model that the default run trains."""
    tokenizer = character_tokenizer(chat_template=False)
    rows = check_renderer(tokenizer, PlainRenderer(tokenizer))
    assert contradictions(rows) == {} and all(row.num_cases > 12 for row in rows)


class Wrong(FamilyRenderer):
    """A renderer of Qwen3 with one fault."""

    def __init__(self, fault: str) -> None:
        self._tokens = family_tokenizer("qwen3")
        super().__init__(self._tokens, "qwen3")
        self._fault = fault

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        turns, ids = conversation.turns, super().added_ids(conversation, messages, tools)
        if turns and self._fault == "text tokenized again":
            # Joins the tokens of the last turn as the tokenizer would.
            said = list(turns.values())[-1].ids_T.tolist()
            again = self._tokens(self._tokens.decode(said), add_special_tokens=False)["input_ids"]
            return np.concatenate([ids, np.zeros(max(len(said) - len(again), 0), np.int32)])
        if turns and self._fault == "newline left out":
            return ids[1:]
        if turns and self._fault == "end written twice" and next(iter(turns.values())).last_id != ids[0]:
            return np.concatenate([[self._tokens.eos_token_id], ids])
        if turns and self._fault == "cut turn left open":
            last = turns[len(conversation.messages) - 1]
            return ids[1:] if last.finish_reason is FinishReason.LENGTH else ids
        return ids

    def parse(self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()) -> Turn:
        parsed = super().parse(before_ids, turn, tools)
        match self._fault:
            case "arguments lost":
                calls = tuple(replace(call, arguments={}) for call in parsed.tool_calls)
                return replace(parsed, tool_calls=calls)
            case "reasoning in the text":
                return replace(parsed, text=(parsed.reasoning or "") + parsed.text, reasoning=None)
            case "raises" if not parsed.text:
                raise ValueError("no text")
        return parsed


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("text tokenized again", "messages are only appended", "depends on how the last one was tokenized"),
        ("newline left out", "appending equals rendering from the start", "'<|im_start|>user"),
        ("end written twice", "appending equals rendering from the start", "gives other tokens"),
        ("cut turn left open", "a turn that was cut is continued", "other tokens follow"),
        ("arguments lost", "turns survive being written and read", "is read as"),
        ("reasoning in the text", "turns survive being written and read", "is read as"),
        ("raises", "every text of a model is parsed", "no text"),
    ],
)
def test_each_fault_is_found_and_shown(fault: str, check: str, words: str) -> None:
    renderer = Wrong(fault)
    found = contradictions(check_renderer(family_tokenizer("qwen3"), renderer, num_random=20))
    assert check in found
    assert words in found[check] and "messages [{'role':" in found[check]


def compared(anew_text: str) -> Difference | None:
    """A path with reasoning, against a text."""
    tokenizer = family_tokenizer("qwen3")
    renderer = FamilyRenderer(tokenizer, "qwen3")
    messages = (user("x"), assistant("abc", reasoning="hm"), user("y"))
    walked = walk(renderer, tokenizer, Dialogue(name="", messages=messages))
    anew = tokenizer(anew_text, add_special_tokens=False)["input_ids"]
    return compare(tokenizer, walked, messages, anew)


HEAD, TAIL = (
    "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
    ("<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"),
)


@pytest.mark.parametrize(
    ("answer", "is_same"),
    [
        ("<think>\nhm\n</think>\n\nabc", True),
        ("abc", True),
        ("<think></think>abc", True),
        ("<think>\n</think>\n\nabc", True),
        # No reasoning of this message, or more than reasoning.
        ("<think>\nhmm\n</think>\n\nabc", False),
        ("bc", False),
        ("", False),
        ("!abc", False),
        ("\nabc", True),
    ],
)
def test_what_rendering_anew_may_leave_out(answer: str, is_same: bool) -> None:
    found = compared(HEAD + answer + TAIL)
    assert found is None if is_same else found is not None and found.index == 1


@pytest.mark.parametrize(
    "text", [HEAD[1:] + "abc" + TAIL, HEAD + "abc" + TAIL + "!", HEAD + "abc" + TAIL[:-1]]
)
def test_given_tokens_may_not_differ(text: str) -> None:
    assert compared(text) is not None


def test_a_turn_may_have_other_tokens_than_its_text() -> None:
    tokenizer = family_tokenizer("qwen3")
    renderer = FamilyRenderer(tokenizer, "qwen3")
    messages = (user("x"), assistant("parameters"), user("y"))

    def characters(ids: np.ndarray) -> np.ndarray:
        text = tokenizer.decode(ids[:-1].tolist())
        head, tail = text.split("parameters")
        pieces = [
            tokenizer(one, add_special_tokens=False)["input_ids"] for one in (head, *"parameters", tail)
        ]
        return np.asarray([*(token for piece in pieces for token in piece), ids[-1]], np.int32)

    walked = walk(renderer, tokenizer, Dialogue(name="", messages=messages), characters)
    # As the last message an answer has an empty block of reasoning, and so has the turn.
    text = HEAD + "<think>\n\n</think>\n\nparameters" + TAIL
    anew = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert compare(tokenizer, walked, messages, anew) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family_tokenizer("qwen3").save_pretrained(tmp_path / "right")
    arguments = ["--model", str(tmp_path / "right"), "--conversations", "3"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "'qwen3' (it renders as the chat template does)" in printed and "CONTRADICTION" not in printed
    make_tokenizer(LAST_ONLY).save_pretrained(tmp_path / "wrong")
    assert main(["--model", str(tmp_path / "wrong")]) == 1
    printed = capsys.readouterr().out
    assert "CONTRADICTION" in printed and "does not only append" in printed
    arguments = ["--model", str(tmp_path / "wrong"), "--renderer", "llama-3"]
    assert main(arguments) == 1
    assert "has no renderer 'llama-3'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "nothing")])
    assert "no such folder" in capsys.readouterr().err


def test_a_run_with_an_environment_refuses_a_template_that_rewrites(tmp_path: Path) -> None:
    """The same folder serves a run without one, whose prompts have one turn."""
    make_tokenizer(LAST_ONLY).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG | {"vocab_size": 128}))
    overrides = [f"model.path={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}", "data.chat_template=true"]
    check_plan(minimal_config(*overrides))
    options = "options: {hint: again, failing_digit: 7}"
    own = f"environment={{kind: python, factory: tests.support.environments.TryAgain, {options}}}"
    with pytest.raises(ConfigError) as refused:
        check_plan(minimal_config(*overrides, own))
    assert "data.renderer = 'auto': the renderer 'template'" in str(refused.value)
    assert "does not only append" in str(refused.value)
    make_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    check_plan(minimal_config(*overrides, own))
