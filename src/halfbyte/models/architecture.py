"""What a model is made of: one record of sizes and switches for every family we run, to and from config.json.

The names and shapes that follow from it are in :mod:`halfbyte.models.parameter_names` and importable from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfbyte.errors import CheckpointError
from halfbyte.models.config_fields import ConfigFields
from halfbyte.models.parameter_names import (
    Site,
    expert_names,
    parameter_count,
    parameter_shapes,
    parameters_by_site,
    router_name,
    site_of,
)
from halfbyte.models.rope import RopeScaling, rope_tables

__all__ = [
    "FAMILIES",
    "Architecture",
    "Family",
    "Site",
    "expert_names",
    "parameter_count",
    "parameter_shapes",
    "parameters_by_site",
    "router_name",
    "site_of",
]

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]

#: Family -> the class name in ``architectures`` of config.json. ``model_type`` is the family's own name.
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}

#: Bounds far above any model, so that a config.json that lies cannot make us list tensor names for hours.
MOST_LAYERS, MOST_EXPERTS = 10_000, 200_000


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder-only model. Immutable, hashable, and checked when made.

    Arguments:
        family: one of :data:`FAMILIES`.
        vocab_size, hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, head_dim: the usual sizes.
            ``intermediate_size`` is the dense MLP's; experts have ``moe_intermediate_size``.
        max_positions: the longest sequence the model was made for, in tokens.
        rope_theta, rope_scaling: rotary base and context extension (:class:`halfbyte.models.rope.RopeScaling`).
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: the head multiplies by the embedding matrix; there is no ``lm_head.weight``.
        qkv_bias, o_bias: biases of the query/key/value and of the output projection (Qwen2: qkv only).
        qk_norm: RMSNorm over each head of queries and keys, before rotation (Qwen3).
        n_experts, experts_per_token, moe_intermediate_size: 0 for dense models.
        norm_topk_prob: the chosen experts' probabilities are divided by their sum.
        mlp_only_layers, decoder_sparse_step: every ``decoder_sparse_step``-th layer has experts, unless it is listed.
        bos_ids, eos_ids: every id that config.json names, in its order.
        pad_id: padding id, or None.
        hidden_act: only ``silu``.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    n_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    hidden_act: Literal["silu"] = "silu"

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise CheckpointError("; ".join(problems), where="Architecture")

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> Architecture:
        """Read a Hugging Face config, as transformers 4 or 5 writes it.

        Arguments:
            config: the parsed config.json.
            where: file name for messages.
        Raises:
            CheckpointError: an architecture or an active feature that we do not run, or a missing or unusable key.
        """
        family = _family_of(config, where)
        fields = ConfigFields(config, where)
        _refuse_unsupported(fields, family)
        heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
        kv_default = heads if family == "llama" or "num_key_value_heads" in config else None
        max_positions = fields.positive("max_position_embeddings")
        rope: dict[str, Any] = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
        rope |= {**fields.table("rope_scaling"), **fields.table("rope_parameters")}
        theta = ConfigFields(rope, where).number("rope_theta", default=1e6 if family == "mixtral" else 10000.0, least=1)
        if theta == 1:  # every pair would turn at the same rate, and YaRN divides by its logarithm
            raise CheckpointError("key 'rope_theta' is 1", where=where, expected="a number above 1")
        all_biased = fields.flag("attention_bias") if family in ("llama", "qwen3", "qwen3_moe") else False
        moe: dict[str, Any] = {}
        if family == "qwen3_moe":
            moe = {
                "n_experts": fields.count("num_experts", "num_local_experts", most=MOST_EXPERTS),
                "experts_per_token": fields.count("num_experts_per_tok"),
                "moe_intermediate_size": fields.count("moe_intermediate_size"),
                "norm_topk_prob": fields.flag("norm_topk_prob"),
                "mlp_only_layers": fields.ids("mlp_only_layers"),
                "decoder_sparse_step": fields.positive("decoder_sparse_step", default=1),
            }
        elif family == "mixtral":
            moe = {
                "n_experts": fields.positive("num_local_experts", "num_experts", most=MOST_EXPERTS),
                "experts_per_token": fields.positive("num_experts_per_tok"),
                "moe_intermediate_size": fields.positive("intermediate_size"),
                "norm_topk_prob": True,
            }
        try:
            return cls(
                family=family,
                vocab_size=fields.positive("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.positive("intermediate_size"),
                n_layers=fields.positive("num_hidden_layers", most=MOST_LAYERS),
                n_heads=heads,
                n_kv_heads=fields.positive("num_key_value_heads", default=kv_default),
                head_dim=fields.positive("head_dim", default=128 if family == "qwen3" else hidden // heads),
                max_positions=max_positions,
                rope_theta=theta,
                rope_scaling=RopeScaling.from_hf(rope, max_positions, where),
                norm_eps=fields.number("rms_norm_eps", default=1e-5 if family == "mixtral" else 1e-6),
                tie_embeddings=fields.flag("tie_word_embeddings"),
                qkv_bias=family == "qwen2" or all_biased,
                o_bias=all_biased,
                qk_norm=family in ("qwen3", "qwen3_moe"),
                bos_ids=fields.ids("bos_token_id"),
                eos_ids=fields.ids("eos_token_id"),
                pad_id=next(iter(fields.ids("pad_token_id")), None),
                **moe,
            )
        except CheckpointError as error:
            raise CheckpointError(error.what, where=where, expected=error.expected, fix=error.fix) from error

    def to_hf(self, *, dtype: str | None = None) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 load. ``dtype`` is torch's name of the weights' type (bfloat16)."""
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {"rope_type": "default"}
        config: dict[str, Any] = {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            # transformers 5 reads rope_parameters, transformers 4 the other two.
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": self.hidden_act,
            "bos_token_id": _one_or_all(self.bos_ids),
            "eos_token_id": _one_or_all(self.eos_ids),
            "pad_token_id": self.pad_id,
        }
        if self.rope_scaling:
            config["rope_scaling"] = scaling
        if self.family in ("llama", "qwen3", "qwen3_moe"):
            config["attention_bias"] = self.o_bias
        if self.family.startswith("qwen"):
            config |= {"use_sliding_window": False, "sliding_window": None}
        if self.family == "qwen3_moe":
            config |= {
                "num_experts": self.n_experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "mlp_only_layers": list(self.mlp_only_layers),
                "decoder_sparse_step": self.decoder_sparse_step,
            }
        if self.family == "mixtral":
            config |= {"num_local_experts": self.n_experts, "num_experts_per_tok": self.experts_per_token}
        if dtype is not None:
            config |= {"dtype": dtype, "torch_dtype": dtype}
        return config

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer routes to experts instead of running a dense MLP."""
        return self.n_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, ascending; empty for dense models."""
        return tuple(layer for layer in range(self.n_layers) if self.is_moe_layer(layer))

    @property
    def kv_values_per_token(self) -> int:
        """Numbers a token leaves in the KV cache over all layers (keys and values)."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    def rope_tables(self, n_positions: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [n_positions, head_dim/2]; ``max_positions`` rows unless told otherwise."""
        rows = self.max_positions if n_positions is None else n_positions
        return rope_tables(rows, self.head_dim, self.rope_theta, self.rope_scaling)


def _problems(a: Architecture) -> list[str]:
    found = []
    if a.family not in FAMILIES:
        return [f"family {a.family!r} is not supported; supported: {', '.join(FAMILIES)}"]
    for field in ("vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads", "head_dim"):
        if getattr(a, field) < 1:
            found.append(f"{field} must be positive, found {getattr(a, field)}")
    if found:
        return found
    if a.n_heads % a.n_kv_heads:
        found.append(f"{a.n_heads} query heads cannot share {a.n_kv_heads} key/value heads evenly")
    if a.head_dim % 2:
        found.append(f"head_dim must be even to rotate in pairs, found {a.head_dim}")
    if a.family == "qwen2" and not (a.qkv_bias and not a.o_bias):
        found.append("qwen2 has biases on q, k and v and none on o")
    if a.family != "qwen2" and a.qkv_bias != a.o_bias:
        found.append(f"{a.family} has biases on q, k, v and o or on none")
    if a.family == "mixtral" and a.qkv_bias:
        found.append("mixtral has no biases")
    if a.qk_norm != (a.family in ("qwen3", "qwen3_moe")):
        found.append(f"{a.family} {'has no' if a.qk_norm else 'needs'} qk_norm")
    if a.n_layers > MOST_LAYERS:
        found.append(f"n_layers must be at most {MOST_LAYERS}, found {a.n_layers}")
    if a.n_layers * a.n_experts > MOST_EXPERTS:
        found.append(
            f"num_hidden_layers {a.n_layers} times num_experts {a.n_experts} must be at most {MOST_EXPERTS} experts"
        )
    if a.n_experts:
        if a.family not in ("qwen3_moe", "mixtral"):
            found.append(f"{a.family} has no experts")
        if not 1 <= a.experts_per_token <= a.n_experts:
            found.append(f"experts_per_token must be in 1..{a.n_experts}, found {a.experts_per_token}")
        if a.moe_intermediate_size < 1:
            found.append(f"moe_intermediate_size must be positive, found {a.moe_intermediate_size}")
    elif a.family == "mixtral":
        found.append("mixtral needs experts")
    if a.decoder_sparse_step < 1:
        found.append(f"decoder_sparse_step must be positive, found {a.decoder_sparse_step}")
    outside = [token for token in a.eos_ids if not 0 <= token < a.vocab_size]
    if outside:
        found.append(f"eos_ids {outside} lie outside the vocabulary of {a.vocab_size}: nothing would stop")
    return found


def _family_of(config: dict[str, Any], where: str) -> Family:
    named = config.get("architectures") or []
    supported = f"one of {', '.join(FAMILIES.values())}"
    if isinstance(named, list) and named:
        for family, class_name in FAMILIES.items():
            if named[0] == class_name:
                return family  # type: ignore[return-value]
        raise CheckpointError(f"architecture {named[0]!r} is not supported", where=where, expected=supported)
    if config.get("model_type") in FAMILIES:
        return config["model_type"]  # type: ignore[no-any-return]
    raise CheckpointError(f"model type {config.get('model_type')!r} is not supported", where=where, expected=supported)


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    config = fields.config
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"activation {config['hidden_act']!r} is not supported", where=fields.where, expected="hidden_act silu"
        )
    if fields.flag("mlp_bias"):
        raise CheckpointError("MLP biases are not supported", where=fields.where, expected="mlp_bias false")
    if quantised := fields.table("quantization_config"):
        method = quantised.get("quant_method", "unnamed")
        raise CheckpointError(
            f"the checkpoint is already quantised ({method})",
            where=fields.where,
            expected="BF16, FP16 or FP32 weights",
            fix="use the unquantised model; halfbyte quantises it itself",
        )
    window = fields.count("sliding_window", default=0) or None
    if family.startswith("qwen") and not fields.flag("use_sliding_window"):
        window = None
    reaches = window is not None and window < fields.positive("max_position_embeddings")
    if _some_layer_slides(fields, family) and reaches:
        raise CheckpointError(
            f"sliding-window attention (window {window}) is not supported",
            where=fields.where,
            expected="full attention in every layer",
            fix="set sliding_window to null if the model was trained with full attention",
        )


def _some_layer_slides(fields: ConfigFields, family: Family) -> bool:
    kinds, first = fields.texts("layer_types"), fields.count("max_window_layers", default=28)
    if family not in ("qwen2", "qwen3"):
        return True
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return first < fields.positive("num_hidden_layers")


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
