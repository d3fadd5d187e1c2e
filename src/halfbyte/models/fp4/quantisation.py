"""What a folder says of its FP4 weights: ``quantization_config`` in config.json, hf_quant_config.json, fp4_spec.json.

The first two are what vLLM, SGLang and transformers read. ``fp4_spec.json`` is ours and says the rest: the complete
``QuantSpec``, whether inputs are quantised, where input scales come from, and what was left alone. Without it a foreign
checkpoint gets the spec of the library that its format is named after; its values are right all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.formats import QuantSpec, get_spec
from halfbyte.models.config_fields import ConfigFields
from halfbyte.models.fp4.style import STYLES, Style, StyleName

__all__ = ["SPEC_FILE", "Quantisation", "read_quantisation"]

SPEC_FILE = "fp4_spec.json"
_VERSION = 1
#: ModelOpt's names; others (AWQ, SVD, mixed) change the weights in ways that codes and scales do not tell.
_MODELOPT = {True: "NVFP4", False: "W4A16_NVFP4"}
_PACKED = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a folder are quantised.

    Attributes:
        style: how they are stored.
        spec: the rule that made the codes.
        quantised_inputs: W4A4 rather than W4A16, says the file. Our engine goes by its ``Precision`` instead.
        ignored: modules that are left in their own precision.
        input_scales: ``calibrated``, ``constant``, or ``none`` where inputs are scaled on the fly or not at all.
        notes: what a user may want to know of.
    """

    style: Style
    spec: QuantSpec
    quantised_inputs: bool
    ignored: tuple[str, ...] = ()
    input_scales: str = "none"
    notes: tuple[str, ...] = field(default=(), compare=False)

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        weights = self._arguments()
        inputs = self._arguments(inputs=True) if self.quantised_inputs else None
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        if self.style.name == "compressed-tensors":
            packed = _PACKED[self.spec.format]
            return {
                "quant_method": "compressed-tensors",
                "format": packed,
                "quantization_status": "compressed",
                "config_groups": {"group_0": {**group, "output_activations": None, "format": packed}},
                "ignore": list(self.ignored),
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
            }
        if self.style.name == "modelopt":
            slim = {
                key: {"dynamic": False, "num_bits": 4, "type": "float", "group_size": self.spec.block}
                for key in ("weights", "input_activations")
                if group[key] is not None
            }
            return {
                "quant_method": "modelopt",
                "quant_algo": _MODELOPT[self.quantised_inputs],
                "config_groups": {"group_0": {**slim, "targets": ["Linear"]}},
                "ignore": list(self.ignored),
                "producer": {"name": "halfbyte"},
            }
        return {"quant_method": "halfbyte", "format": self.spec.format, "ignore": list(self.ignored)}

    def legacy_config(self) -> dict[str, Any] | None:
        """hf_quant_config.json, which ModelOpt's readers look for first; None for the other styles."""
        if self.style.name != "modelopt":
            return None
        return {
            "producer": {"name": "halfbyte"},
            "quantization": {
                "quant_algo": _MODELOPT[self.quantised_inputs],
                "kv_cache_quant_algo": None,
                "group_size": self.spec.block,
                "exclude_modules": list(self.ignored),
            },
        }

    def record(self) -> dict[str, Any]:
        """fp4_spec.json, as :func:`read_quantisation` takes it; a writer may add keys."""
        return {
            "format_version": _VERSION,
            "format": self.style.name,
            "spec": self.spec.to_json(),
            "quantised_inputs": self.quantised_inputs,
            "input_scales": self.input_scales,
            "ignored": list(self.ignored),
        }

    def _arguments(self, *, inputs: bool = False) -> dict[str, Any]:
        """``QuantizationArgs`` of compressed-tensors. Scales of blocks of an input are always made on the fly: "local" under a
        global scale from calibration (NVFP4), or all of them (MXFP4)."""
        nvfp4 = self.spec.format == "nvfp4"
        dynamic: bool | str = ("local" if nvfp4 else True) if inputs else False
        out: dict[str, Any] = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group" if nvfp4 else "group",
            "group_size": self.spec.block,
            "dynamic": dynamic,
            "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
        }
        return {**out, "observer": "static_minmax"} if inputs and nvfp4 else out


def read_quantisation(
    config: dict[str, Any], legacy: dict[str, Any] | None, record: dict[str, Any] | None, where: str
) -> Quantisation | None:
    """How the weights of a folder are quantised; None where they are not.

    Arguments:
        config: config.json.
        legacy: hf_quant_config.json, where there is one.
        record: fp4_spec.json, where there is one.
        where: the folder, for messages.
    Raises:
        CheckpointError: a method that we do not read, a feature that codes and scales do not tell of, or files that disagree.
    """
    stated = ConfigFields(config, f"{where}/config.json").table("quantization_config")
    found = _stated(stated, f"{where}/config.json") if stated else None
    if legacy is not None:
        inner = ConfigFields(legacy, f"{where}/hf_quant_config.json").table("quantization")
        flat = {**inner, "quant_method": "modelopt", "ignore": inner.get("exclude_modules") or []}
        other = _stated(flat, f"{where}/hf_quant_config.json")
        if found is not None and (found.style, found.quantised_inputs) != (other.style, other.quantised_inputs):
            raise CheckpointError(
                "config.json and hf_quant_config.json disagree about the quantisation",
                where=where,
                fix="download the folder again",
            )
        found = found or other
    if record is None:
        if found is not None and found.style.name == "halfbyte":
            raise CheckpointError(f"there is no {SPEC_FILE}", where=where, expected="the rule of the codes")
        return found
    return _with_record(found, record, where)


def _stated(stated: dict[str, Any], where: str) -> Quantisation:
    method = stated.get("quant_method", "unnamed")
    style = STYLES.get(cast(StyleName, method)) if isinstance(method, str) else None
    if style is None:
        raise CheckpointError(
            f"the checkpoint is already quantised ({method})",
            where=where,
            expected=f"BF16, FP16 or FP32 weights, or FP4 as {', '.join(get_args(StyleName))} store it",
            fix="use the unquantised model; halfbyte quantises it itself",
        )
    fields = ConfigFields(stated, where)
    notes = []
    if stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo"):
        notes.append("the KV cache that the quantisation config asks for is ignored; --precision says what it is")
    if style.name == "compressed-tensors":
        block, inputs = _of_compressed_tensors(stated, where)
    elif style.name == "modelopt":
        algorithm = stated.get("quant_algo")
        if algorithm not in _MODELOPT.values() or stated.get("group_size") not in (None, 16):
            raise _unread(f"quant_algo {algorithm!r} with group_size {stated.get('group_size')!r}", where)
        block, inputs = 16, algorithm == _MODELOPT[True]
    else:
        block, inputs = (32 if stated.get("format") == "mxfp4" else 16), False
    spec = get_spec("mx_floor" if block == 32 else "modelopt" if style.name == "modelopt" else "compressed_tensors")
    if style.name != "halfbyte":
        notes.append(f"the rule of the codes is not on record; {spec.name} is assumed")
    return Quantisation(style, spec, inputs, fields.texts("ignore") or (), "none", tuple(notes))


def _of_compressed_tensors(stated: dict[str, Any], where: str) -> tuple[int, bool]:
    """Block and whether inputs are quantised, of a config with one scheme."""
    for key in ("transform_config", "sparsity_config"):
        active = stated.get(key)
        if active and active != {"format": "dense"}:
            raise _unread(f"an active {key}", where)
    groups = ConfigFields(stated, where).table("config_groups")
    schemes = set()
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise _unread(f"config group {name!r}", where)
        weights = ConfigFields(group, where).table("weights")
        size = weights.get("group_size")
        sound = (
            weights.get("num_bits") == 4
            and weights.get("type") == "float"
            and weights.get("symmetric", True) is True
            and size in (16, 32)
        )
        if not sound:
            raise _unread(f"config group {name!r} with weights {str(weights)[:120]}", where)
        schemes.add((32 if size == 32 else 16, bool(group.get("input_activations"))))
    if len(schemes) != 1:
        raise _unread(f"{len(schemes)} schemes", where)
    block, inputs = schemes.pop()
    packed = _PACKED["mxfp4" if block == 32 else "nvfp4"]
    if stated.get("format") != packed:
        raise _unread(f"format {stated.get('format')!r} with groups of {block}", where)
    return block, inputs


def _unread(what: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"the quantisation of this checkpoint is not one we read: {what}",
        where=where,
        expected=f"one scheme of {' or '.join(_PACKED.values())} (compressed-tensors), "
        f"or {' or '.join(_MODELOPT.values())} (modelopt)",
        fix="quantise the original model with halfbyte quantize",
    )


def _with_record(found: Quantisation | None, record: Mapping[str, Any], folder: str) -> Quantisation:
    where = f"{folder}/{SPEC_FILE}"
    if record.get("format_version") != _VERSION:
        raise CheckpointError(
            f"{SPEC_FILE} has format_version {record.get('format_version')!r}", where=where, expected=str(_VERSION)
        )
    spec_record = record.get("spec")
    try:
        if not isinstance(spec_record, dict):
            raise TypeError("no 'spec' object")
        spec = QuantSpec.from_json(spec_record)
        hash(spec)
    except (TypeError, ConfigError) as error:  # TypeError: a field of another type than any choice
        raise CheckpointError(f"the spec of {SPEC_FILE} cannot be read: {error}", where=where) from error
    stated = None if found is None else (found.style.name, found.spec.block)
    if stated is None or stated != (record.get("format"), spec.block):
        raise CheckpointError(
            f"{SPEC_FILE} and config.json disagree about the quantisation",
            where=where,
            expected=f"{stated[0]} with blocks of {stated[1]}" if stated else "a quantization_config in config.json",
            fix="take both from the same folder",
        )
    assert found is not None
    inputs, scales = record.get("quantised_inputs"), record.get("input_scales")
    if type(inputs) is not bool or scales not in ("none", "constant", "calibrated"):
        raise CheckpointError(f"{SPEC_FILE} does not say how inputs are scaled", where=where)
    notes = tuple(note for note in found.notes if "not on record" not in note)
    return Quantisation(found.style, spec, inputs, found.ignored, scales, notes)
