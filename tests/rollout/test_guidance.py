"""Guidance is what the rollout really rounded to: the last written code, whatever the engine did around the sample."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError
from halfbyte.formats import Payload
from halfbyte.guidance.batch import Alignment, BatchGuidance, gather
from halfbyte.guidance.cache import PassRecord, Shelf
from halfbyte.guidance.plan import Plan, make_plan
from halfbyte.kernels import active
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import Precision, precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request

SHARED = tuple(range(2, 40))
PHASED = {"preset": "w4a4kv4", "prefill": {"attention": "bf16", "mlp": "bf16", "experts": "bf16"}}


@lru_cache
def checkpoint(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


def engine(folder: Path, precision: Precision | str = "w4a4kv4", plan: Plan | None = None, **options: object) -> Engine:
    held, precision = checkpoint(folder), precision_from(precision)
    plan = make_plan(held.architecture, precision) if plan is None else plan
    settled = EngineOptions(**{"kv_memory_mb": 2.0, **options})  # type: ignore[arg-type]
    return Engine(held.architecture, precision, held.tensors, options=settled, guidance=plan)


def requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    out = []
    for key in range(4):
        head = SHARED[: int(rng.integers(1, len(SHARED)))] if rng.random() < 0.6 else ()
        tail = tuple(int(x) for x in rng.integers(2, 64, int(rng.integers(1, 12))))
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 12)), seed=seed)
        out.append(Request(head + tail, sampling, n=int(rng.integers(1, 4)), key=key + 100 * seed, group=key))
    return out


def rows_by_sample(trajectories: list[Trajectory]) -> dict[tuple[int, int], bytes]:
    for t in trajectories:
        assert t.guidance is not None
        assert len(t.guidance) == len(t.guidance.kv) == len(t) - 1
    return {(t.group, t.sample): t.guidance.rows.tobytes() + t.guidance.kv.tobytes() for t in trajectories}  # type: ignore[union-attr]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([16, 32]),
    max_batch_tokens=st.sampled_from([3, 17, 4096]),
    prefix_cache=st.booleans(),
    share_prompts=st.booleans(),
    few_pages=st.booleans(),
    phased=st.booleans(),
)
def test_rows_are_the_same_in_any_company(
    seed: int,
    page_size: int,
    max_batch_tokens: int,
    prefix_cache: bool,
    share_prompts: bool,
    few_pages: bool,
    phased: bool,
    family_folders: dict[str, Path],
) -> None:
    """Preemption, copy-on-write, prefix pages, chunked prefill: a sample's rows are those it has alone."""
    folder, precision = family_folders["qwen3_moe"], precision_from(PHASED if phased else "w4a4kv4")
    wanted = requests(seed)
    alone: dict[tuple[int, int], bytes] = {}
    for request in wanted:
        for i in range(request.n):
            alone |= rows_by_sample(engine(folder, precision).generate([replace(request, n=1, first_sample=i)]))
    shape = {"page_size": page_size, "max_batch_tokens": max_batch_tokens}
    flags = {"prefix_cache": prefix_cache, "share_prompts": share_prompts}
    busy = engine(folder, precision, **shape, **flags)
    if few_pages:
        per_page = busy.pool.page_bytes(busy.arch, precision, page_size)
        busy = engine(
            folder, precision, **shape, **flags, kv_memory_mb=(2 * -(-64 // page_size) + 0.5) * per_page / 2**20
        )
    assert rows_by_sample(busy.generate(wanted)) == alone
    assert rows_by_sample(busy.generate(wanted)) == alone  # now from prefix pages, where they are kept


class Spy:
    """Notes every quantised activation that a pass uses, by site and token, independently of the record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[int, str], list[torch.Tensor]] = {}
        real = PassRecord.write

        def write(
            record: PassRecord, layer: int, site: str, payload: Payload, tokens: torch.Tensor | None = None
        ) -> None:
            values = payload.quantised().dequantise()
            self.seen.setdefault((layer, site), []).append(values.reshape(values.shape[0], -1))
            real(record, layer, site, payload, tokens)

        monkeypatch.setattr(PassRecord, "write", write)


def guidance_of(t: Trajectory, plan: Plan | None = None) -> BatchGuidance:
    routes = None if t.routes is None else torch.from_numpy(np.pad(t.routes, ((0, 1), (0, 0), (0, 0)))).long()
    found = gather([t.guidance], [len(t)], [len(t)], routes, (0, 1), Alignment(plan=plan), 0, active())
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_payloads_are_the_codes_that_the_products_used(
    family: str, family_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    runner = engine(family_folders[family])
    (t,) = runner.generate([Request(SHARED[:20], SamplingParams(max_tokens=8, ignore_eos=True))])
    guidance = guidance_of(t)
    sites = {site for _, site in guidance.bits}
    expected = {"qkv_in", "o_in", "k", "v"} | (
        {"expert_in", "expert_mid"} if family == "qwen3_moe" else {"mlp_in", "mlp_mid"}
    )
    assert sites == expected
    for (layer, site), parts in spy.seen.items():
        guide = guidance.at(layer, site)
        assert guide is not None
        values = guide.payload.quantised().dequantise().reshape(len(t), -1)
        assert torch.equal(values[:-1], torch.cat(parts)), (layer, site)
        assert bool(guide.guided[:-1].all())
        assert not bool(guide.guided[-1].any())


def test_keys_and_values_are_read_from_the_pages(family_folders: dict[str, Path]) -> None:
    """A sample that is still running: its pages hold the codes, and no second copy of them exists."""
    runner = engine(family_folders["qwen3_moe"])
    runner.add(Request(SHARED, SamplingParams(max_tokens=9, ignore_eos=True)))
    for _ in range(5):
        runner.step()
    assert runner.pool.guidance is not None
    fields = runner.pool.guidance.layout.fields
    assert runner.pool.guidance.rows.shape[1] == sum(f.stop - f.start for f in fields if f.place.site not in ("k", "v"))
    (sample,) = runner._samples.values()
    size = runner.pool.page_size
    slots = torch.tensor([sample.pages[p // size] * size + p % size for p in range(sample.computed)])
    kept = [layer.quantised(slots) for layer in runner.pool.layers]
    (t,) = runner.abort()
    guidance = guidance_of(t)
    for layer, pair in enumerate(kept):
        for site, q in zip("kv", pair):
            guide = guidance.at(layer, site)
            assert guide is not None
            n = len(slots)
            assert torch.equal(guide.payload.codes[:n], q.codes)
            assert torch.equal(guide.payload.scales[:n], q.scales)


def test_bytes_a_token_are_the_formula_and_the_global_scales(family_folders: dict[str, Path]) -> None:
    held = checkpoint(family_folders["qwen3_moe"])
    arch, precision = held.architecture, precision_from("w4a4kv4")
    for bits in (1, 2, 4):
        plan = make_plan(arch, precision, bits=bits)
        (t,) = engine(family_folders["qwen3_moe"], plan=plan).generate([Request((3, 4), SamplingParams(max_tokens=1))])
        h, k, mid, kv = (
            arch.hidden_size,
            arch.experts_per_token,
            arch.moe_intermediate_size,
            arch.n_kv_heads * arch.head_dim,
        )
        numbers = arch.n_layers * (h + h + arch.n_heads * arch.head_dim + k * mid + 2 * kv)
        assert plan.formula_bytes(arch, precision) == numbers * (bits + 0.5) / 8
        assert t.guidance is not None
        rows = arch.n_layers * (3 + k)  # one byte of global scale a row of qkv_in, o_in, expert_in and expert_mid
        assert t.guidance.bytes_per_token == numbers * (bits + 0.5) / 8 + rows


def test_fewer_bits_are_recorded_as_four_would_be_narrowed(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    arch, precision = checkpoint(folder).architecture, precision_from("w4a4kv4")
    request = Request(SHARED, SamplingParams(max_tokens=5))
    (whole,) = engine(folder).generate([request])
    for bits in (1, 2):
        plan = make_plan(arch, precision, bits=bits)
        (t,) = engine(folder, plan=plan).generate([request])
        narrowed, recorded = guidance_of(whole, plan), guidance_of(t)
        for place in recorded.bits:
            a, b = narrowed.at(*place), recorded.at(*place)
            assert a is not None
            assert b is not None
            assert torch.equal(a.payload.codes[:-1], b.payload.codes[:-1]), place
            assert torch.equal(a.payload.scales[:-1], b.payload.scales[:-1]), place


def test_prompt_tokens_of_another_phase_have_no_guidance_for_its_linears(family_folders: dict[str, Path]) -> None:
    runner = engine(family_folders["qwen3_moe"], precision_from(PHASED))
    runner.generate(
        [Request(tuple(range(40, 60)), SamplingParams(max_tokens=12, ignore_eos=True))]
    )  # dirties the slots
    (t,) = runner.generate([Request((3, 4, 5), SamplingParams(max_tokens=6, ignore_eos=True))])
    guidance = guidance_of(t)
    for layer, site in guidance.bits:
        guide = guidance.at(layer, site)
        assert guide is not None
        rows = guide.guided.reshape(len(t), -1).all(dim=1).tolist()
        assert rows == ([True] * (len(t) - 1) if site in ("k", "v") else [False] * 3 + [True] * 5) + [False], site


def test_weights_that_change_in_mid_flight_leave_the_codes_of_the_new_ones(family_folders: dict[str, Path]) -> None:
    """The last written code wins: after an update every token is recomputed, and so is its guidance."""
    folder = family_folders["qwen3_moe"]
    held = checkpoint(folder)
    changed = {k: v * 1.25 if v.dim() > 1 else v for k, v in held.tensors.items()}
    runner = engine(folder)
    runner.add(Request(SHARED, SamplingParams(max_tokens=8, ignore_eos=True)))
    for _ in range(4):
        runner.step()
    runner.load_weights(changed, 1)
    out: list[Trajectory] = []
    while runner.busy:
        out += [t for _, t in runner.step()]
    (t,) = out
    assert t.guidance is not None
    assert t.guidance.version == 1
    fresh = Engine(
        held.architecture, runner.precision, changed, guidance=make_plan(held.architecture, runner.precision)
    )
    replay = Request(tuple(t.ids[:-1].tolist()), SamplingParams(max_tokens=1))
    (again,) = fresh.generate([replay])
    assert again.guidance is not None
    assert rows_by_sample([t]) == rows_by_sample([again])


def test_aborted_samples_bring_what_they_have(family_folders: dict[str, Path]) -> None:
    runner = engine(family_folders["qwen3_moe"])
    runner.add(Request(SHARED[:9], SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(3):
        runner.step()
    (t,) = runner.abort()
    assert t.finish_reason == "abort"
    assert t.guidance is not None
    assert len(t.guidance) == len(t) - 1


def test_a_shelf_beyond_its_budget_reads_the_same_bytes_from_a_file(
    family_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = family_folders["qwen3_moe"]
    held = checkpoint(folder)
    plan = make_plan(held.architecture, precision_from("w4a4kv4"))
    shelf = Shelf(0.0, tmp_path)
    spilling = Engine(
        held.architecture, precision_from("w4a4kv4"), held.tensors, guidance=plan, shelf=shelf,
        options=EngineOptions(kv_memory_mb=2),
    )  # fmt: skip
    wanted = requests(3)
    spilled = spilling.generate(wanted)
    assert rows_by_sample(spilled) == rows_by_sample(engine(folder).generate(wanted))
    assert shelf.spilled > 0
    assert shelf.held == 0
    assert list(tmp_path.iterdir()) == []  # unnamed: nothing is left behind, however the process ends
    assert all(isinstance(x, np.memmap) for t in spilled for x in (t.guidance.rows, t.guidance.kv))  # type: ignore[union-attr]


def test_a_shelf_gives_its_budget_back_when_the_trajectories_are_gone() -> None:
    shelf = Shelf(1.0)
    first = shelf.keep(np.zeros((1024, 1000), np.uint8))
    part = first[3:7]
    assert shelf.held == 1024 * 1000
    assert isinstance(shelf.keep(np.zeros((1024, 100), np.uint8)), np.memmap)
    del first
    assert shelf.held == 1024 * 1000  # a trajectory still reads from it
    del part
    assert shelf.held == 0


def test_evaluation_records_nothing_and_leaves_no_unrecorded_prefix(family_folders: dict[str, Path]) -> None:
    runner = engine(family_folders["qwen3_moe"])
    request = Request(SHARED, SamplingParams(max_tokens=4))
    with runner.unrecorded():
        (t,) = runner.generate([request])
        assert t.guidance is None
    (again,) = runner.generate([request])
    assert rows_by_sample([again]) == rows_by_sample(engine(family_folders["qwen3_moe"]).generate([request]))


def test_guidance_changes_no_token_and_no_log_prob(family_folders: dict[str, Path]) -> None:
    folder, wanted = family_folders["qwen3_moe"], requests(5)
    for precision in ("w4a4kv4", "experts-w4a4kv4"):
        for a, b in zip(engine(folder, precision).generate(wanted), engine(folder, precision, Plan()).generate(wanted)):
            assert np.array_equal(a.response_ids, b.response_ids)
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
            assert b.guidance is None


def test_a_busy_engine_does_not_change_what_it_records(family_folders: dict[str, Path]) -> None:
    runner = engine(family_folders["qwen3_moe"])
    runner.add(Request(SHARED, SamplingParams(max_tokens=4)))
    with pytest.raises(ConfigError, match="in flight"):
        runner.guide(Plan())


def test_rows_cross_files_and_processes_without_pickle(family_folders: dict[str, Path], tmp_path: Path) -> None:
    (t,) = engine(family_folders["qwen3_moe"]).generate([Request(SHARED, SamplingParams(max_tokens=4))])
    assert t.guidance is not None
    g = t.guidance
    np.savez(tmp_path / "t.npz", rows=g.rows, kv=g.kv, layout=np.array(g.layout), version=g.version)
    with np.load(tmp_path / "t.npz", allow_pickle=False) as data:
        version = int(data["version"])
        back = replace(g, rows=data["rows"], kv=data["kv"], layout=str(data["layout"]), version=version)
    a, b = guidance_of(t), guidance_of(replace(t, guidance=back))
    for place in a.bits:
        mine, theirs = a.at(*place), b.at(*place)
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine.payload.codes[:-1], theirs.payload.codes[:-1])
