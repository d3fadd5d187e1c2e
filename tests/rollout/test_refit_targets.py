"""Refits into the engine, against packing the whole new version: every packed bit, and every sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_case import Tensors, assert_packed_alike, make_engine, published, samples, step, update_of

from halfbyte.errors import NumericsError, RefitError
from halfbyte.formats import StableScales, get_spec, quantise
from halfbyte.kernels import active
from halfbyte.kernels.reference import ReferenceKernels
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.refit.arrays import flat_bytes
from halfbyte.refit.errors import LayoutError
from halfbyte.refit.patch import Change, Stamp, Update
from halfbyte.rollout.code_changes import code_changes
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.fp4_target import Fp4EngineTarget, fp4_coordinates, fp4_infos
from halfbyte.rollout.packer import requantised
from halfbyte.rollout.refit_target import EngineTarget, SharedEngineTarget
from halfbyte.rollout.request import Request
from halfbyte.rollout.weights import published as source_of

FAMILIES = ("qwen3_moe", "qwen3", "qwen2", "llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["w4a4kv4", "bf16", "w4a4kv4-head", "phased"])
def test_a_refit_is_bit_for_bit_a_full_load(family: str, precision: str, family_folders: dict[str, Path]) -> None:
    choice: Any = precision
    if precision == "phased":
        choice = {"preset": "w4a4kv4", "decode": {"experts": "bf16", "attention": "w4a16"}}
    folder = family_folders[family]
    tensors = published(folder)
    engine = make_engine(folder, tensors, choice)
    target = EngineTarget(engine, tensors)
    for version, share in ((1, 0.001), (2, 0.03), (3, 0.0), (4, 0.9)):
        after = step(tensors, version, share)
        change = update_of(tensors, after, version)
        before = samples(engine)
        target.stage(change)
        assert samples(engine) == before, "staging is invisible"
        target.commit(change)
        target.resume()
        target.discard(change)
        fresh = make_engine(folder, after, choice)
        assert_packed_alike(engine.weights, fresh.weights)
        assert [s[:2] for s in samples(engine)] == [s[:2] for s in samples(fresh)]
        assert all(v == version for s in samples(engine) for v in s[2])
        assert all(target.read(n).tobytes() == flat_bytes(after[n]).tobytes() for n in target.infos())
        tensors = after


def test_the_trainers_engine_shares_what_was_published(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    held = [source_of(engine.arch, engine.precision, tensors)]
    target = SharedEngineTarget(engine, lambda: held[-1])
    for version, share in ((1, 0.02), (2, 0.6)):
        after = step(tensors, version, share)
        held.append(source_of(engine.arch, engine.precision, after))
        change = update_of(tensors, after, version)
        target.stage(change)
        target.commit(change)
        assert_packed_alike(engine.weights, make_engine(folder, after).weights)
        assert target.source.params["model.norm.weight"] is held[-1].params["model.norm.weight"]
        target.rollback(change)
        assert_packed_alike(engine.weights, make_engine(folder, tensors).weights)
        assert all(target.read(n).tobytes() == flat_bytes(tensors[n]).tobytes() for n in target.infos())
        target.commit(change)
        target.discard(change)
        tensors = after
    held.append(source_of(engine.arch, engine.precision, tensors))
    with pytest.raises(RefitError, match="not those that were published"):
        target.stage(update_of(tensors, step(tensors, 9, 0.1), 3))


def test_only_touched_rows_are_quantised_and_untouched_matrices_are_shared(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    target = EngineTarget(engine, tensors)
    after = {n: t.clone() for n, t in tensors.items()}
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    after[name].view(torch.int16)[3, 5] ^= 1
    old = engine.weights
    change = update_of(tensors, after, 1)
    target.stage(change)
    target.commit(change)
    assert target.rows_quantised == 1
    for key, linear in engine.weights.linears.items():
        assert linear is old.linears[key]
    assert engine.weights.experts[0, "w4a4"] is not old.experts[0, "w4a4"]
    assert_packed_alike(engine.weights, make_engine(folder, after).weights)


def test_the_way_back_is_exact_from_before_and_after_the_swap(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    target = EngineTarget(engine, tensors, stamp=Stamp("r", 0, "a"))
    before = samples(engine)
    change = update_of(tensors, step(tensors, 1, 0.05), 1)
    for committed in (False, True):
        target.stage(change)
        if committed:
            target.commit(change)
            assert samples(engine) != before
        target.rollback(change)
        target.resume()
        assert samples(engine) == before
        assert target.stamp() == change.source
        assert all(target.read(n).tobytes() == flat_bytes(tensors[n]).tobytes() for n in target.infos())
        target.discard(change)
    with pytest.raises(RefitError, match="staged"):
        target.commit(change)


def test_nemo_rl_4018_prefix_pages_belong_to_a_version(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    target = EngineTarget(engine, tensors)
    prompt = tuple(range(2, 40))
    request = Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), key=1)
    engine.generate([request])
    after = step(tensors, 5, 0.3)
    change = update_of(tensors, after, 1)
    target.stage(change)
    target.commit(change)
    target.resume()
    fresh = make_engine(folder, after)
    assert engine.generate([request])[0].logprobs.tolist() == fresh.generate([request])[0].logprobs.tolist()


def test_what_cannot_be_served_is_refused_before_the_swap(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    target, serving = EngineTarget(engine, tensors), engine.weights
    bad = {n: t.clone() for n, t in tensors.items()}
    bad["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    with pytest.raises(NumericsError, match="q_proj"):
        target.stage(update_of(tensors, bad, 1))
    info = target.infos()["model.norm.weight"]
    with pytest.raises(LayoutError, match=r"model\.norm"):
        target.stage(Update(None, Stamp("r", 1, "b"), (Change(info, None, old=np.zeros(1, np.uint8)),)))
    assert engine.weights is serving


@pytest.mark.parametrize(
    "rule", ["halfbyte", "halfbyte_2d", "halfbyte_token", "torchao", "compressed_tensors", "mx_even"]
)
@pytest.mark.parametrize("kernels", [active(), ReferenceKernels()], ids=["active", "reference"])
def test_requantised_rows_are_those_of_quantising_everything(rule: str, kernels: Any) -> None:
    spec, generator = get_spec(rule), torch.Generator().manual_seed(3)
    w = torch.randn(48, 64, generator=generator).bfloat16()
    for scale in (1.0, 1.0, 300.0):  # the last one moves the global scale: everything is quantised
        old = kernels.pack_linear(kernels.quantise(w, spec), "w4a16").store.unpacked()
        after = w.clone()
        after[[3, 17, 40], [0, 1, 2]] *= scale * 0.5
        rows = (after != w).any(1)
        q, count = requantised(kernels, after, spec, old=old, rows=rows)
        full = quantise(after, spec)
        assert torch.equal(q.codes, full.codes)
        assert torch.equal(q.scales, full.scales)
        # three rows of three 16-row tiles; a reciprocal scale is not compared, so everything is quantised
        partial = 48 if rule in ("halfbyte_2d", "compressed_tensors") else 3
        assert count == (partial if scale == 1.0 else count)
        w = after


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_patched_directly_serve_what_quantising_the_weights_serves(
    family: str, family_folders: dict[str, Path]
) -> None:
    folder = family_folders[family]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    arch, precision = engine.arch, engine.precision
    before = fp4_coordinates(arch, precision, tensors, engine.kernels)
    plain = samples(engine)
    target = Fp4EngineTarget(engine, before)
    assert samples(engine) == plain
    for version in (1, 2, 3):
        published_after = step(tensors, version, (0.01, 0.5, 0.0)[version - 1])
        if version == 2:
            published_after["model.layers.0.self_attn.q_proj.weight"][0, 0] *= 64  # its global scale moves
        after = fp4_coordinates(arch, precision, published_after, engine.kernels)
        change = update_of(before, after, version, fp4_infos(after))
        target.stage(change)
        target.commit(change)
        target.discard(change)
        fresh = make_engine(folder, published_after)
        assert [s[:2] for s in samples(engine)] == [s[:2] for s in samples(fresh)]
        assert_packed_alike(engine.weights, fresh.weights)
        assert all(target.read(n).tobytes() == flat_bytes(after[n]).tobytes() for n in target.infos())
        before, tensors = after, published_after


def test_codes_roll_back_and_bad_scales_are_refused(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    engine = make_engine(folder, tensors)
    before = fp4_coordinates(engine.arch, engine.precision, tensors, engine.kernels)
    target = Fp4EngineTarget(engine, before)
    plain = samples(engine)
    after = fp4_coordinates(engine.arch, engine.precision, step(tensors, 1, 0.3), engine.kernels)
    change = update_of(before, after, 1, fp4_infos(after))
    for committed in (False, True):
        target.stage(change)
        if committed:
            target.commit(change)
        target.rollback(change)
        assert samples(engine) == plain
        assert all(target.read(n).tobytes() == flat_bytes(before[n]).tobytes() for n in target.infos())
        target.discard(change)
    name = next(n for n in before if n.endswith(".scales"))
    bad = {n: t.clone() for n, t in before.items()}
    bad[name].view(-1)[0] = 0x81
    with pytest.raises(NumericsError, match=name.removesuffix(".scales")):
        target.stage(update_of(before, bad, 1, fp4_infos(bad)))
    assert samples(engine) == plain


def test_codes_alone_cannot_serve_a_site_that_also_runs_in_bf16(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    engine = make_engine(folder, published(folder), {"preset": "w4a4kv4", "decode": {"experts": "bf16"}})
    with pytest.raises(LayoutError, match="experts"):
        fp4_coordinates(engine.arch, engine.precision, published(folder), engine.kernels)


def test_scales_kept_by_the_learner_reach_the_engine_and_stop_the_avalanche(family_folders: dict[str, Path]) -> None:
    """One weight at the top of its matrix moves by an ulp: with amax / 2688 every code of the matrix is rolled anew."""
    folder = family_folders["qwen3_moe"]
    name = "model.layers.0.self_attn.o_proj.weight"
    found = {}
    for policy in ("recompute", "frozen", "hysteretic"):
        spec = get_spec("halfbyte").replace(global_rounding="none", global_update=policy)
        tensors = published(folder)
        arch = load_checkpoint(folder).architecture
        precision = precision_from("w4a4kv4")
        from dataclasses import replace

        precision = replace(precision, weight_spec=spec, name="kept")
        kept = StableScales(spec)

        def with_scales(tensors: Tensors, kept: StableScales = kept, policy: str = policy) -> Tensors:
            if policy == "recompute":
                return tensors
            scale = kept.update({name: [tensors[name]]}).of(name)
            return tensors | {f"{name}.global_scale": scale}

        before = with_scales(tensors)
        engine = Engine(arch, precision, before, options=EngineOptions(kv_memory_mb=2))
        target = EngineTarget(engine, before)
        old = engine.weights
        moved = {n: t.clone() for n, t in tensors.items()}
        flat = moved[name].view(-1)
        flat.view(torch.int16)[int(flat.float().abs().argmax())] += 1
        after = with_scales(moved)
        change = update_of(before, after, 1)
        target.stage(change)
        target.commit(change)
        fresh = Engine(arch, precision, after, options=EngineOptions(kv_memory_mb=2))
        assert_packed_alike(engine.weights, fresh.weights)
        found[policy] = code_changes(old, engine.weights)
        if policy != "recompute":
            q = quantise(moved[name], spec, global_scale=kept.current[name])
            group = engine.weights.linears[("model.layers.0.self_attn.o_proj",), "w4a4"].store.unpacked()
            assert torch.equal(group.codes, q.codes)
    size = tensors[name].numel()
    assert found["recompute"].avalanches == 1
    assert found["recompute"].avalanche_codes == found["recompute"].changed_codes > 0.005 * size
    for policy in ("frozen", "hysteretic"):
        assert found[policy].avalanches == 0
        assert found[policy].changed_codes <= 16
        assert found[policy].codes == found["recompute"].codes


def test_code_changes_agree_with_a_count_over_all_codes(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    tensors = published(folder)
    after = step(tensors, 7, 0.4)
    a, b = make_engine(folder, tensors), make_engine(folder, after)
    left = fp4_coordinates(a.arch, a.precision, tensors, a.kernels)
    right = fp4_coordinates(a.arch, a.precision, after, a.kernels)
    changes = code_changes(a.weights, b.weights)
    codes = [n for n in left if n.endswith(".codes")]
    nibbles = [(x & 15, x >> 4) for x in (left[n] ^ right[n] for n in codes)]
    assert changes.codes == sum(2 * left[n].numel() for n in codes)
    assert changes.changed_codes == sum(int((part != 0).sum()) for pair in nibbles for part in pair)
    scales = [n for n in left if n.endswith(".scales")]
    assert changes.changed_scales == sum(int((left[n] != right[n]).sum()) for n in scales)
    assert code_changes(a.weights, a.weights).changed_codes == 0
