"""Streaming text: whole characters, nothing of a stop string, nothing taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_case import Offline, client

from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.stop import first_stop
from halfbyte.serve.choice import Choice
from halfbyte.serve.job import Piece
from halfbyte.serve.server import Server
from halfbyte.serve.text import TextStream, held_back


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token a byte, and some of two: characters are cut everywhere."""
    folder = tmp_path_factory.mktemp("bytewise")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = [("a", "b"), ("Ã", "¤"), ("â", "Ĥ")]
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


texts = st.text(st.sampled_from("abcä€😀 \n"), max_size=24)
stops = st.lists(st.text(st.sampled_from("abä€😀"), min_size=1, max_size=4), max_size=3)


@given(text=texts, stop=stops)
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text_before_the_stop_string(bytewise: Tokenizer, text: str, stop: list[str]) -> None:
    found = first_stop(text, stop)
    expected = text if found is None else text[: found[0]]
    stream, out = TextStream(bytewise, stop), ""
    for token in bytewise.encode(text):
        piece = stream.push([token])
        piece.encode("utf-8")
        assert "\ufffd" not in piece, "half a character"
        out += piece
        assert expected.startswith(out), "text that has to be taken back"
        assert not any(out.endswith(string) for string in stop)
        if stream.stopped:
            break
    assert out + stream.finish() == expected
    assert stream.stopped == (found is not None)


@given(text=st.text("ab", max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stop: list[str]) -> None:
    beginnings = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    assert held_back(text, stop) == max(beginnings, default=0)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("a😀")[:-1]
    stream = TextStream(bytewise)
    assert stream.push(ids) == "a"
    assert stream.finish() == bytewise.decode(ids)[1:] == "\ufffd"


@given(text=texts, stop=stops, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_choice_streamed_in_any_pieces_is_the_whole_one(
    bytewise: Tokenizer, text: str, stop: list[str], data: Any
) -> None:
    """The engine ends a sample with the token that completes a stop string; so do the pieces here."""
    ids = bytewise.encode(text)
    for end in range(1, len(ids) + 1):
        if first_stop(bytewise.decode(ids[:end]).rstrip("\ufffd"), stop):
            ids = ids[:end]
            break
    finish = "stop" if first_stop(bytewise.decode(ids), stop) else "length"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    spans = list(zip([0, *cuts], [*cuts, len(ids)]))
    pieces = [
        Piece(
            0, ids[a:b], [float(i) for i in range(a, b)], [0] * (b - a), finish=finish if n == len(spans) - 1 else None
        )
        for n, (a, b) in enumerate(spans)
    ]
    streamed = Choice(0, bytewise, stop)
    deltas = [delta for piece in pieces if (delta := streamed.add(piece)) is not None]
    whole = Choice(0, bytewise, stop).whole(pieces, offsets=True)
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.tokens] == whole.tokens == ids
    assert [x for d in deltas for x in d.logprobs] == whole.logprobs
    assert [o for d in deltas for o in d.offsets] == whole.offsets
    assert [d.finish for d in deltas][-1] == whole.finish == finish
    assert all(d.text for d in deltas[:-1]), "no empty chunks"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["2", "22", ["7", "9", "22"], "12"])
def test_stop_strings_through_the_server(server: Server, offline: Offline, stop: Any, stream: bool) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "max_tokens": 24, "seed": seed, "stop": stop}
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        (expected,) = offline("1+2=", max_tokens=24, seed=seed, stop=strings)
        text = offline.tokenizer.decode(expected.response_ids.tolist())
        found = first_stop(text, strings)
        answer = client(server).completions.create(**options, stream=stream)
        if stream:
            chunks = list(answer)
            got, finish = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            got, finish = answer.choices[0].text, answer.choices[0].finish_reason
        assert got == (text if found is None else text[: found[0]])
        assert finish == ("length" if expected.finish_reason == "length" else "stop")


def test_token_bytes_join_to_the_text_and_tell_parts_of_characters(bytewise: Tokenizer) -> None:
    from halfbyte.serve.logprobs import TokenTexts

    shown = TokenTexts(bytewise)
    ids = bytewise.encode("ab ä€\n")
    assert b"".join(bytes(shown[i][1] or []) for i in ids).decode() == "ab ä€\n"
    assert [shown[i][0] for i in ids] == ["ab", " ", "ä", "bytes:\\xe2\\x82", "bytes:\\xac", "\n"]
    eos = bytewise.token_id("<eos>")
    assert eos is not None
    assert shown[eos] == ("<eos>", list(b"<eos>"))


def test_sentencepiece_bytes(tmp_path: Path) -> None:
    from halfbyte.models.token_bytes import decoder_kind, entry_bytes

    kind = decoder_kind({"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]})
    assert kind == "byte_fallback"
    assert entry_bytes("\u2581Hallo", kind) == b" Hallo"
    assert entry_bytes("<0xE2>", kind) == b"\xe2"
    assert decoder_kind(None) == decoder_kind({"type": "Fuse"}) == "other"
    assert entry_bytes("x", "other") is None
