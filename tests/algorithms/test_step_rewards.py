"""Rewards of steps on their way to tokens: over the group, characters, and tokens of a real tokenizer."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from forgeasync.algorithms import DrGrpo, Grpo
from forgeasync.config import AlgorithmSection
from forgeasync.rollouts import Step
from forgeasync.trainer import AdvantageSpan, TokenPlaces, advantage_spans, spread
from tests.support.buffer_world import make_group

GRPO = AlgorithmSection(advantage=Grpo(), group_size=2, groups_per_step=1)
END = "<end>"
TEXTS = [
    "naïve café: 3 × 4 = 12 → 🙂 done 👩‍🔬 ok",
    "日本語のテキスト、テキスト",
    "plain words and more words",
]


def step(end: int, value: float) -> Step:
    return Step(end=end, value=value)


def test_groups_with_and_without_steps_go_together() -> None:
    plain = make_group()
    stepped = make_group((step(6, 1.0),), (step(4, 0.0),))
    of_plain, of_stepped = advantage_spans([plain, stepped], GRPO)
    assert [spans[0].end for spans in of_plain] == [None, None]
    assert [spans[0].value for spans in of_plain] == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5
    )
    assert [spans[0].value for spans in of_stepped] == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (((step(2, 1.0),), ()), "rollout 1 of group 7 has no rewards of steps, but others"),
        (((step(2, 1.0),), (step(3, 1.0), step(3, 0.0))), r"characters \[3, 3\]; the ends must increase"),
        (((step(2, 1.0),), (step(3, 1.0), step(2, 0.0))), r"characters \[3, 2\]; the ends must increase"),
        (((step(7, 1.0),), (step(3, 1.0),)), r"characters \[7\]; .* length of its text, 6"),
    ],
)
def test_steps_that_do_not_fit_their_group_are_refused(
    steps: tuple[tuple[Step, ...], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        advantage_spans([make_group(*steps)], GRPO)


def test_a_response_without_text_needs_no_steps() -> None:
    group = make_group((step(2, 1.0), step(3, 0.0)), (), texts=("abc", ""))
    ((_, empty),) = advantage_spans([group], GRPO)
    assert empty == (AdvantageSpan(end=None, value=0.0),)


def test_only_grpo_has_a_formula_for_steps() -> None:
    algorithm = AlgorithmSection(advantage=DrGrpo(), group_size=2, groups_per_step=1)
    with pytest.raises(
        ValueError, match=r"group 7 has rewards of steps, which algorithm\.advantage = 'dr_grpo'"
    ):
        advantage_spans([make_group((step(2, 1.0),), (step(3, 1.0),))], algorithm)


@given(st.integers(0, 2**32 - 1))
def test_a_token_has_the_sum_over_its_own_step_and_all_later_ones(seed: int) -> None:
    """Normalized over all steps of the group; every token is a character, and rewards are far from 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, size=3).tolist()
    steps = []
    for length in lengths:
        ends = np.sort(rng.permutation(np.arange(1, length + 1))[: rng.integers(1, length + 1)]).tolist()
        steps.append(tuple(step(end, float(rng.normal(1e6, 1.0))) for end in ends))
    texts = tuple("x" * length for length in lengths)
    (found,) = advantage_spans([make_group(*steps, texts=texts)], GRPO)
    values = [one.value for own in steps for one in own]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    for spans, own, length in zip(found, steps, lengths, strict=True):
        spread_T = spread(spans, np.arange(length), num_characters=length)
        expected = [
            math.fsum((one.value - mean) / (std + 1e-6) for one in own if one.end > token)
            for token in range(length)
        ]
        assert spread_T.dtype == np.float32 and spread_T.tolist() == pytest.approx(expected, abs=1e-4)


def spread_over(starts: Sequence[int] | np.ndarray, *, first_end: int, num_characters: int) -> list[float]:
    """Of tokens: 1 in a first step, -1 in a second one that ends at character 5, 0 behind it."""
    ends = {first_end: 1.0, 5: -1.0, None: 0.0}
    spans = tuple(AdvantageSpan(end=end, value=value) for end, value in ends.items())
    return spread(spans, np.asarray(starts), num_characters=num_characters).tolist()


def test_tokens_across_the_end_of_a_step_and_behind_the_text() -> None:
    # The second token begins at character 2, in the first step; the last two add no text.
    assert spread_over([0, 2, 4, 5, 5], first_end=3, num_characters=5) == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert spread_over([0, 3, 5, 6], first_end=3, num_characters=6) == [1.0, -1.0, 0.0, 0.0]


@pytest.fixture(scope="module", params=["bytes", "merged"])
def tokenizer_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE as most models have: of single bytes, and with merges that it learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 if request.param == "bytes" else 330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    folder = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


def byte_starts(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """How many characters there are before every token: by its bytes, without a decoder.

    Counted is up to where the bytes before it are whole characters last.
    """
    codes = {character: byte for byte, character in bytes_to_unicode().items()}
    starts, done, num_characters = [], b"", 0
    for token in ids:
        with suppress(UnicodeDecodeError):
            num_characters = len(done.decode("utf-8"))
        starts.append(num_characters)
        text = tokenizer.id_to_token(token)
        done += b"" if text == END else bytes(codes[character] for character in text)
    return starts


@settings(deadline=None, max_examples=40)
@given(text=st.text(st.sampled_from("ab é×→🙂👩‍🔬日本語"), min_size=1, max_size=30))
def test_places_of_tokens_are_those_of_their_bytes(tokenizer_folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]
    prompt_ids_P = np.array(tokenizer.encode("a: ").ids, np.int32)
    starts_T = TokenPlaces(tokenizer_folder).starts(prompt_ids_P, np.array(ids, np.int32))
    assert starts_T.tolist() == byte_starts(tokenizer, ids)
    assert starts_T[-1] == len(text)


def test_a_step_that_ends_within_characters_of_many_bytes(tokenizer_folder: Path) -> None:
    """The tokens that a character is spread over are all of its step."""
    text = "é🙂×ab"
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = np.array([*tokenizer.encode(text).ids, tokenizer.token_to_id(END)], np.int32)
    starts_T = TokenPlaces(tokenizer_folder).starts(ids[:0], ids)
    found = spread_over(starts_T, first_end=2, num_characters=len(text))
    assert found == [1.0 if start < 2 else -1.0 for start in byte_starts(tokenizer, ids.tolist())]
    if len(ids) == 11:
        assert found == [1.0] * 6 + [-1.0] * 5
