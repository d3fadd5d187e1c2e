"""Tokenizers, chat templates and checks against transformers, on tokenizers trained here."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from halfbyte.errors import CheckpointError, DataError
from halfbyte.models.architecture import Architecture
from halfbyte.models.chat_template import ChatTemplate
from halfbyte.models.tokenizer import Tokenizer, check_tokenizer

SPECIAL = ["<|end|>", "<|begin|>", "<|user|>", "<|pad|>"]
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ bos_token }}system\nBe brief.{{ eos_token }}\n{% endif %}"
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": 'sums "a" & <b>', "parameters": {"é": [1, 2]}}}
]
#: features that templates on hubs use, each once
RICH = """
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'secret' %}{% continue %}{% endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role not in ['user', 'assistant', 'system', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
[{{ message.role | upper }}] {{ message.content | default('nothing') | trim }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %} calls {{ call.function | tojson }}{% endfor %}
    {%- endif %}
    {% generation %}{% set inside = 1 %}<{{ message.name or 'anonymous' }}>{% endgeneration %}
{{ inside is defined }}
{%- endfor %}
{%- if tools %}

tools:
    {%- for tool in tools %}
- {{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{{ ns.turns }} {{ documents is none }} {{ unk_token is defined }} {{ enable_thinking | default(true) }}
{%- if add_generation_prompt %} go{% endif %}
"""


def train(folder: Path) -> None:
    """A byte-level BPE tokenizer of 290 ids, with batching options that must not matter."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the naïve 猫 said 1234 + 5678 = 6912"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(pad_id=3, pad_token="<|pad|>", length=9)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>", "special": True, "__type": "AddedToken"},
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train(path)
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(["the", " cat", "<|end|>", "猫", "\n", "12"])).map("".join)


@settings(deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_encode_and_decode_are_those_of_transformers(ours: Tokenizer, theirs: Any, text: str, special: bool) -> None:
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 289), max_size=20))
def test_decoding_any_ids_is_that_of_transformers(ours: Tokenizer, theirs: Any, ids: list[int]) -> None:
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_added_only_when_asked(ours: Tokenizer) -> None:
    plain = ours.encode("the cat sat on the mat")
    assert ours.bos_id is not None
    assert plain != []
    assert plain[0] != ours.bos_id
    assert ours.encode("the cat sat on the mat", add_special_tokens=True) == [ours.bos_id, *plain]
    assert ours.encode("x<|end|>") == [*ours.encode("x"), ours.token_id("<|end|>")]


def test_ids_and_sizes(ours: Tokenizer) -> None:
    assert ours.vocab_size == 290
    assert (ours.eos_ids, ours.bos_id, ours.pad_id) == ((0,), 1, 3)
    assert ours.token_id("absent") is None
    with pytest.raises(DataError, match="not token ids"):
        ours.decode([-1])


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'you'"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "猫\n"}, {"role": "assistant", "content": " ok "}],
]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_is_that_of_transformers(ours: Tokenizer, theirs: Any, messages: Any, prompt: bool) -> None:
    options = {"add_generation_prompt": prompt}
    text = ours.render_chat(messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.encode_chat(messages, **options) == theirs.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "user", "content": None}], {}),
        ([{"role": "user", "content": " a "}, {"role": "secret"}, {"role": "tool", "name": "x"}], {}),
        ([{"role": "user", "content": str(i)} for i in range(9)], {"tools": TOOLS, "enable_thinking": False}),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"q": "<é>"}}}]}], {}),
    ],
)
def test_rich_templates_are_those_of_transformers(
    folder: Path, theirs: Any, tmp_path: Path, messages: Any, options: dict[str, Any]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(RICH)  # wins over tokenizer_config.json
    text = Tokenizer.from_folder(tmp_path).render_chat(messages, add_generation_prompt=True, **options)
    expected = theirs.apply_chat_template(
        messages, chat_template=RICH, tokenize=False, add_generation_prompt=True, **options
    )
    assert text == expected
    assert " go" in text


def test_the_caller_keeps_its_messages(ours: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    ours.render_chat(messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]


def with_template(folder: Path, target: Path, template: Any) -> Path:
    train(target)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def test_named_templates(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = Tokenizer.from_folder(with_template(folder, tmp_path, named))
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "D"
    assert tokenizer.render_chat(messages, tools=[]) == "T"
    assert tokenizer.render_chat(messages, tools=[], template="default") == "D"
    with pytest.raises(DataError, match="default, tool_use"):
        tokenizer.render_chat(messages, template="rag")


def test_a_base_model_has_no_chat(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(with_template(folder, tmp_path, None))
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"content": "x"}], "message 0 has no role"),
        (["x"], "message 0 has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": object()}], "not JSON"),
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
    ],
)
def test_conversations_that_cannot_be_rendered(folder: Path, tmp_path: Path, messages: Any, words: str) -> None:
    tokenizer = Tokenizer.from_folder(with_template(folder, tmp_path, RICH))
    with pytest.raises(DataError, match=words):
        tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set f = messages[0].clear() %}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages[0].absent.deeper }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_is_an_error(folder: Path, tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_folder(with_template(folder, tmp_path, template))
    with pytest.raises(DataError, match="refuses"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("template", ["{% if %}", 7, [{"template": "x"}]])
def test_a_template_that_does_not_compile_is_an_error_on_load(folder: Path, tmp_path: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match="chat"):
        Tokenizer.from_folder(with_template(folder, tmp_path, template))


def test_trl_7039_every_eos_id_is_known(folder: Path, tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (0, 2, 5)
    (tmp_path / "config.json").write_text('{"eos_token_id": "5"}')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_files_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    train(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(CheckpointError, match="eos_token is '</s>'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (2,)


def test_a_tokenizer_of_another_model_is_refused(ours: Tokenizer, tmp_path: Path) -> None:
    model = Architecture(
        family="llama",
        vocab_size=384,
        hidden_size=8,
        intermediate_size=8,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=8,
        max_positions=64,
    )
    check_tokenizer(ours, model)  # more rows than ids is padding
    check_tokenizer(ours, replace(model, vocab_size=290))
    with pytest.raises(CheckpointError, match=r"289.*289 embedding rows"):
        check_tokenizer(ours, replace(model, vocab_size=289))
    train(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 400]}')
    with pytest.raises(CheckpointError, match=r"\[400\]"):
        check_tokenizer(Tokenizer.from_folder(tmp_path), model)


SMOLLM2 = Path(os.environ.get("HALFBYTE_SMOLLM2", "runs/smollm2-135m"))


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="run examples/smollm2.py, or set HALFBYTE_SMOLLM2")
def test_smollm2_is_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    from halfbyte.models import load_checkpoint

    checkpoint = load_checkpoint(SMOLLM2)
    assert checkpoint.architecture.tie_embeddings
    assert checkpoint.tokenizer_path is not None
    ours, theirs = Tokenizer.from_folder(checkpoint.tokenizer_path), AutoTokenizer.from_pretrained(SMOLLM2)
    check_tokenizer(ours, checkpoint.architecture)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == expected
    text = "Sum 12 + 34.\n\tNaïve 猫 <|im_end|> end  "
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "template",
    [b"\xff\xfe", b"{{" + b"(" * 50_000, b"{% if a %}" * 5_000, b"{{ " + b"-" * 20_000 + b"1 }}"],
    ids=["not UTF-8", "brackets", "blocks", "signs"],
)
def test_a_chat_template_that_cannot_be_compiled_is_refused(tmp_path: Path, folder: Path, template: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(CheckpointError, match="template"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "template", ["{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages.nothing.at_all }}", "{{ [].x() }}"]
)
def test_a_chat_template_that_fails_is_an_error_of_the_data(template: str) -> None:
    with pytest.raises(DataError, match="chat template refuses"):
        ChatTemplate(template).render([{"role": "user", "content": "hi"}])


def test_half_a_surrogate_pair_is_refused_with_its_place(ours: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+D800 at character 2"):
        ours.encode("ab\ud800")
