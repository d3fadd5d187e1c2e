"""Token-by-token text: equal to the whole text, never shows half a character, stops where the text says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from halfbyte.errors import DataError
from halfbyte.models.detokeniser import Detokeniser
from halfbyte.models.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat, STOP the naïve 猫 said 🙂 STOPPING 1234"] * 3


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's shape: a space before the text, byte fallback, the first space stripped when decoding."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyzSTOP,", "▁t", "▁th", "▁the", "ca", "at", "ST", "OP"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("c", "a"), ("a", "t"), ("S", "T"), ("O", "P")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


PARTS = ["the", " cat", " ", "猫", "🙂", "ST", "OP", "é", "\n"]
TEXTS = st.text(max_size=25) | st.lists(st.sampled_from(PARTS)).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = Detokeniser(tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_join_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Byte fallback turns a whole run of byte tokens into U+FFFD when a later one is invalid: nothing shown early can
    # equal that, so arbitrary ids are for byte-level vocabularies; a run of valid bytes is covered above.
    fallback = tokenizer.token_id("<0x00>") is not None
    first = 257 if fallback else 0
    ids = data.draw(st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=20))
    stream = Detokeniser(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙃b")
    stream = Detokeniser(tokenizer)
    shown = [stream.push(token) for token in ids]
    assert len(ids) >= 5  # the emoji's bytes are at least three tokens
    assert [piece for piece in shown if piece] == ["a", "🙃", "b"]
    half = Detokeniser(tokenizer)
    for token in ids[:-2]:
        half.push(token)
    assert half.text == "a"
    assert half.finish() != ""


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Brute force: walk the text a character at a time; the first prefix that ends with a stop string, longest wins."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@settings(deadline=None, max_examples=200)
@given(
    text=st.lists(st.sampled_from(["the", " cat", "S", "T", "OP", "🙂", "a", "aa"]), max_size=12).map("".join),
    stops=st.lists(st.sampled_from(["STOP", "TOP", "a", "aaa", "the cat", "🙂S", "t"]), max_size=3),
)
def test_stops_where_the_text_says_however_it_is_cut(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    stream = Detokeniser(tokenizer, stops)
    pieces = [stream.push(token) for token in tokenizer.encode(text)] + [stream.finish()]
    expected = first_stop(text, stops)
    if expected is None:
        assert stream.stopped is None
        assert stream.text == text
    else:
        at, stop = expected
        assert stream.stopped == stop
        assert stream.text == text[:at]
    # a stop string that spans pieces cannot unsay what earlier pieces showed; the text itself is exact
    assert "".join(pieces).startswith(stream.text)


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer) -> None:
    stream = Detokeniser(tokenizer, ["OP"])
    shown = [stream.push(token) for token in tokenizer.encode("aSTOPbb")]
    assert stream.text == "aST"
    assert shown[-2:] == ["", ""]
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="empty"):
        Detokeniser(tokenizer, ["x", ""])
