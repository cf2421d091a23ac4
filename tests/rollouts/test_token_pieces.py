"""What each token of a response is: texts that together are the response, and bytes of characters."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from forgeasync.models import TURN_END, character_tokenizer
from forgeasync.rollouts import TokenPieces

NO_IDS = np.zeros(0, np.int32)
EURO = [{"bytes": "e2", "text": ""}, {"bytes": "82", "text": ""}, {"bytes": "ac", "text": "\u20ac"}]


def byte_level() -> Tokenizer:
    """One token for every byte, one for "he", and two added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {one: index for index, one in enumerate([*alphabet, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


BYTE_LEVEL = byte_level()
IDS = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30)


def ids_of(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def test_pieces_by_hand() -> None:
    pieces = TokenPieces(BYTE_LEVEL).of_response(NO_IDS, ids_of(BYTE_LEVEL, "he \u20ac<think>\n<end>"))
    assert pieces == ["he", " ", *EURO, "<think>", "\n", {"special": "<end>"}]
    assert TokenPieces(BYTE_LEVEL).of_token(int(ids_of(BYTE_LEVEL, "\u20ac")[1])) == EURO[1]


@given(text=st.text(max_size=20))
def test_pieces_together_are_the_text_and_its_bytes(text: str) -> None:
    text = text.replace("<", "")
    ids = ids_of(BYTE_LEVEL, text)
    pieces = TokenPieces(BYTE_LEVEL).of_response(NO_IDS, ids)
    assert len(pieces) == len(ids)
    texts = [piece if isinstance(piece, str) else piece["text"] for piece in pieces]
    raw = [piece.encode() if isinstance(piece, str) else bytes.fromhex(piece["bytes"]) for piece in pieces]
    assert "".join(texts) == text and b"".join(raw) == text.encode()


@given(prompt=IDS, ids=IDS)
def test_any_tokens_have_a_piece_each(prompt: list[int], ids: list[int]) -> None:
    """Also those that are no text at all, which a model can sample: their bytes are all there."""
    pieces = TokenPieces(BYTE_LEVEL).of_response(np.array(prompt, np.int32), np.array(ids, np.int32))
    assert len(pieces) == len(ids)
    for token, piece in zip(ids, pieces, strict=True):
        name = BYTE_LEVEL.id_to_token(token)
        if name == "<end>":
            assert piece == {"special": name}
        elif isinstance(piece, str):
            assert piece == ("<think>" if name == "<think>" else BYTE_LEVEL.decode([token])) or "<" in piece
        else:
            assert len(bytes.fromhex(piece["bytes"])) == len(name)


def test_a_vocabulary_of_texts() -> None:
    tokenizer = character_tokenizer(chat_template=True).backend_tokenizer
    pieces = TokenPieces(tokenizer).of_response(NO_IDS, ids_of(tokenizer, f"a <b>{TURN_END}"))
    assert pieces == ["a", " ", "<", "b", ">", {"special": TURN_END}]


def test_single_bytes_of_other_vocabularies() -> None:
    vocabulary = {"<unk>": 0, "\u2581hi": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    pieces = TokenPieces(tokenizer).of_response(NO_IDS, np.array([1, 2, 3, 4, 1], np.int32))
    assert pieces == [" hi", *EURO, " hi"]
