"""The example of docs/refit.md runs, and its tables name what exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from halfbyte.refit import errors
from halfbyte.refit.target import Target

PAGE = (Path(__file__).parents[2] / "docs" / "refit.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["target"].arrays["layer.weight"][0, 0] == 1
    assert names["refit"].target.version == 1


def test_targets_and_errors_that_are_named_exist() -> None:
    for path in re.findall(r"^\| `((?:adapters|rollout)\.\w+\.\w+)`", PAGE, re.MULTILINE):
        module, _, name = path.rpartition(".")
        home = module if module.startswith("rollout") else f"refit.{module}"
        found = getattr(import_module(f"halfbyte.{home}"), name)
        wanted = {m for m in vars(Target) if not m.startswith("_") and callable(getattr(Target, m))}
        assert wanted <= set(dir(found)), name
        assert len(wanted) == 9
    for name in set(re.findall(r"`(\w+Error)`", PAGE)):
        assert hasattr(errors, name)
