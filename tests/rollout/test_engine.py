"""What the engine promises beside invariance: stopping, versions, prefix pages, abort, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.errors import ConfigError, DataError, NumericsError
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request


class Letters:
    """A tokenizer whose token i is the letter chr(65 + i % 26)."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(65 + i % 26) for i in ids)


@pytest.fixture
def tensors(family_folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in load_checkpoint(family_folders["qwen3_moe"]).tensors.items()}


def make(
    family_folders: dict[str, Path],
    tensors: dict[str, torch.Tensor],
    *,
    precision: str = "w4a4kv4",
    eos: tuple[int, ...] = (1,),
    **options: object,
) -> Engine:
    from dataclasses import replace

    arch = replace(load_checkpoint(family_folders["qwen3_moe"]).architecture, eos_ids=eos)
    return Engine(
        arch,
        precision_from(precision),
        tensors,
        detokeniser=Letters(),
        options=EngineOptions(kv_memory_mb=2, **options),  # type: ignore[arg-type]
    )


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v * 1.25 if v.dim() > 1 else v for k, v in tensors.items()}


def test_trl_7039_every_eos_id_stops_and_is_kept(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    free = make(family_folders, tensors).generate(
        [Request((5, 6), SamplingParams(max_tokens=40, ignore_eos=True), key=3)]
    )[0]
    first, second = (int(free.response_ids[i]) for i in (4, 7))
    engine = make(family_folders, tensors, eos=(second, first))
    stopped = engine.generate([Request((5, 6), SamplingParams(max_tokens=40), key=3)])[0]
    cut = min(list(free.response_ids).index(first), list(free.response_ids).index(second))
    assert stopped.finish_reason == "eos"
    assert stopped.response_ids.tolist() == free.response_ids[: cut + 1].tolist()
    assert stopped.mask.all(), "the EOS is trained on (TRL #6357)"


def test_stop_string_ends_the_response_and_keeps_its_ids(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors)
    free = engine.generate([Request((5, 6), SamplingParams(max_tokens=30, ignore_eos=True), key=4)])[0]
    text = Letters().decode(free.response_ids.tolist())
    stop = text[6:9]
    stopped = engine.generate([Request((5, 6), SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)), key=4)])[0]
    assert stopped.finish_reason == "stop"
    assert Letters().decode(stopped.response_ids.tolist()) == text[: text.index(stop) + 3]


def test_stop_ids_and_length(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    engine = make(family_folders, tensors)
    free = engine.generate([Request((9,), SamplingParams(max_tokens=8, ignore_eos=True), key=5)])[0]
    assert free.finish_reason == "length"
    assert len(free.response_ids) == 8
    wanted = int(free.response_ids[3])
    stopped = engine.generate(
        [Request((9,), SamplingParams(max_tokens=8, ignore_eos=True, stop_ids=(wanted,)), key=5)]
    )[0]
    assert stopped.finish_reason == "stop"
    assert len(stopped.response_ids) == free.response_ids.tolist().index(wanted) + 1


def test_nemo_rl_4018_prefix_cache_never_serves_another_weight_version(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    prompt = tuple(range(2, 50))
    request = Request(prompt, SamplingParams(max_tokens=8, ignore_eos=True), key=6)
    engine = make(family_folders, tensors)
    engine.generate([request])
    assert engine.pool._prefix, "the prompt's pages are cached"
    engine.load_weights(changed(tensors), version=1)
    got = engine.generate([request])[0]
    fresh = make(family_folders, changed(tensors)).generate([request])[0]
    assert got.logprobs.tobytes() == fresh.logprobs.tobytes()
    assert got.versions.tolist() == [1] * 8


def test_prefix_cache_is_used_within_a_version(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors)
    request = Request(tuple(range(2, 50)), SamplingParams(max_tokens=2, ignore_eos=True), key=6)
    engine.generate([request])
    engine.add(request)
    work = engine.scheduler.schedule(engine.version)
    assert work[0].sample.computed == 32, "two full pages reused; the last token's page is computed"


def test_samples_of_a_prompt_share_its_pages(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    engine = make(family_folders, tensors, prefix_cache=False)
    engine.add(Request(tuple(range(2, 50)), SamplingParams(max_tokens=4, ignore_eos=True), n=8, key=1))
    engine.step()
    assert engine.pool.n_pages - engine.pool.available == 3, "48 prompt tokens: three pages for all eight samples"
    engine.step()
    assert engine.pool.n_pages - engine.pool.available == 3 + 8, "each sample writes to a page of its own"
    while engine.busy:
        engine.step()
    assert engine.pool.available == engine.pool.n_pages


def test_versions_are_stamped_per_token_across_an_update_in_flight(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors)
    engine.add(Request((4, 5, 6), SamplingParams(max_tokens=6, ignore_eos=True), key=8))
    for _ in range(3):
        engine.step()
    engine.load_weights(changed(tensors), version=5)
    finished = []
    while engine.busy:
        finished += engine.step()
    trajectory = finished[0][1]
    assert trajectory.versions.tolist() == [0, 0, 0, 5, 5, 5]
    # the later tokens are those of a fresh engine with the new weights, given the same beginning
    other = make(family_folders, changed(tensors))
    again = other.score((4, 5, 6), trajectory.response_ids.tolist())
    assert again[3:].tobytes() == trajectory.logprobs[3:].tobytes()


def test_trl_5937_version_must_grow(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    engine = make(family_folders, tensors)
    with pytest.raises(ConfigError, match="version 0 after 0"):
        engine.load_weights(tensors, version=0)


def test_failed_load_keeps_the_old_weights(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    engine = make(family_folders, tensors)
    request = Request((4, 5), SamplingParams(max_tokens=4), key=2)
    before = engine.generate([request])[0]
    broken = dict(tensors)
    broken["model.layers.1.self_attn.q_proj.weight"] = torch.full_like(
        broken["model.layers.1.self_attn.q_proj.weight"], float("nan")
    )
    with pytest.raises(NumericsError, match=r"layers\.1\.self_attn\.q_proj"):
        engine.load_weights(broken, version=1)
    assert engine.version == 0
    assert engine.generate([request])[0].logprobs.tobytes() == before.logprobs.tobytes()


def test_abort_returns_what_was_produced_and_frees_every_page(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors, prefix_cache=False)
    for group in range(2):
        engine.add(
            Request((4, 5, 6 + group), SamplingParams(max_tokens=9, ignore_eos=True), n=2, key=group, group=group)
        )
    engine.step()
    engine.step()
    aborted = engine.abort(group=0)
    assert [t.finish_reason for t in aborted] == ["abort", "abort"]
    assert all(len(t.response_ids) == 2 for t in aborted)
    rest = []
    while engine.busy:
        rest += engine.step()
    assert len(rest) == 2
    assert engine.pool.available == engine.pool.n_pages


def test_generate_does_not_swallow_what_is_in_flight(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors)
    engine.add(Request((4, 5), SamplingParams(max_tokens=3)))
    with pytest.raises(ConfigError, match="1 samples are in flight"):
        engine.generate([Request((4, 5))])


def test_aborting_a_leader_before_its_prefill_does_not_lose_another_group(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors)
    engine.add(Request((4, 5), SamplingParams(max_tokens=3, ignore_eos=True), n=3, key=0, group=0))
    engine.add(Request((7, 8), SamplingParams(max_tokens=3, ignore_eos=True), n=3, key=1, group=1))
    assert engine.abort(group=0) == []
    finished = []
    while engine.busy:
        finished += engine.step()
    assert [t.group for _, t in finished] == [1, 1, 1]


def test_non_finite_activation_is_an_error_naming_layer_and_token(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    tensors["model.layers.1.post_attention_layernorm.weight"] = torch.full((64,), 3e38)
    engine = make(family_folders, tensors, precision="bf16")
    with pytest.raises(NumericsError, match=r"model\.layers\.1, token \d+ at position \d+"):
        engine.generate([Request((4, 5), SamplingParams(max_tokens=2))])


def test_bad_requests_are_refused_by_name(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    engine = make(family_folders, tensors)
    with pytest.raises(DataError, match="empty prompt"):
        engine.add(Request(()))
    with pytest.raises(DataError, match="token id 64"):
        engine.add(Request((5, 64)))
    with pytest.raises(DataError, match="at most 256 positions"):
        engine.add(Request((5,), SamplingParams(max_tokens=256)))
    for change in (
        {"temperature": -1.0},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"temperature": float("nan")},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"stop": ("",)},
    ):
        with pytest.raises(ConfigError, match=next(iter(change))):
            SamplingParams(**change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs 16 KV pages"):
        Engine(engine.arch, engine.precision, tensors, options=EngineOptions(kv_memory_mb=0.01)).add(
            Request((5,), SamplingParams(max_tokens=250))
        )
    with pytest.raises(ConfigError, match="multiple of 16"):
        make(family_folders, tensors, page_size=24)


def test_prefix_pages_know_the_phase_of_their_tokens(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    """Where prompt and generated tokens run in different precisions, equal tokens in another role are other pages."""
    precision = precision_from({"preset": "w4a4kv4", "prefill": {"attention": "bf16", "experts": "bf16"}})
    arch = make(family_folders, tensors).arch
    prompt, sampling = tuple(range(2, 40)), SamplingParams(max_tokens=4, ignore_eos=True)
    plain = Request(prompt, sampling, key=1)
    later_turn = Request(prompt, sampling, key=1, generated=tuple(i >= 10 for i in range(38)))
    used = Engine(arch, precision, tensors, options=EngineOptions(kv_memory_mb=2))
    used.generate([later_turn])
    got = used.generate([plain])[0]
    fresh = Engine(arch, precision, tensors, options=EngineOptions(kv_memory_mb=2)).generate([plain])[0]
    assert got.logprobs.tobytes() == fresh.logprobs.tobytes()


def test_engine_is_usable_after_an_error(family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]) -> None:
    good = dict(tensors)
    tensors["model.norm.weight"] = torch.full((64,), 3e38)
    engine = make(family_folders, tensors, precision="bf16")
    request = Request((4, 5), SamplingParams(max_tokens=2), n=3)
    with pytest.raises(NumericsError, match=r"model\.norm|lm_head"):
        engine.generate([request])
    assert not engine.busy
    assert engine.pool.available == engine.pool.n_pages
    engine.load_weights(good, version=1)
    assert len(engine.generate([request])) == 3


def test_trl_4159_temperature_is_applied_on_both_sides(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    """Sampled log-probs at temperature 0.5 are those of logits / 0.5, not of the logits and not log-probs / 0.5."""
    engine = make(family_folders, tensors, precision="fp32")
    t = engine.generate([Request((4, 5, 6), SamplingParams(temperature=0.5, max_tokens=6, ignore_eos=True), key=1)])[0]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(family_folders["qwen3_moe"], dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([t.ids.tolist()])).logits[0, 2:-1]
    expected = torch.log_softmax(logits / 0.5, dim=-1)[range(6), t.response_ids.tolist()]
    np.testing.assert_allclose(t.logprobs, expected.numpy(), atol=2e-4)


def test_trl_6789_filtered_logprobs_are_of_the_kept_set(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    engine = make(family_folders, tensors, precision="fp32")
    sampling = SamplingParams(top_k=5, top_p=0.9, max_tokens=6, ignore_eos=True)
    t = engine.generate([Request((4, 5, 6), sampling, key=1)])[0]
    assert t.supports is not None
    for token, kept in zip(t.response_ids, t.supports):
        assert kept is None or (len(kept) <= 5 and token in kept)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(family_folders["qwen3_moe"], dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([t.ids.tolist()])).logits[0, 2:-1]
    for row, (token, kept, got) in enumerate(zip(t.response_ids, t.supports, t.logprobs)):
        ids = list(range(64)) if kept is None else kept.tolist()
        expected = torch.log_softmax(logits[row, ids], dim=-1)[ids.index(token)]
        assert abs(float(expected) - got) < 2e-4


def test_phase_aware_precision_runs_prompt_and_response_differently(
    family_folders: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    """FP4 prefill with BF16 decode: prompts as in w4a4, and a preempted sample keeps its numbers."""
    kinds = dict.fromkeys(("attention", "mlp", "experts"), "w4a4")
    precision = precision_from({"preset": "bf16", "prefill": kinds})
    arch = make(family_folders, tensors).arch
    request = Request(tuple(range(2, 20)), SamplingParams(max_tokens=20, ignore_eos=True), n=3, key=1)
    mixed = Engine(arch, precision, tensors, options=EngineOptions(kv_memory_mb=2))
    tight = Engine(arch, precision, tensors, options=EngineOptions(kv_memory_mb=0.02))
    a, b = mixed.generate([request]), tight.generate([request])
    assert tight.scheduler.preemptions > 0
    assert all(x.logprobs.tobytes() == y.logprobs.tobytes() for x, y in zip(a, b))
    plain = Engine(arch, precision_from("bf16"), tensors, options=EngineOptions(kv_memory_mb=2)).generate([request])
    assert a[0].logprobs.tobytes() != plain[0].logprobs.tobytes()
    again = mixed.score(a[0].prompt_ids.tolist(), a[0].response_ids.tolist())
    assert again.tobytes() == a[0].logprobs.tobytes()
