"""Configurations against transformers, round trips, and everything that must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError
from halfbyte.models.architecture import (
    FAMILIES,
    Architecture,
    expert_names,
    parameter_count,
    parameter_shapes,
    parameters_by_site,
    router_name,
    site_of,
)
from halfbyte.models.rope import RopeScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_fields_are_those_of_transformers(oracle: Any) -> None:
    a = Architecture.from_hf(json.loads((oracle.folder / "config.json").read_text()))
    config = oracle.model.config
    attention = oracle.model.model.layers[0].self_attn
    assert (a.vocab_size, a.hidden_size, a.n_layers) == (96, 32, 3)
    assert (a.n_heads, a.n_kv_heads, a.head_dim) == (4, 2, attention.head_dim)
    assert a.norm_eps == config.rms_norm_eps
    assert a.rope_theta == config.rope_parameters["rope_theta"]
    assert a.tie_embeddings == config.tie_word_embeddings
    assert a.qkv_bias == (attention.q_proj.bias is not None)
    assert a.o_bias == (attention.o_proj.bias is not None)
    assert a.qk_norm == hasattr(attention, "q_norm")
    assert a.moe_layers == tuple(
        i for i, layer in enumerate(oracle.model.model.layers) if hasattr(layer.mlp, "experts")
    )
    assert a.eos_ids == (2, 3)
    assert a.bos_ids == (1,)


def test_transformers_reads_what_we_write_as_what_it_wrote(oracle: Any) -> None:
    a = Architecture.from_hf(oracle.model.config.to_dict())
    again = type(oracle.model.config).from_dict(a.to_hf(dtype="float32"))
    ours, theirs = again.to_dict(), oracle.model.config.to_dict()
    ignored = {"initializer_range", "transformers_version", "_name_or_path", "dtype", "rope_theta", "rope_scaling"}
    differing = {key for key in theirs if key not in ignored and ours.get(key) != theirs[key]}
    # transformers keeps an inactive window's size, and only some configs name a head_dim
    assert differing <= {"sliding_window", "head_dim", "max_window_layers"}
    assert Architecture.from_hf(ours) == a


def test_shapes_are_those_in_transformers_files(oracle: Any) -> None:
    import safetensors

    a = Architecture.from_hf(oracle.model.config.to_dict())
    with safetensors.safe_open(oracle.folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert parameter_shapes(a) == stored
    assert parameter_count(a) == oracle.model.num_parameters() == sum(parameters_by_site(a).values())


def test_both_generations_of_keys_read_alike() -> None:
    old = {**QWEN3_MOE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 16}
    new = {key: value for key, value in old.items() if key not in ("num_experts", "rope_theta", "rope_scaling")}
    new |= {"num_local_experts": 8, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
    a = Architecture.from_hf(old)
    assert a == Architecture.from_hf(new)
    assert a.rope_theta == 5e5
    assert a.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    family = draw(st.sampled_from(list(FAMILIES)))
    kv, group, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    bias = family == "qwen2" or (family != "mixtral" and draw(st.booleans()))
    kind = draw(st.sampled_from(["linear", "llama3", "yarn", None]))
    scaling = None
    if kind is not None:
        original = 0 if kind == "linear" else 64
        scaling = RopeScaling(kind=kind, factor=draw(st.floats(1, 16)), original_max_positions=original)
    routed: dict[str, Any] = {}
    intermediate = draw(st.integers(1, 64))
    if family in ("qwen3_moe", "mixtral"):
        n = draw(st.integers(1, 4))
        routed = {"n_experts": n, "experts_per_token": draw(st.integers(1, n)), "norm_topk_prob": True}
        routed["moe_intermediate_size"] = intermediate if family == "mixtral" else draw(st.integers(1, 32))
    if family == "qwen3_moe":
        routed["norm_topk_prob"] = draw(st.booleans())
        routed["mlp_only_layers"] = tuple(draw(st.lists(st.integers(0, 3), unique=True)))
        routed["decoder_sparse_step"] = draw(st.integers(1, 3))
    return Architecture(
        family=family,  # type: ignore[arg-type]
        vocab_size=draw(st.integers(8, 99)),
        hidden_size=draw(st.integers(1, 64)),
        intermediate_size=intermediate,
        n_layers=draw(st.integers(1, 4)),
        n_heads=kv * group,
        n_kv_heads=kv,
        head_dim=2 * half,
        max_positions=draw(st.integers(1, 4096)),
        rope_theta=draw(st.floats(10, 1e7)),
        rope_scaling=scaling,
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=bias,
        o_bias=bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        eos_ids=tuple(draw(st.lists(st.integers(0, 7), unique=True))),
        bos_ids=tuple(draw(st.lists(st.integers(0, 7), max_size=1))),
        pad_id=draw(st.none() | st.integers(0, 7)),
        **routed,
    )


@given(architectures())
def test_round_trip_through_json_is_exact(a: Architecture) -> None:
    assert Architecture.from_hf(json.loads(json.dumps(a.to_hf()))) == a


@given(architectures())
def test_every_tensor_has_a_site(a: Architecture) -> None:
    shapes = parameter_shapes(a)
    counts = parameters_by_site(a)
    assert sum(counts.values()) == parameter_count(a)
    experts = {name for i in a.moe_layers for e in range(a.n_experts) for name in expert_names(a, i, e)}
    assert {name for name in shapes if site_of(name) == "experts"} == experts
    assert {name for name in shapes if site_of(name) == "router"} == {router_name(a, i) for i in a.moe_layers}
    assert counts["head"] == (0 if a.tie_embeddings else a.vocab_size * a.hidden_size)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("model.embed_tokens.weight", "embed"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norm"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.11.self_attn.k_proj.bias", "attention"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", "experts"),
    ],
)
def test_sites(name: str, site: str) -> None:
    assert site_of(name) == site


def test_unknown_tensor_has_no_site() -> None:
    with pytest.raises(CheckpointError, match=r"visual\.patch_embed"):
        site_of("visual.patch_embed.weight")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, ["GptOssForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, ["Qwen2ForSequenceClassification"]),
        ({"architectures": None, "model_type": "gemma3"}, ["gemma3", "Qwen3MoeForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"mlp_bias": True}, ["MLP biases"]),
        ({"sliding_window": 128}, ["sliding", "128"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["already quantised", "fp8"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 key/value"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"eos_token_id": [2, 128]}, ["128", "vocabulary"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
    ],
)
def test_what_we_do_not_run_is_refused_by_name(changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_hf({**LLAMA, **changes}, "somewhere/config.json")
    message = str(caught.value)
    assert "somewhere/config.json" in message
    assert [name for name in names if name not in message] == []


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"sliding_window": 512}),  # as long as the context: never acts
        (QWEN3_MOE, {"sliding_window": 128, "use_sliding_window": False}),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}, {"sliding_window": 128, "use_sliding_window": True}),
        (
            {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
            {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        ),
    ],
)
def test_a_window_that_never_acts_is_accepted(base: dict[str, Any], changes: dict[str, Any]) -> None:
    assert Architecture.from_hf({**base, **changes}).n_layers == base["num_hidden_layers"]


def test_a_window_in_some_layers_is_refused() -> None:
    changes = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(CheckpointError, match="sliding"):
        Architecture.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"], **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"qk_norm": False}, "qk_norm"),
        ({"family": "llama"}, "llama"),
        ({"o_bias": True}, "biases"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"family": "gpt2"}, "gpt2"),
    ],
)
def test_fields_that_do_not_fit_together(changes: dict[str, Any], words: str) -> None:
    good = Architecture.from_hf(QWEN3_MOE)
    with pytest.raises(CheckpointError, match=words):
        replace(good, **changes)


def test_kv_values_per_token_counts_keys_and_values() -> None:
    a = Architecture.from_hf(LLAMA)
    assert a.kv_values_per_token == 2 * 2 * 2 * 16


NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 2.0}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *[({name: value}, name) for name in ("rope_scaling", "rope_parameters") for value in ("x", 5, ["yarn"], True)],
        *[({"quantization_config": value}, "quantization_config") for value in ("fp8", 5, [1])],
        *[({"rope_theta": value}, "rope_theta") for value in ("x", NAN, INF, -1, 0, 1, [1], {}, True, 10**400)],
        *[({"rope_parameters": {"rope_theta": value}}, "rope_theta") for value in ("x", NAN, INF, -1)],
        *[({"rms_norm_eps": value}, "rms_norm_eps") for value in (10**400, NAN, "x")],
        *[
            ({"rope_parameters": {**YARN, name: value}}, name)
            for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
            for value in ("x", [1], NAN, INF, -1.0, True)
        ],
        ({"rope_parameters": {**YARN, "factor": 1e-300}}, "factor"),
        ({"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "beta_slow"),
        ({"rope_parameters": {**YARN, "truncate": "no"}}, "truncate"),
        *[
            (
                {"rope_parameters": {**YARN, "original_max_position_embeddings": value}},
                "original_max_position_embeddings",
            )
            for value in ("x", -5, 0, 2.5)
        ],
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor",
        ),
        *[({"sliding_window": value}, "sliding_window") for value in ("x", [], -1, 1.5)],
        *[({**QWEN3, "sliding_window": value}, "sliding_window") for value in ("x", {}, -1)],
        *[({**QWEN3, "sliding_window": 16, "layer_types": value}, "layer_types") for value in (5, "x", [[1]], True)],
        *[
            ({**QWEN3, "sliding_window": 16, "max_window_layers": value}, "max_window_layers")
            for value in ("x", [1], -1)
        ],
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_hf({**LLAMA, **changes}, "somewhere/config.json")
    assert f"'{key}'" in str(caught.value)
    assert "somewhere/config.json" in str(caught.value)


def test_max_window_layers_null_is_the_default_of_28() -> None:
    read = Architecture.from_hf({**LLAMA, **QWEN3, "sliding_window": 16, "max_window_layers": None})
    assert read.n_layers == LLAMA["num_hidden_layers"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"num_experts": None, "num_local_experts": 10**9}, "num_local_experts"),
        ({"num_hidden_layers": 10**4, "num_experts": 10**5}, "num_experts"),
    ],
)
def test_counts_that_would_take_hours_to_list_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        Architecture.from_hf({**QWEN3_MOE, **changes})
