"""Stop strings in growing token sequences, against the whole text decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.stop import find_stop, first_stop


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, some longer pieces, and two special tokens that decode to nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ST", "OP", "STOP"])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [("S", "T"), ("O", "P"), ("ST", "OP")]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<a>", "<b>"])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def stopped_at(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str] | None:
    """The token after which generation ends, and the stop string; a prompt of one token stands before."""
    for length in range(1, len(ids) + 1):
        found = find_stop(tokenizer, [0, *ids[:length]], length, stop)
        if found is not None:
            return length, found
    return None


def expected(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str] | None:
    """Brute force over the whole text of each prefix, bytes of an unfinished character left out."""
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length]).rstrip("\ufffd")
        for end in range(len(text) + 1):
            found = [string for string in stop if text[:end].endswith(string)]
            if found:
                return length, max(found, key=len)
    return None


PIECES = ["<a>", "<b>", "S", "T", "OP", "STOP", "1", "2", "é", "漢", "🙂"]


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=30),
    stop=st.lists(st.sampled_from(["12", "STOP", "TOP", "1", "漢", "é🙂", "S1"]), min_size=1, max_size=3),
)
def test_generation_ends_where_the_whole_text_says(tokenizer: Tokenizer, pieces: list[str], stop: list[str]) -> None:
    alphabet = dict(zip(range(256), _byte_letters(), strict=True))
    ids: list[int] = []
    for piece in pieces:
        own = tokenizer.token_id(piece)
        letters = [] if own is not None else [alphabet[byte] for byte in piece.encode()]
        ids += [own] if own is not None else [_known(tokenizer, letter) for letter in letters]
    assert stopped_at(tokenizer, ids, stop) == expected(tokenizer, ids, stop)


def test_special_tokens_between_do_not_hide_a_stop_string(tokenizer: Tokenizer) -> None:
    one, two, special = (_known(tokenizer, piece) for piece in ("1", "2", "<a>"))
    assert stopped_at(tokenizer, [one, *[special] * 50, two], ["12"]) == (52, "12")


def test_half_a_character_is_no_replacement_character(tokenizer: Tokenizer) -> None:
    letters = dict(zip(range(256), _byte_letters(), strict=True))
    ids = [_known(tokenizer, letters[byte]) for byte in "漢".encode()]
    assert stopped_at(tokenizer, ids, ["\ufffd"]) is None
    assert stopped_at(tokenizer, ids, ["漢"]) == (3, "漢")


def test_the_stop_string_that_ends_first_counts_and_of_those_the_longest() -> None:
    assert first_stop("xabcd", ["abcd", "c"]) == (3, "c")
    assert first_stop("xabcd", ["bc", "c"]) == (2, "bc")
    assert first_stop("xabcd", ["z"]) is None


def _known(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.token_id(piece)
    assert found is not None, piece
    return found


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (the GPT-2 table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + shifted.index(byte)) for byte in range(256)]
