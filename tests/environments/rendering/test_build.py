"""Which renderer a run gets, and why."""

from datetime import datetime

import pytest
from renderers.base import RENDERER_REGISTRY, _populate_registry

from forgeasync.config import RendererName, check_without_model
from forgeasync.environments import (
    Conversation,
    FamilyRenderer,
    PlainRenderer,
    TemplateRenderer,
    choose_renderer,
    user,
)
from forgeasync.rollouts import PromptEncoder
from tests.support.chat import CHATML, make_tokenizer
from tests.support.chat_families import TEMPLATES, family_tokenizer
from tests.support.config_samples import minimal_config


def test_the_names_are_those_of_the_library() -> None:
    _populate_registry()
    ours = {name.value for name in RendererName} - {"auto", "template"}
    assert ours == set(RENDERER_REGISTRY) - {"default"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_family_that_renders_as_the_template_does(family: str) -> None:
    chosen = choose_renderer(family_tokenizer(family), chat_template=True)
    assert (chosen.name, chosen.reason) == (family, "it renders as the chat template does")
    assert isinstance(chosen.renderer, FamilyRenderer)


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
        (
            "glm-4.5",
            "(m.reasoning_content | trim)",
            "m.reasoning_content | upper",
            "after reasoning and text",
        ),
    ],
)
def test_a_template_of_its_own_is_rendered_by_itself(family: str, old: str, new: str, words: str) -> None:
    template = TEMPLATES[family]
    changed = template.replace(old, new)
    assert changed != template
    chosen = choose_renderer(family_tokenizer(family, changed), chat_template=True)
    assert chosen.name == "template" and isinstance(chosen.renderer, TemplateRenderer)
    assert chosen.reason.startswith("no family that is known has this chat template; ")
    assert words in chosen.reason


def test_families_are_told_apart_by_how_they_write_booleans() -> None:
    """Qwen3.6 has Qwen3.5's format, but JSON's words where that has Python's."""
    template = TEMPLATES["qwen3.5"].replace("value | string", "value if value is string else value | tojson")
    assert choose_renderer(family_tokenizer("qwen3.5", template), chat_template=True).name == "qwen3.6"


def test_a_tokenizer_without_the_tokens_of_any_family() -> None:
    chosen = choose_renderer(make_tokenizer(CHATML), chat_template=True)
    assert (chosen.name, chosen.reason) == ("template", "no family that is known has this chat template")


def test_without_a_template_there_is_no_choice() -> None:
    chosen = choose_renderer(make_tokenizer(None), chat_template=False)
    assert chosen.name == "plain" and isinstance(chosen.renderer, PlainRenderer)


def test_a_template_that_writes_the_date_keeps_the_one_of_its_start() -> None:
    tokenizer = family_tokenizer("llama-3")
    chosen = choose_renderer(tokenizer, chat_template=True)
    ids = chosen.renderer.added_ids(Conversation(turns={}), (user("x"),)).tolist()
    assert datetime.now().strftime("%d %b %Y") in tokenizer.decode(ids)
    given = {"date_string": "01 Jan 2025"}
    chosen = choose_renderer(tokenizer, chat_template=True, template_arguments=given)
    ids = chosen.renderer.added_ids(Conversation(turns={}), (user("x"),)).tolist()
    assert chosen.name == "llama-3"
    assert ids == PromptEncoder(tokenizer, chat_template=True, template_arguments=given).encode("x").tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_arguments_reach_the_family(family: str) -> None:
    """Without thinking, a family keeps the empty block that the prompt of each turn has written."""
    tokenizer = family_tokenizer(family)
    given = {"enable_thinking": False}
    chosen = choose_renderer(tokenizer, chat_template=True, template_arguments=given)
    assert chosen.name == family
    ids = chosen.renderer.added_ids(Conversation(turns={}), (user("x"),)).tolist()
    assert ids == PromptEncoder(tokenizer, chat_template=True, template_arguments=given).encode("x").tolist()
    assert tokenizer.decode(ids).endswith("<think>\n\n</think>\n\n")


def test_a_template_whose_default_differs_from_the_familys() -> None:
    """As the small models of Qwen3.5, which think only if they are told to."""
    template = TEMPLATES["qwen3.5"].replace("enable_thinking is defined and not", "not")
    tokenizer = family_tokenizer("qwen3.5", template)
    chosen = choose_renderer(tokenizer, chat_template=True)
    assert chosen.name == "qwen3.5"
    ids = chosen.renderer.added_ids(Conversation(turns={}), (user("x"),)).tolist()
    assert ids == PromptEncoder(tokenizer, chat_template=True).encode("x").tolist()


@pytest.mark.parametrize("name", [RendererName.QWEN3, RendererName.TEMPLATE])
def test_a_renderer_that_is_named(name: RendererName) -> None:
    """Even where the template is another: then rollouts have the form of the family that was named."""
    chosen = choose_renderer(family_tokenizer("qwen3", CHATML), chat_template=True, name=name)
    assert (chosen.name, chosen.reason) == (name.value, f"data.renderer = {name.value}")


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            RendererName.LLAMA_3,
            {},
            "data.renderer = llama-3: the tokenizer has no renderer 'llama-3': Special",
        ),
        (RendererName.QWEN3, {"effort": 1}, "data.renderer = qwen3: .* Unsupported chat_template_kwargs"),
        # Sampled tokens stay in a path, so nothing can be cleared.
        (RendererName.QWEN3_6, {"preserve_thinking": False}, "data.renderer = qwen3.6: "),
    ],
)
def test_a_named_renderer_that_does_not_fit(name: RendererName, arguments: dict, problem: str) -> None:
    tokenizer = family_tokenizer("qwen3.5")
    with pytest.raises(ValueError, match=problem):
        choose_renderer(tokenizer, chat_template=True, name=name, template_arguments=arguments)


ENVIRONMENT = "environment={kind: python, factory: a.b}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [ENVIRONMENT, "data.renderer=qwen3"],
            "data.renderer = 'qwen3': renders by a chat template; needs data.chat_template = true",
        ),
        (
            ["data.chat_template=true", "data.renderer=template"],
            "data.renderer = 'template': renders the messages of an environment",
        ),
        (
            [ENVIRONMENT, "data.chat_template=true", "data.system_prompt=Hi"],
            "data.system_prompt = 'Hi': must be left out with an environment",
        ),
    ],
)
def test_what_contradicts_is_refused(overrides: list[str], said: str) -> None:
    problems = check_without_model(minimal_config(*overrides))
    assert [str(problem)[: len(said)] for problem in problems] == [said]


def test_what_fits_is_not_refused() -> None:
    overrides = [ENVIRONMENT, "data.chat_template=true", "data.renderer=glm-4.5"]
    config = minimal_config(*overrides)
    assert config.data.renderer is RendererName.GLM_4_5
    assert list(check_without_model(config)) == []
