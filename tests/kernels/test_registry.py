"""The choice of kernels: names, the environment variable, one extension for every name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.errors import ConfigError
from halfbyte.kernels import Kernels, active, available, describe, get


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
