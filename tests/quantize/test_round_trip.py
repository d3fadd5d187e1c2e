"""What quantize writes is what the engine packs, bit for bit, and what everything that opens a model reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp4_models import DENSE, MODELS, MOE, TIED, save, weights

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.formats import dequantise, get_spec
from halfbyte.kernels import active
from halfbyte.models.architecture import parameter_shapes, site_of
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.fp4 import StyleName
from halfbyte.models.precision import Precision, precision_from, with_weight_spec
from halfbyte.models.trajectory import SamplingParams
from halfbyte.quantize.export import quantize_model
from halfbyte.quantize.plan import Kind
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request, request_key
from halfbyte.rollout.weights import RolloutWeights

STYLES: list[StyleName] = ["compressed-tensors", "modelopt", "halfbyte"]
KIND_OF = {"w4a4": "w4a4kv4", "w4a16": "w4a16", "experts-only": "experts-w4a4kv4"}


def packed(checkpoint: Checkpoint, precision: Precision, *, codes: bool = True) -> RolloutWeights:
    return RolloutWeights.pack(
        checkpoint.architecture,
        precision,
        checkpoint.tensors,
        active(),
        version=0,
        n_positions=16,
        codes=checkpoint.codes if codes else None,
    )


def values(w: RolloutWeights) -> dict[str, torch.Tensor]:
    """Every packed matrix as the products use it."""
    out = {"+".join(names): linear.dequantised() for (names, _), linear in w.linears.items()}
    for (layer, _), experts in w.experts.items():
        out[f"{layer}.gate_up"], out[f"{layer}.down"] = experts.dequantised()
    return out


def require_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("kind", ["w4a4", "w4a16", "experts-only"])
def test_the_engine_has_the_same_weights_from_either_folder(
    tmp_path: Path, model: str, kind: Kind, style: StyleName
) -> None:
    arch = MODELS[model]
    source = save(tmp_path / "model", arch)
    if kind == "experts-only" and not arch.n_experts:
        with pytest.raises(ConfigError, match="no experts"):
            quantize_model(str(source), tmp_path / "fp4", style=style, kind=kind)
        return
    report = quantize_model(str(source), tmp_path / "fp4", style=style, kind=kind)
    assert report.quantised.differing == {}
    before, after = load_checkpoint(source), load_checkpoint(tmp_path / "fp4")
    precision = precision_from(KIND_OF[kind])
    expected = values(packed(before, precision))
    require_equal(values(packed(after, precision)), expected)
    # An engine that quantises the values anew, as training does, ends there too.
    require_equal(values(packed(after, precision, codes=False)), expected)
    assert after.quantisation is not None
    assert after.quantisation.spec == get_spec("halfbyte")
    assert after.quantisation.quantised_inputs == (kind != "w4a16")
    assert set(after.tensors) == set(parameter_shapes(after.architecture))
    coded = {"experts"} if kind == "experts-only" else {"attention", "mlp", "experts"}
    for name, tensor in before.tensors.items():
        if name in after.codes:
            assert site_of(name) in coded
            assert after.tensors[name].dtype == torch.bfloat16  # exact: the global scale is a power of two
            assert torch.equal(after.tensors[name].float(), after.codes[name].dequantise())
        else:  # routers, heads, norms, biases, embeddings: the same bits
            assert tensor.dim() == 1 or site_of(name) not in coded
            assert torch.equal(after.tensors[name], tensor)


@pytest.mark.parametrize("spec", ["mx_floor", "mx_even", "mx_rceil", "mx_modelopt", "mx_naive"])
@pytest.mark.parametrize("style", ["compressed-tensors", "halfbyte"])
def test_mxfp4_round_trips_under_every_rule(tmp_path: Path, spec: str, style: StyleName) -> None:
    source = save(tmp_path / "model", MOE)
    quantize_model(str(source), tmp_path / "fp4", style=style, kind="w4a4", spec_name=spec)
    before, after = load_checkpoint(source), load_checkpoint(tmp_path / "fp4")
    assert after.quantisation is not None
    assert after.quantisation.spec == get_spec(spec)
    precision = with_weight_spec(precision_from("w4a4kv4"), get_spec(spec))
    assert precision.activation_spec.format == "mxfp4"
    require_equal(values(packed(after, precision)), values(packed(before, precision)))
    assert after.input_scales == {}


def test_vllm_43557_the_rules_of_the_mx_exponent_are_distinct(tmp_path: Path) -> None:
    """floor(log2(amax / 6)) is 5 dB worse than the good rules; a checkpoint says which rule it has."""
    source = save(tmp_path / "model", DENSE)
    errors = {}
    for spec in ("mx_floor", "mx_even", "mx_rceil", "mx_naive"):
        report = quantize_model(str(source), tmp_path / spec, style="compressed-tensors", kind="w4a4", spec_name=spec)
        errors[spec] = report.relative_error
        assert load_checkpoint(tmp_path / spec).quantisation.spec == get_spec(spec)  # type: ignore[union-attr]
    assert len(set(errors.values())) == 4
    assert errors["mx_naive"] > 1.5 * min(errors.values())


@pytest.mark.parametrize(("spec", "style"), [("compressed_tensors", "compressed-tensors"), ("modelopt", "modelopt")])
def test_a_librarys_own_rule_keeps_its_bits(tmp_path: Path, spec: str, style: StyleName) -> None:
    """Global scales that are no powers of two: the values need FP32, and the codes go to the engine as they are."""
    source = save(tmp_path / "model", TIED)
    quantize_model(str(source), tmp_path / "fp4", style=style, kind="w4a16", spec_name=spec)
    after = load_checkpoint(tmp_path / "fp4")
    name = "model.layers.0.mlp.down_proj.weight"
    own = active().quantise(weights(TIED)[name], get_spec(spec))
    assert torch.equal(after.codes[name].codes, own.codes)
    assert after.tensors[name].dtype == torch.float32
    assert torch.equal(after.tensors[name], dequantise(own))
    made = packed(after, with_weight_spec(precision_from("w4a16"), after.codes[name].spec))
    assert torch.equal(made.linears[(name.removesuffix(".weight"),), "w4a16"].dequantised(), dequantise(own))


def test_the_engine_samples_the_same_tokens(tmp_path: Path) -> None:
    source = save(tmp_path / "model", MOE)
    quantize_model(str(source), tmp_path / "fp4", style="compressed-tensors", kind="w4a4")
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for folder in (source, tmp_path / "fp4"):
        checkpoint = load_checkpoint(folder)
        engine = Engine(
            checkpoint.architecture,
            precision_from("w4a4kv4"),
            checkpoint.tensors,
            options=EngineOptions(kv_memory_mb=4.0),
            codes=checkpoint.codes,
        )
        requests = [Request((3, 5, i), sampling, n=2, key=request_key("t", str(i)), group=i) for i in range(3)]
        found.append([(t.response_ids.tolist(), t.logprobs.tolist()) for t in engine.generate(requests)])
    assert found[0] == found[1]


def test_a_site_that_runs_in_bf16_gets_the_values(tmp_path: Path) -> None:
    source = save(tmp_path / "model", MOE)
    quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4")
    after = load_checkpoint(tmp_path / "fp4")
    mixed = precision_from({"preset": "w4a4kv4", "prefill": {"experts": "bf16", "mlp": "bf16"}})
    made = packed(after, mixed)
    for (names, kind), linear in made.linears.items():
        expected = torch.cat([after.tensors[f"{n}.weight"] for n in names]).float()
        if kind in ("bf16", "w4a4"):
            assert torch.equal(linear.dequantised(), expected), (names, kind)
    with pytest.raises(ConfigError, match="one format"):
        packed(after, with_weight_spec(precision_from("w4a4kv4"), get_spec("mx_floor")))


def test_scales_too_small_under_a_shared_global_are_counted(tmp_path: Path) -> None:
    """A block 2^-13 of its matrix's largest value, in a matrix 64 times smaller than its neighbour: its scale is subnormal
    under the neighbour's global scale, and the notes say so. Our own style shares nothing and stays exact."""
    tensors = weights(DENSE)
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    k.clamp_(-0.1, 0.1)[0, :16] = torch.linspace(1, 1.9, 16) * 2.0**-17
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 8.0
    source = save(tmp_path / "model", DENSE, tensors)
    report = quantize_model(str(source), tmp_path / "fp4", style="compressed-tensors", kind="w4a4")
    assert report.quantised.differing["model.layers.0.self_attn.k_proj.weight"] > 0
    assert any("k_proj" in note and "round otherwise" in note for note in report.notes)
    own = quantize_model(str(source), tmp_path / "own", style="halfbyte", kind="w4a4")
    assert own.quantised.differing == {}
    precision = precision_from("w4a4kv4")
    require_equal(
        values(packed(load_checkpoint(tmp_path / "own"), precision)), values(packed(load_checkpoint(source), precision))
    )


def test_fused_projections_share_a_global_scale_where_engines_fuse_them(tmp_path: Path) -> None:
    """vLLM takes the largest of the stored scales of q, k and v, and of gate and up, for all of them."""
    source = save(tmp_path / "model", DENSE)
    for style, shared in (("compressed-tensors", True), ("modelopt", True), ("halfbyte", False)):
        quantize_model(str(source), tmp_path / style, style=style, kind="w4a4")  # type: ignore[arg-type]
        codes = load_checkpoint(tmp_path / style).codes
        scales = {float(codes[f"model.layers.0.self_attn.{part}_proj.weight"].global_scale) for part in "qkv"}
        assert (len(scales) == 1) == shared, style


def test_shards_hold_the_same_codes(tmp_path: Path) -> None:
    source = save(tmp_path / "model", MOE)
    for name, size in (("one", 10**9), ("many", 10_000)):
        quantize_model(str(source), tmp_path / name, style="modelopt", kind="w4a4", shard_bytes=size)
    one, many = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert one.codes.keys() == many.codes.keys()
    assert all(torch.equal(one.codes[name].codes, many.codes[name].codes) for name in one.codes)


def test_an_fp4_model_is_not_quantised_again(tmp_path: Path) -> None:
    source = save(tmp_path / "model", DENSE)
    quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4")
    with pytest.raises(CheckpointError, match="FP4 already"):
        quantize_model(str(tmp_path / "fp4"), tmp_path / "again", style="modelopt", kind="w4a4")
    assert not (tmp_path / "again").exists()


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    source, out = str(save(tmp_path / "model", DENSE)), tmp_path / "fp4"
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match="no MXFP4"):
        quantize_model(source, out, style="modelopt", kind="w4a4", spec_name="mx_floor")
    with pytest.raises(ConfigError, match="without rounding"):
        quantize_model(source, out, style="modelopt", kind="w4a4", spec_name="compressed_tensors")
    with pytest.raises(ConfigError, match="activations or KV"):
        quantize_model(source, out, style="halfbyte", kind="w4a4", spec_name="halfbyte_token")
    for kind, spec in (("w4a16", "halfbyte"), ("w4a4", "mx_even")):
        with pytest.raises(ConfigError, match="nothing here has input scales"):
            quantize_model(source, out, style="halfbyte", kind=kind, spec_name=spec, calibration=text)  # type: ignore[arg-type]
    out.mkdir()
    (out / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_model(source, out, style="modelopt", kind="w4a4", overwrite=True)
    odd = replace(DENSE, hidden_size=40, intermediate_size=40, n_heads=5, n_kv_heads=5, head_dim=8)
    with pytest.raises(ConfigError, match="no weight of this model"):
        quantize_model(str(save(tmp_path / "odd", odd)), tmp_path / "x", style="modelopt", kind="w4a4")


def test_a_failure_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = save(tmp_path / "model", DENSE), tmp_path / "fp4"
    quantize_model(str(source), out, style="modelopt", kind="w4a4")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    # A disk that gives other bytes back than were written.
    monkeypatch.setattr("halfbyte.quantize.export._same", lambda a, b: False)
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        quantize_model(str(source), out, style="halfbyte", kind="w4a16", overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.glob(".*")] == []
