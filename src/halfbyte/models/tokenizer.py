"""Text to token ids and back, with everything a model folder says about special tokens.

A thin layer over the ``tokenizers`` library. Ids leave as text for people and stop strings only; nothing is ever
re-tokenised (ms-swift #10012, verl #6719).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from halfbyte.errors import CheckpointError, DataError
from halfbyte.models.architecture import Architecture
from halfbyte.models.chat_template import ChatTemplate
from halfbyte.models.checkpoint import read_json
from halfbyte.models.token_bytes import decoder_kind, entry_bytes

__all__ = ["Tokenizer", "check_tokenizer"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model folder's tokenizer.

    Attributes:
        folder: where it came from.
        special_tokens: ``bos_token``, ``eos_token``, ... -> their text, where defined.
        bos_id, pad_id: ids, or None.
        eos_ids: every id that ends a sequence: the tokenizer's, config.json's and generation_config.json's
            (TRL #7039: models have several).
        vocab_size: highest id + 1.
        chat_templates: name -> template; the usual one is ``default``.

    Raises (constructor):
        CheckpointError: no tokenizer.json, or a file that cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                "there is no tokenizer here",
                where=str(path),
                expected="tokenizer.json, as fast tokenizers are saved",
                fix="load it with transformers' AutoTokenizer and save_pretrained it into the folder",
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"tokenizer.json cannot be read: {error}", where=str(path)) from error
        # Whatever the file says about batching, ids are those of the text alone.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = _optional_json(self.folder / "tokenizer_config.json")
        named = {**_optional_json(self.folder / "special_tokens_map.json"), **config}
        self.special_tokens = {key: text for key in _SPECIAL if (text := _token_text(named.get(key))) is not None}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._special_id("bos_token")
        self.pad_id = self._special_id("pad_token")
        self.eos_ids = self._all_eos_ids()
        self.chat_templates = _chat_templates(self.folder, config)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a model folder; the same as the constructor."""
        return cls(folder)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``. Special tokens written in the text become their ids; none is added unless asked for.

        Raises:
            DataError: the text holds half a surrogate pair, which has no UTF-8 form.
        """
        if not text.isascii() and (lone := _SURROGATE.search(text)):
            raise DataError(
                f"the text holds the lone surrogate U+{ord(lone.group()):04X} at character {lone.start()}",
                expected="text that UTF-8 can write",
                fix="repair or replace it where the text was made",
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no character yet appear as U+FFFD.

        Raises:
            DataError: a negative id, or one of 2**32 or more.
        """
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise DataError(f"these are not token ids: {error}", expected="integers of at least 0") from error

    def token_id(self, text: str) -> int | None:
        """The id of the one token whose text is ``text``, or None."""
        return self._tokenizer.token_to_id(text)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for, a part of a character perhaps; None where the tokenizer does not tell.

        In the middle of a text: what a decoder does to the first token (drop a leading space) is left out.
        """
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        if added is not None:
            return str(added.content).encode("utf-8")
        entry = self._tokenizer.id_to_token(token)
        return None if entry is None else entry_bytes(entry, self._decoder)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation (:meth:`ChatTemplate.render`).

        Arguments:
            template: which template; None takes ``tool_use`` if there are tools and such a template, else ``default``.
            variables: for the template, such as ``enable_thinking=False``.
        Raises:
            DataError: there is no such template, or it refuses the conversation.
        """
        name = template or ("tool_use" if tools is not None and "tool_use" in self.chat_templates else "default")
        if name not in self.chat_templates:
            known = ", ".join(self.chat_templates) or "none"
            raise DataError(
                f"the tokenizer has no chat template {name!r}",
                where=str(self.folder),
                expected=f"one of: {known}",
                fix="give plain text prompts (of a server: /v1/completions, or start it with --chat-template FILE)",
            )
        return self.chat_templates[name].render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self.special_tokens, **variables},
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Ids of a conversation; options as in :meth:`render_chat`. The template writes its own special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **options))

    @cached_property
    def _decoder(self) -> str:
        return decoder_kind(read_json(self.folder / "tokenizer.json").get("decoder"))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise CheckpointError(
                f"{name} is {text!r}, which the vocabulary lacks",
                where=str(self.folder),
                fix="take tokenizer.json and tokenizer_config.json from the same model",
            )
        return found

    def _all_eos_ids(self) -> tuple[int, ...]:
        own = self._special_id("eos_token")
        found = [] if own is None else [own]
        for file in ("generation_config.json", "config.json"):
            value = _optional_json(self.folder / file).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(item) is not int or item < 0 for item in ids):
                raise CheckpointError(f"eos_token_id is {value!r}", where=str(self.folder / file), expected="ids")
            found += ids
        return tuple(dict.fromkeys(found))


def check_tokenizer(tokenizer: Tokenizer, architecture: Architecture) -> None:
    """Refuse a tokenizer that does not fit the model.

    A model may have more rows than the tokenizer has ids (padding to a round number), never fewer.

    Raises:
        CheckpointError: ids, or an end-of-sequence id, that the embedding has no row for.
    """
    rows = architecture.vocab_size
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model has {rows} embedding rows",
            where=str(tokenizer.folder),
            fix="use the tokenizer that belongs to the model",
        )
    outside = [token for token in tokenizer.eos_ids if token >= rows]
    if outside:
        raise CheckpointError(
            f"end-of-sequence ids {outside} lie outside the model's {rows} embedding rows",
            where=str(tokenizer.folder),
            fix="use the tokenizer and generation_config.json that belong to the model",
        )


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"the chat template cannot be read: {error}", where=str(file), expected="text in UTF-8"
            ) from error
        return {"default": ChatTemplate(source, str(file))}
    where, stored = str(folder / "tokenizer_config.json"), config.get("chat_template")
    if stored is None:
        return {}
    named = [{"name": "default", "template": stored}] if isinstance(stored, str) else stored
    try:
        return {entry["name"]: ChatTemplate(entry["template"], where) for entry in named}
    except (TypeError, KeyError) as error:
        raise CheckpointError("chat_template is neither text nor a list of named texts", where=where) from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(entry: object) -> str | None:
    """A special token is stored as text or as an object with its text under ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
