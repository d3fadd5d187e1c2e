"""The preflight: each missing thing is named, with exit code 4."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trial_case import make_tasks, trial, two_servers, write_trial

from halfbyte.errors import CheckpointError
from halfbyte.models.open_model import model_folder
from halfbyte.trial.artefact import inspect_artefact, licence_of
from halfbyte.trial.check import static_findings
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.hardware import Machine, this_machine, weights_run
from halfbyte.trial.integrity import Finding
from halfbyte.trial.memory_probe import MemoryProbe, process_tree, resident_bytes
from halfbyte.trial.metrics import engine_figures
from halfbyte.trial.overlap import find_overlap, tuning_texts, words
from halfbyte.trial.tasks import Task

CPU = Machine(frozenset({"avx2"}), 8 << 30, None, None)


def gpu(capability: float) -> Machine:
    return Machine(frozenset(), 8 << 30, capability, 80 << 30)


def served(model: Path, **more: Any) -> dict[str, Any]:
    command = ["halfbyte", "serve", str(model), "--port", "{port}", "--precision", "bf16"]
    return {"serve": command, "artefact": str(model), "kv_memory_mb": 16.0, **more}


def found(folder: Path, machine: Machine = CPU) -> dict[str, Finding]:
    return {finding.name: finding for finding in static_findings(TrialFolder.open(folder), machine)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model folder with a licence, to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tiny"), folder)
    (folder / "LICENSE.txt").write_text("Apache License\n")
    return folder


def test_what_is_there_passes(tmp_path: Path, model: Path) -> None:
    write_trial(tmp_path / "t", served(model), served(model, licence=str(model / "LICENSE.txt")), make_tasks(4))
    findings = found(tmp_path / "t")
    assert [name for name, finding in findings.items() if finding.ok is False] == []
    assert "qwen3_moe of halfbyte" in findings["baseline: architecture"].detail


def damage(model: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text())
    if kind == "no folder":
        model.rename(model.with_name("moved"))
    elif kind == "no config":
        (model / "config.json").unlink()
    elif kind == "cut short":
        os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    elif kind == "no weights":
        (model / "model.safetensors").unlink()
    elif kind == "a shard is missing":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "no licence":
        (model / "LICENSE.txt").unlink()
    elif kind == "empty licence":
        (model / "LICENSE.txt").write_text(" \n")
    elif kind == "unknown architecture":
        config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        (model / "config.json").write_text(json.dumps(config))
    elif kind == "foreign format":
        config |= {"quantization_config": {"quant_method": "awq", "bits": 4}}
        (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("no folder", "candidate: artefact"),
        ("no config", "candidate: artefact"),
        ("cut short", "candidate: artefact"),
        ("no weights", "candidate: artefact"),
        ("a shard is missing", "candidate: artefact"),
        ("no licence", "candidate: licence"),
        ("empty licence", "candidate: licence"),
        ("unknown architecture", "candidate: architecture"),
        ("foreign format", "candidate: format"),
    ],
)
def test_each_missing_thing_is_named(
    tmp_path: Path,
    model: Path,
    family_folders: dict[str, Path],
    kind: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    licence = str(tmp_path / "LICENSE")
    Path(licence).write_text("x")
    write_trial(tmp_path / "t", served(model_folder("tiny"), licence=licence), served(model), make_tasks(4))
    damage(model, kind)
    findings = found(tmp_path / "t")
    assert findings[name].ok is False
    assert [n for n, finding in findings.items() if finding.ok is False and not n.startswith("candidate")] == []
    assert trial("check", tmp_path / "t") == 4
    assert name in capsys.readouterr().out
    assert trial("lock", tmp_path / "t") == 4


def test_a_started_server_needs_its_artefact_named(tmp_path: Path, model: Path) -> None:
    target = served(model)
    write_trial(tmp_path / "t", target, {"serve": target["serve"]}, make_tasks(4))
    assert found(tmp_path / "t")["candidate: artefact"].ok is False


def test_precision_in_words_and_on_the_command_line_agree(tmp_path: Path, model: Path) -> None:
    write_trial(tmp_path / "t", served(model, precision="bf16"), served(model, precision="w4a4kv4"), make_tasks(4))
    findings = found(tmp_path / "t")
    assert findings["candidate: precision"].ok is False
    assert "baseline: precision" not in findings


def test_not_enough_memory_and_only_one_fits(tmp_path: Path, model: Path) -> None:
    write_trial(tmp_path / "t", served(model), served(model), make_tasks(4))
    need = inspect_artefact(model).weights_bytes + (16 << 20) + (512 << 20)
    for memory, exclusive, ok in (
        (need - 1, True, False),
        (need, True, True),
        (2 * need - 1, False, False),
        (2 * need, False, True),
    ):
        write_trial(tmp_path / "t", served(model), served(model), make_tasks(4), run={"exclusive": exclusive})
        finding = found(tmp_path / "t", Machine(frozenset(), memory, None, None))["fit in memory"]
        assert finding.ok is ok
        assert ("run.exclusive" in finding.fix) == (memory == 2 * need - 1)


def test_vllm_10207_memory_is_claimed_only_with_pinned_pools_and_open_servers(tmp_path: Path, model: Path) -> None:
    """A pre-allocated KV pool makes every precision look alike: pools are pinned, and weights, KV and peak kept apart."""
    memory = {"benefit": "peak_memory", "benefit_min": 0.3}
    write_trial(tmp_path / "t", served(model), served(model), make_tasks(4), limits=memory)
    assert found(tmp_path / "t")["memory claim"].ok is True
    assert "KV pools" not in found(tmp_path / "t")
    free = {key: value for key, value in served(model).items() if key != "kv_memory_mb"}
    write_trial(tmp_path / "t", served(model), free, make_tasks(4), limits=memory)
    assert found(tmp_path / "t")["KV pools"].ok is False
    write_trial(tmp_path / "t", served(model), {"url": "http://127.0.0.1:9/v1"}, make_tasks(4), limits=memory)
    assert found(tmp_path / "t")["memory claim"].ok is False


def test_vllm_10207_unequal_pools_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fake_server
    from fake_server import Script, write_script

    (tmp_path / "LICENSE").write_text("x")

    def target(name: str, tokens: int) -> dict[str, Any]:
        script = Script(name=name, weights_bytes=1 << 20, kv_bytes=1 << 20, kv_tokens=tokens)
        write_script(tmp_path / f"{name}.json", script)
        command = [sys.executable, fake_server.__file__, "--port", "{port}", f"{name}.json"]
        return {"serve": command, "artefact": "tiny", "licence": "LICENSE", "kv_memory_mb": 1.0}

    limits = {"benefit": "peak_memory", "benefit_min": 0.3}
    write_trial(tmp_path, target("a", 4096), target("b", 16384), make_tasks(4), limits=limits)
    assert trial("check", tmp_path) == 4
    said = capsys.readouterr().out
    assert "4,096 and 16,384 tokens" in said
    assert "candidate.kv_memory_mb = 0.25" in said


@pytest.mark.parametrize(
    ("format", "engine", "machine", "ok"),
    [
        ("nvfp4", "halfbyte", CPU, True),
        ("fp8", "halfbyte", CPU, False),
        ("nvfp4", "vllm", CPU, False),
        ("bf16", "vllm", CPU, True),
        ("nvfp4", "vllm", gpu(10.0), True),
        ("nvfp4", "vllm", gpu(9.0), True),  # decompressed on the fly
        ("nvfp4", "vllm", gpu(7.5), False),
        ("fp8", "sglang", gpu(8.9), True),
        ("something", "vllm", gpu(9.0), None),
    ],
)
def test_formats_against_hardware(format: str, engine: str, machine: Machine, ok: bool | None) -> None:
    assert weights_run(format, engine, machine)[0] is ok


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt", "halfbyte"])
def test_formats_of_our_own_checkpoints_are_recognised(
    tmp_path: Path, family_folders: dict[str, Path], style: Any
) -> None:
    from halfbyte.quantize.export import quantize_model

    out = tmp_path / "fp4"
    quantize_model("tiny", out, style=style, kind="w4a16", spec_name="halfbyte")
    artefact = inspect_artefact(out)
    assert artefact.format == "nvfp4"
    assert artefact.weights_bytes < inspect_artefact(model_folder("tiny")).weights_bytes


def test_optimum_intel_1547_calibrated_on_the_evaluation_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = make_tasks(12)
    with two_servers(12) as (first, second):
        (tmp_path / "calibration.jsonl").write_text(
            json.dumps({"messages": [{"role": "user", "content": tasks[3]["prompt"]}]})
        )
        data = {"tuning": ["calibration.jsonl"]}
        write_trial(tmp_path, {"url": first.url}, {"url": second.url}, tasks, data=data)
        assert trial("check", tmp_path) == 4
        assert "t003 (exact, calibration.jsonl, line 1" in capsys.readouterr().out
        assert trial("lock", tmp_path) == 4
        (tmp_path / "calibration.jsonl").write_text('{"text": "nothing of the kind"}\n')
        assert trial("check", tmp_path) == 0
        data = {"tuning": ["gone.jsonl"]}
        write_trial(tmp_path, {"url": first.url}, {"url": second.url}, tasks, data=data)
        assert trial("check", tmp_path) == 4


def test_optimum_intel_1547_a_calibration_text_that_nobody_names(tmp_path: Path, model: Path) -> None:
    """`halfbyte quantize` writes down the digest of its calibration text: data.tuning must name that file."""
    text = tmp_path / "calibration.jsonl"
    text.write_text('{"prompt": "a text"}\n')
    import hashlib

    spec = {"calibration_sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
    (model / "fp4_spec.json").write_text(json.dumps(spec))
    artefact = inspect_artefact(model)
    assert artefact.calibration_sha256 == spec["calibration_sha256"]
    engine = {"serve": ["engine", "{port}"], "artefact": str(model)}
    write_trial(tmp_path / "t", engine, engine, make_tasks(4))
    finding = found(tmp_path / "t")["overlap with tuning data"]
    assert finding.ok is False
    assert "calibrated on a text" in finding.detail
    write_trial(tmp_path / "t", engine, engine, make_tasks(4), data={"tuning": [str(text)]})
    assert found(tmp_path / "t")["overlap with tuning data"].ok is True


def one_task(text: str) -> Task:
    return Task.model_validate({"id": "t", "prompt": text, "scorer": {"type": "regex", "pattern": "."}})


WORDS = [f"w{i}" for i in range(40)]


@given(start=st.integers(0, 25), length=st.integers(1, 30), noise=st.integers(0, 10**6))
def test_thirteen_words_in_a_row_are_seen_and_twelve_are_not(start: int, length: int, noise: int) -> None:
    task = one_task(" ".join(WORDS))
    run = WORDS[start : start + length]
    text = f"x{noise} " + ", ".join(word.upper() for word in run) + f"! y{noise}"
    overlaps = find_overlap([task], [("here", text)])
    assert bool(overlaps) == (len(run) >= 13)
    assert all(o.kind == "n-gram" for o in overlaps)


def test_short_tasks_by_exact_text_and_all_their_words() -> None:
    short = one_task("What is 2 + 3?")
    assert [o.kind for o in find_overlap([short], [("x", "what is 2 + 3")])] == ["exact"]
    assert find_overlap([short], [("x", "tell me: what is 2 + 3, please")]) == []
    longer = one_task("How many days has the month of March?")
    assert [o.kind for o in find_overlap([longer], [("x", "Q: how many days has the month of march A: 31")])] == [
        "n-gram"
    ]
    assert words("Ａ\u00a0Bé—c") == ("a", "bé", "c")


def test_every_text_of_a_tuning_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"m": [{"content": "one"}, {"content": "two"}]}\n\n{"deep": {"er": ["three"]}}\n'
    )
    (tmp_path / "b.txt").write_text("four\nfive\n")
    (tmp_path / "c.json").write_text('{\n "six": ["seven"]\n}')
    texts = list(tuning_texts([tmp_path / name for name in ("a.jsonl", "b.txt", "c.json")]))
    assert {text for _, text in texts} == {"one", "two", "three", "four", "five", "four\nfive\n", "seven"}


def test_licences_are_found_under_their_usual_names(tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None
    for name in ("LICENCE", "LICENSE.md", "license.txt", "COPYING"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("x")
        assert licence_of(folder) == folder / name


def test_no_model_folder_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        inspect_artefact(tmp_path / "none")


def test_metrics_of_both_engines() -> None:
    ours = (
        "# HELP halfbyte_weights_bytes x\n# TYPE halfbyte_weights_bytes gauge\nhalfbyte_weights_bytes 1.5e+06\n"
        "halfbyte_kv_bytes 1024.0\nhalfbyte_kv_capacity_tokens 64.0\nhalfbyte_prompt_tokens_total 100.0\n"
        'halfbyte_cached_prompt_tokens_total 25.0\nhalfbyte_requests_total{endpoint="chat",outcome="a } b"} 3.0\n'
    )
    figures = engine_figures(ours)
    assert (figures.weights_bytes, figures.kv_bytes, figures.kv_capacity_tokens) == (1_500_000, 1024, 64)
    assert (figures.cache_queries, figures.cache_hits) == (100, 25)
    vllm = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 10.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 5.0\nvllm:prefix_cache_hits_total{engine="0"} 4.0\nbroken\n'
    )
    figures = engine_figures(vllm)
    assert (figures.weights_bytes, figures.kv_capacity_tokens, figures.cache_queries, figures.cache_hits) == (
        None,
        1600,
        15,
        4,
    )


def test_memory_of_a_process_tree_is_seen() -> None:
    """A child that takes 64 MiB while it is looked at."""
    import subprocess

    code = "import sys; x = bytearray(b'1') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with MemoryProbe(process.pid) as probe:
            pass
        assert len(process_tree(process.pid)) == 2
        assert probe.peak_bytes is not None
        assert probe.peak_bytes >= 64 << 20
        assert probe.source in ("PSS", "NVML")
        process.communicate()
    assert process_tree(process.pid) == []
    assert resident_bytes([process.pid]) == 0
    with MemoryProbe(None) as remote:
        pass
    assert (remote.peak_bytes, remote.source) == (None, "remote")


def test_where_the_system_tells_no_shares_the_resident_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.trial.memory_probe.PROPORTIONAL", False)
    here = psutil.Process().memory_info().rss
    assert resident_bytes([os.getpid()]) == pytest.approx(here, rel=0.1)
    with MemoryProbe(os.getpid()) as probe:
        pass
    assert probe.source in ("RSS", "NVML")


def test_this_machine_can_be_described() -> None:
    machine = this_machine()
    assert machine.memory_bytes is None or machine.memory_bytes > 1 << 20
