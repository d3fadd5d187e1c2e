"""Held-out prompts, and randomness that is a function of a counter.

Whether a prompt is held out depends on its text alone: not on a seed, an index or the run. So a policy that was warmed
up on train prompts of one seed has never seen an eval prompt of any other, and the two splits cannot overlap.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from halfbyte.envs.environment import Message, Prompt, Split

__all__ = ["Draws", "prompt_key", "split_of"]


def prompt_key(prompt: Prompt) -> str:
    """The text by which two prompts are the same.

    Composed or decomposed Unicode and runs of white space do not matter, and a chat of one user message equals that
    message as plain text.
    """
    if prompt.text is not None:
        return _normal(prompt.text)
    messages: Sequence[Message] = prompt.messages or ()
    if len(messages) == 1 and messages[0].get("role") == "user":
        return _normal(str(messages[0].get("content")))
    return json.dumps([[str(m.get("role")), _normal(str(m.get("content")))] for m in messages], ensure_ascii=False)


def split_of(key: str, eval_share: float) -> Split:
    """The split of a prompt with this :func:`prompt_key`. Raising the share moves prompts to eval only, never back."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"halfbyte-split").digest()
    return "eval" if int.from_bytes(digest, "big") < eval_share * 2.0**64 else "train"


class Draws:
    """An endless stream of integers, a pure function of its key (BLAKE2b in counter mode).

    Arguments:
        key: anything with a stable text form.
    """

    def __init__(self, *key: object) -> None:
        self._key = hashlib.blake2b(
            "\x1f".join(map(str, key)).encode(), digest_size=32, person=b"halfbyte-draws"
        ).digest()
        self._counter = 0
        self._words: list[int] = []

    def below(self, n: int) -> int:
        """Uniform in 0 .. n - 1, for 1 <= n <= 2**32, without modulo bias."""
        assert 1 <= n <= 2**32
        limit = 2**64 - 2**64 % n
        while (word := self._word()) >= limit:
            pass
        return word % n

    def between(self, low: int, high: int) -> int:
        """Uniform in low .. high, both included."""
        return low + self.below(high - low + 1)

    def digits(self, n: int) -> str:
        """n decimal digits, each uniform."""
        return "".join(str(self.below(10)) for _ in range(n))

    def number(self, n: int) -> str:
        """A uniform number of n digits: the first one is not 0, unless it is the only one."""
        return self.digits(1) if n == 1 else str(self.between(1, 9)) + self.digits(n - 1)

    def _word(self) -> int:
        if not self._words:
            block = hashlib.blake2b(self._counter.to_bytes(8, "big"), key=self._key, digest_size=64).digest()
            self._counter += 1
            self._words = [int.from_bytes(block[i : i + 8], "big") for i in range(0, 64, 8)]
        return self._words.pop()


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
