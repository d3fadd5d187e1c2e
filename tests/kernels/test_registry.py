"""The choice of kernels: names, the environment variable, one extension for every name."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from halfbyte.errors import ConfigError
from halfbyte.kernels import Kernels, active, available, describe, get
from halfbyte.kernels.compiled.exact import Compile
from halfbyte.kernels.registry import for_device


def test_names_and_protocol() -> None:
    assert available()[0] == "reference"
    for name in available():
        assert isinstance(get(name), Kernels)
        assert get(name).name == name or name == "native"
    if "native" in available():
        assert get("native").name == available()[-2]  # the best instruction set
    with pytest.raises(ConfigError, match="one of reference"):
        get("cuda")


def test_description_names_what_runs() -> None:
    record = describe()
    assert record["active"] == active().name
    assert record["available"] == available()


@pytest.mark.parametrize("name", available())
def test_environment_variable_forces_a_choice(name: str) -> None:
    assert _run(name).stdout.split() == [get(name).name]


def test_unknown_choice_is_an_error() -> None:
    result = _run("fastest")
    assert result.returncode != 0
    assert "there are no kernels named 'fastest' here" in result.stderr


@pytest.mark.parametrize(
    ("device", "compile", "cuda", "triton", "expected"),
    [
        ("cpu", "off", True, True, active().name),
        ("cpu", "auto", True, True, active().name),
        ("cpu", "on", False, False, "compiled"),
        ("cuda", "off", True, True, "triton"),
        ("cuda", "auto", True, True, "triton, compiled"),
        ("cuda", "on", True, True, "triton, compiled"),
        ("cuda", "auto", True, False, "reference"),
        ("cuda", "auto", False, True, "reference"),
        ("mps", "auto", True, True, "reference"),
    ],
)
def test_kernels_of_a_device(
    device: str, compile: Compile, cuda: bool, triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's only for CUDA tensors, and only where there are both; ``kernels.gpu`` is not imported otherwise."""
    gpu = types.ModuleType("halfbyte.kernels.gpu")
    gpu.TritonKernels = lambda: types.SimpleNamespace(name="triton")  # type: ignore[attr-defined]
    gpu.CompiledTritonKernels = lambda insist: types.SimpleNamespace(name="triton, compiled", insist=insist)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "halfbyte.kernels.gpu", gpu if cuda and triton else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("halfbyte.kernels.registry.find_spec", lambda name: object() if triton else None)
    found = for_device(device, compile)
    assert found.name == expected
    assert getattr(found, "insist", False) == (compile == "on")


def test_compiling_for_a_device_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("halfbyte.kernels.registry.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton"):
        for_device("cuda", "on")


def _run(name: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", "from halfbyte import kernels; print(kernels.active().name)"],
        env={**os.environ, "HALFBYTE_KERNELS": name, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
