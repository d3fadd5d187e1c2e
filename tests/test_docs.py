"""The documentation agrees with the code: keys, defaults, flags, presets, error classes, metrics, links."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from halfbyte import errors
from halfbyte.cli.main import make_app
from halfbyte.config import Config
from halfbyte.formats import SPECS
from halfbyte.models.precision import PRESETS
from halfbyte.objective.corrections import CORRECTIONS
from halfbyte.report import panels
from halfbyte.study.arms import BUILT_IN
from halfbyte.study.plan import StudySection
from halfbyte.trial.settings import Settings, Target
from halfbyte.trial.tasks import ScorerSpec, Task

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(page: str) -> Iterator[list[str]]:
    """Cells of every table row of a page."""
    for line in text(page).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def leaves(value: dict[str, Any], model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        if hasattr(info.annotation, "model_fields"):
            yield from leaves(value[name], info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, value[name]


def test_every_configuration_key_is_listed_with_its_default() -> None:
    expected = {key: json.dumps(value) for key, value in leaves(Config().to_json(), Config)}
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows("configuration.md") if row[0].startswith("`")}
    assert listed == expected


def test_every_flag_is_listed() -> None:
    app = make_app()
    sections = re.split(r"^## ", text("command-line.md"), flags=re.MULTILINE)
    by_command = {section.splitlines()[0]: section for section in sections}
    for name in (name for name in app if not name.startswith("-")):
        members = {f"{name} {member}": app[name][member] for member in app[name] if not member.startswith("-")}
        for title, command in (members or {name: app[name]}).items():
            for argument in command.assemble_argument_collection():
                for flag in argument.names:
                    assert flag in by_command[title], f"{title} {flag}"


def test_the_table_of_presets_is_right() -> None:
    listed = {row[0].strip("`"): row[1:] for row in rows("numerics.md") if row[0].strip("`") in PRESETS}
    assert listed.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        sites = preset.decode
        assert sites == preset.prefill
        assert sites.attention == sites.mlp
        assert listed[name] == [sites.attention, sites.experts, sites.head, sites.router, preset.kv]


def test_specs_named_in_the_docs_exist() -> None:
    named = set(
        re.findall(r"`((?:mx|fouroversix|halfbyte)_\w+|torchao|modelopt|compressed_tensors)`", text("numerics.md"))
    )
    assert len(named) > 8
    assert named <= SPECS.keys()


def test_every_error_class_is_listed() -> None:
    classes = {name for name, item in vars(errors).items() if inspect.isclass(item)} - {"UserError"}
    assert {row[0].strip("`") for row in rows("errors.md") if row[0].endswith("Error`")} == classes


def test_every_correction_is_listed() -> None:
    page = text("objective.md")
    assert all(f"| `{name}` |" in page for name in CORRECTIONS)


def test_arms_and_keys_of_a_study_are_listed() -> None:
    page = text("study.md")
    assert [
        name for name in BUILT_IN if f"`{name}`" not in page.split("## Built-in arms")[1].split("## Running")[0]
    ] == []
    listed = {row[0].strip("`") for row in rows("study.md") if row[0].startswith("`")}
    assert set(StudySection.model_fields) <= listed


def test_keys_of_a_trial_are_listed() -> None:
    cells = {key.strip("`") for row in rows("trial.md") for key in row[0].split(", ")}
    sections = {name: info.annotation for name, info in Settings.model_fields.items()}
    assert set(Target.model_fields) <= cells
    for name, section in sections.items():
        if section is not Target:
            assert {f"{name}.{key}" for key in section.model_fields} - cells == set(), name
    assert {*Task.model_fields, *get_args(ScorerSpec.model_fields["type"].annotation)} - cells == set()


def test_metrics_of_the_report_are_explained() -> None:
    source = inspect.getsource(panels)
    used = set(re.findall(r'"([a-z]+/[a-z0-9_]+)"', source)) - {"time/reward"}
    page = text("run-folder.md")
    assert len(used) > 20
    assert [key for key in sorted(used) if f"`{key}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.relative_to(DOCS)}" for p in sorted(DOCS.rglob("*.md")))])
def test_links_and_make_targets_exist(page: str) -> None:
    path = ROOT / page
    content = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+?)(?:#[\w-]+)?\)", content):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", content, flags=re.MULTILINE):
        assert (target[0] or target[1]) in targets


def test_commands_in_the_docs_parse() -> None:
    app = make_app()
    names = {name for name in app if not name.startswith("-")}
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        content = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```bash\n(.*?)```", content, flags=re.DOTALL):
            for line in block.splitlines():
                words = line.split("#")[0].split()
                if words and words[0].endswith("halfbyte"):
                    assert words[1] in names, line
                    app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_constraints_cover_every_direct_dependency() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    wanted = {name.lower() for name in re.findall(r'"([A-Za-z][\w-]*)(?:[<>=;\[ ][^"]*)?"', block)} - {"halfbyte"}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted - pinned <= {"tomli", "vllm"}, "vLLM has an environment of its own, with its version in the Makefile"
    assert wanted
