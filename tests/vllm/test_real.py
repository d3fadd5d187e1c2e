"""A real vLLM server on CPU: ten steps of reinforcement learning, weights and log-probs against fresh loads, injected faults.

``make test-vllm`` makes the environment and runs these; HALFBYTE_VLLM_PYTHON names the interpreter in it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import small_config

from halfbyte.config import load_config
from halfbyte.errors import RefitError
from halfbyte.models.checkpoint_writer import save_checkpoint
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.refit.adapters.folder import FolderTarget
from halfbyte.refit.head import read_head
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.engine import Updated, VllmEngine
from halfbyte.rollout.vllm.errors import WrongWeightsError
from halfbyte.rollout.vllm.server import VllmServer
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("HALFBYTE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with vLLM: make test-vllm"),
]
FLAGS = ("--max-num-seqs", "256", "--skip-tokenizer-init", "--distributed-executor-backend", "uni")


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with "uni" the worker lives in the engine's process
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'helpers'}",
}


def server(model: Path, log: Path, *extra: str) -> VllmServer:
    return VllmServer(PYTHON, str(model), log, extra=[*FLAGS, *extra], environment=ENVIRONMENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """The shipped mixture of experts as an ordinary BF16 checkpoint."""
    held, _ = open_model("tiny")
    tensors = {name: tensor.bfloat16() for name, tensor in held.tensors.items()}
    save_checkpoint(folder / "model", held.architecture, tensors, tokenizer_from=held.tokenizer_path)
    return folder / "model"


@pytest.fixture(scope="module")
def running(folder: Path, checkpoint: Path) -> Iterator[VllmClient]:
    it = server(checkpoint, folder / "server.log", "--worker-extension-cls", "faulty_vllm.WorkerExtension")
    try:
        yield VllmClient(it.url)
    finally:
        it.close()


class Run:
    """A run of its own on the server: weights that drift, published one version after the other."""

    def __init__(self, client: VllmClient, folder: Path, **options: Any) -> None:
        held, _ = open_model("tiny")
        self.arch, self.store = held.architecture, folder / "store"
        self.weights = {name: tensor.bfloat16() for name, tensor in held.tensors.items()}
        self.draws = torch.Generator().manual_seed(3)
        self.publisher = Publisher(FilesystemStore(self.store), f"run-{folder.name}")
        self.publisher.publish(self.weights, version=1)
        self.engine = VllmEngine(client, self.arch, **options)
        self.first = self.engine.connect(str(self.store), self.stamp)

    @property
    def stamp(self) -> Any:
        return self.publisher.head.stamp

    def publish(self, scale: float = 0.02) -> None:
        for name, tensor in self.weights.items():
            noise = torch.randn(tensor.shape, generator=self.draws) * scale
            self.weights[name] = (tensor.float() + noise).bfloat16()
        self.publisher.publish(self.weights)

    def requests(self, n: int = 8, **sampling: Any) -> list[Request]:
        rows = np.random.default_rng(0).integers(4, self.arch.vocab_size, size=(n, 9))
        return [
            Request(tuple(row.tolist()), SamplingParams(**sampling), n=2, key=i, group=i) for i, row in enumerate(rows)
        ]


@pytest.fixture
def served(running: VllmClient, tmp_path: Path) -> Iterator[Run]:
    it = Run(running, tmp_path)
    yield it
    running.rpc("fault_after_update", "none")


def native(it: Run, precision: str = "bf16") -> Engine:
    return Engine(it.arch, PRESETS[precision], it.weights, options=EngineOptions(kv_memory_mb=8.0))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_the_distribution_sampled(served: Run, temperature: float) -> None:
    trajectories = served.engine.generate(served.requests(temperature=temperature, max_tokens=12))
    assert [(t.group, t.sample) for t in trajectories] == [(i // 2, i % 2) for i in range(16)]
    assert all((t.versions == 1).all() for t in trajectories)
    ours = native(served)
    gaps = [t.logprobs - ours.score(t.prompt_ids.tolist(), t.response_ids.tolist(), t.sampling) for t in trajectories]
    gap = np.abs(np.concatenate(gaps))
    wrong = [t.logprobs - ours.score(t.prompt_ids.tolist(), t.response_ids.tolist()) for t in trajectories]
    print(f"temperature {temperature}: mean |d| against the native BF16 engine {gap.mean():.4f}, max {gap.max():.3f}")
    assert gap.mean() < 0.01, "measured elsewhere between two BF16 engines: .0024"
    if temperature != 1:
        assert np.abs(np.concatenate(wrong)).mean() > 10 * gap.mean(), "the comparison would see the other temperature"


def test_the_same_request_alone_gives_the_same_tokens(served: Run) -> None:
    request = served.requests(1, max_tokens=12)
    first, again = served.engine.generate(request), served.engine.generate(request)
    for a, b in zip(first, again, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert first[0].response_ids.tolist() != first[1].response_ids.tolist(), "samples of a group differ"


@pytest.mark.parametrize("way", ["folder", "http"])
def test_updates_are_bit_equal_to_a_fresh_load(served: Run, way: str, over_http: str) -> None:
    if way == "http":
        served.engine.connect(f"{over_http}/store", served.stamp)
    for version in (2, 3):
        served.publish()
        done = served.engine.update(served.stamp)
        assert served.engine.version == version
        assert done.verification is not None
        assert done.verification.tokens == 32
        assert {v for t in served.engine.generate(served.requests(2)) for v in t.versions.tolist()} == {version}


def test_without_packing_experts_again_the_check_fails_and_with_it_the_server_recovers(
    served: Run, running: VllmClient, tmp_path: Path
) -> None:
    running.rpc("fault_after_update", "no_repack")
    served.publish()
    with pytest.raises(WrongWeightsError, match=r"4 weights differ: .*experts") as caught:
        served.engine.update(served.stamp)
    print(f"vLLM's reload alone: {caught.value.what}")
    with pytest.raises(WrongWeightsError, match="serves no more"):
        served.engine.generate(served.requests(1))
    running.rpc("fault_after_update", "none")
    (tmp_path / "again").mkdir()
    again = Run(running, tmp_path / "again")
    assert again.first.verification is not None, "another load, packed again, is right"


@pytest.mark.parametrize(
    ("kind", "told"),
    [("bit", "w13_weight"), ("linear", "qkv_proj"), ("epsilon", "log-probs differ by up to")],
)
def test_a_wrong_update_is_caught(served: Run, running: VllmClient, kind: str, told: str) -> None:
    running.rpc("fault_after_update", kind)
    served.publish()
    with pytest.raises(WrongWeightsError, match=told) as caught:
        served.engine.update(served.stamp)
    print(f"{kind}: {caught.value.what}")
    assert not served.engine.healthy
    if kind == "epsilon":  # the next load does not mend what is no weight
        running.rpc("fault_after_update", "none")
        running.rpc("fault_mend_epsilon")


def test_a_load_that_breaks_off_is_taken_back(served: Run, running: VllmClient) -> None:
    before = served.engine.probes.ask(running)
    running.rpc("fault_after_update", "fail")
    served.publish()
    with pytest.raises(RefitError, match="serves the version it had"):
        served.engine.update(served.stamp)
    assert served.engine.healthy
    assert served.engine.version == 1
    assert served.engine.probes.ask(running) == before, "to the bit what it served"
    served.engine.update(served.stamp)
    assert served.engine.version == 2


def test_a_server_left_in_mid_update_is_taken_over(served: Run, running: VllmClient) -> None:
    running.pause("abort")
    running.start_update()
    served.publish()
    running.update({"version": served.stamp.version, "state": served.stamp.state})
    other = VllmEngine(running, served.arch)
    assert other.connect(str(served.store), served.stamp).verification is not None


def test_another_version_than_the_store_holds_is_refused(served: Run) -> None:
    old = served.stamp
    served.publish()
    newer = served.stamp
    served.publish()
    with pytest.raises(RefitError, match="serves the version it had"):
        served.engine.update(newer)
    assert served.engine.version == old.version
    served.engine.update(served.stamp)


def test_new_weights_reach_samples_in_flight(served: Run) -> None:
    requests = served.requests(4, max_tokens=200, ignore_eos=True)
    out: list[Trajectory] = []
    thread = threading.Thread(target=lambda: out.extend(served.engine.generate(requests)))
    thread.start()
    with served.engine._gate:
        assert served.engine._gate.wait_for(lambda: served.engine.requests_in_flight > 0, 60)
    served.publish()
    served.engine.update(served.stamp)
    thread.join(120)
    assert [len(t.response_ids) for t in out] == [200] * 8
    seen = {v for t in out for v in t.versions.tolist()}
    first = [int((t.versions == 1).sum()) for t in out]
    print(f"in flight: of 200 tokens each, {min(first)} to {max(first)} by the weights before")
    assert seen in ({1, 2}, {2}), "how far they had come is the machine's business"
    for t in out:
        assert (np.diff(t.versions) >= 0).all()
        assert t.finish_reason == "length"


def test_ten_steps_of_reinforcement_learning(
    running: VllmClient, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[tuple[Updated, Any]] = []
    update = VllmEngine.update

    def watched(engine: VllmEngine, stamp: Any) -> Updated:
        done = update(engine, stamp)
        updates.append((done, engine.probes.ask(running)))
        return done

    monkeypatch.setattr(VllmEngine, "update", watched)
    config = load_config(
        flags={
            "model.path": "tiny",
            "precision": "bf16",
            "alignment.method": "none",
            "env.name": "arithmetic:sort",
            "train.out": str(tmp_path / "run"),
            "train.steps": 10,
            "train.threads": 1,
            "rollout.backend": "vllm",
            "rollout.url": running.url,
            "rollout.prompts_per_step": 32,
            "rollout.samples_per_prompt": 8,
            "eval.prompts": 128,
            "learner.lr": 3e-4,
        }
    )
    assert run(config) == 0
    rows = [r for r in RunFolder(tmp_path / "run").rows() if r["kind"] == "train"]
    assert len(rows) == 10
    assert len(updates) == 1 + int(rows[-1]["version"])
    for row, (done, _) in zip(rows, updates[1:]):
        assert done.verification is not None
        print(
            f"step {row['step']}: version {done.stamp.version}, {done.verification.tokens} log-probs and all weights "
            f"bit-equal to a fresh load; {row['refit/bytes']:.0f} of {row['refit/full_bytes']:.0f} bytes, pause "
            f"{done.pause_seconds:.2f} s, verified in {done.verification.seconds:.1f} s; gap k3 {row['gap/k3_kl']:.1e}"
        )
        assert row["gap/k3_kl"] < 1e-3, "learner and server run the same weights"
    # another process, loaded from a folder that another reader of the store wrote
    target = FolderTarget(folder / "other")
    store = FilesystemStore(tmp_path / "run" / "refit")
    Subscriber(store, target).refit()
    found = read_head(store)
    assert found is not None
    assert found[0].version == updates[-1][0].stamp.version
    other = server(_model(target.current, tmp_path), folder / "other.log")
    try:
        client = VllmClient(other.url)
        engine = VllmEngine(client, open_model("tiny")[0].architecture)
        answers = engine.probes.ask(client)
        checksums = [c._mapping("POST", "/weight_checker", {"action": "checksum"}) for c in (running, client)]
    finally:
        other.close()
    assert answers == updates[-1][1], "log-probs of another process that loaded this version from files"
    assert checksums[0] == checksums[1]
    print(
        f"another process from files: {len(answers.ids)} log-probs bit-equal, {len(checksums[0]['checksums'])} digests equal"
    )


def test_a_run_starts_a_server_of_its_own_with_experts_that_are_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Width 48 is no multiple of 32: vLLM pads it on the first load and cannot load it a second time by itself."""
    held, _ = open_model("tiny")
    arch = replace(held.architecture, moe_intermediate_size=48)
    cut = {n: t[:, :48] if "down_proj" in n else t[:48] if ".experts." in n else t for n, t in held.tensors.items()}
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in cut.items()}
    save_checkpoint(tmp_path / "model", arch, tensors, tokenizer_from=held.tokenizer_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    seen: list[Updated] = []
    update = VllmEngine.update
    monkeypatch.setattr(VllmEngine, "update", lambda engine, stamp: seen.append(update(engine, stamp)) or seen[-1])
    config = small_config(
        tmp_path / "model",
        tmp_path / "run",
        "count_ones:ones",
        precision="bf16",
        alignment__method="none",
        env__name="arithmetic:sort",
        rollout__backend="vllm",
        rollout__python=PYTHON,
        rollout__server_arguments=FLAGS,
        rollout__max_tokens=16,
        rollout__prompts_per_step=32,
        rollout__samples_per_prompt=8,
        learner__lr=1e-3,
        train__steps=3,
        train__threads=1,
    )
    assert run(config) == 0
    assert [done.verification is not None for done in seen] == [True] * len(seen)
    assert len(seen) > 1, "some step had a signal"
    assert "Application startup complete" in (tmp_path / "run" / "vllm.log").read_text()


def _model(weights: Path, tmp_path: Path) -> Path:
    """The weights as a model folder."""
    held, _ = open_model("tiny")
    from halfbyte.models.safetensors_io import SafetensorsFile

    tensors = {n: t for file in sorted(weights.glob("*.safetensors")) for n, t in SafetensorsFile(file).items()}
    save_checkpoint(tmp_path / "model", held.architecture, tensors, tokenizer_from=held.tokenizer_path)
    shutil.rmtree(weights.parent, ignore_errors=True)
    return tmp_path / "model"
