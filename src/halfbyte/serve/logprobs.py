"""Log-probs as OpenAI's two endpoints show them. They are those of the distribution that was sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.models.tokenizer import Tokenizer

__all__ = ["TokenTexts", "chat_entry", "completion_logprobs"]

Pair = tuple[int, float]


class TokenTexts:
    """Text and bytes of single tokens.

    Arguments:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __getitem__(self, token: int) -> tuple[str, list[int] | None]:
        """(text, UTF-8 bytes) of a token. One that is a part of a character has the text ``bytes:\\xe2\\x82``, as OpenAI
        writes it; bytes are None where the tokenizer does not tell them."""
        if token not in self._known:
            raw = self._tokenizer.token_bytes(token)
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            if raw is not None:
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError:
                    text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            elif "\ufffd" not in text:
                raw = text.encode("utf-8")
            self._known[token] = text, None if raw is None else list(raw)
        return self._known[token]


def chat_entry(texts: TokenTexts, token: int, logprob: float, others: Sequence[Pair]) -> dict[str, Any]:
    """An element of ``logprobs.content``."""
    return {
        **_described(texts, token, logprob),
        "top_logprobs": [_described(texts, other, value) for other, value in others],
    }


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    others: Sequence[Sequence[Pair]],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice. ``top_logprobs`` has the drawn token as well, as OpenAI's does."""
    tops = [
        {texts[other][0]: value for other, value in reversed([*pairs, (token, logprob)])}
        for token, logprob, pairs in zip(tokens, logprobs, others)
    ]
    return {
        "tokens": [texts[token][0] for token in tokens],
        "token_logprobs": list(logprobs),
        "top_logprobs": tops or None,
        "text_offset": list(offsets),
    }


def _described(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token]
    return {"token": text, "logprob": logprob, "bytes": raw}
