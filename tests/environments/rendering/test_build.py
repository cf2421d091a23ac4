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


def test_which_renderer_a_tokenizer_gets() -> None:
    """Families that write booleans otherwise are told apart: Qwen3.6 has JSON's words, Qwen3.5 Python's."""
    booleans = TEMPLATES["qwen3.5"].replace("value | string", "value if value is string else value | tojson")
    right, none = "it renders as the chat template does", "no family that is known has this chat template"
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
            ["data.renderer = 'qwen3': renders by a chat template; needs data.chat_template = true"],
        ),
        (
            ["data.chat_template=true", "data.renderer=template"],
            ["data.renderer = 'template': renders the messages of an environment"],
        ),
        (
            [ENVIRONMENT, "data.chat_template=true", "data.system_prompt=Hi"],
            ["data.system_prompt = 'Hi': must be left out with an environment"],
        ),
        ([ENVIRONMENT, "data.chat_template=true", "data.renderer=glm-4.5"], []),
    ],
)
def test_what_contradicts_is_refused(overrides: list[str], said: list[str]) -> None:
    problems = check_without_model(minimal_config(*overrides))
    assert [str(problem)[: len(one)] for problem, one in zip(problems, said, strict=True)] == said
