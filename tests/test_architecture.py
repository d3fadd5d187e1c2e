"""The house rules of docs/architecture.md, checked on the sources: floors, circles, pickle, names of machines."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "halfbyte"
FILES = sorted(PACKAGE.rglob("*.py"))

#: A file imports from its own package and from packages on floors below, nothing else of halfbyte.
FLOORS = {
    "errors": 0,
    "files": 0,
    "config": 1,
    "formats": 1,
    "html": 1,
    "statistics": 1,
    "kernels": 2,
    "models": 3,
    "guidance": 4,
    "objective": 4,
    "refit": 4,
    "learner": 5,
    "rollout": 5,
    "envs": 6,
    "quantize": 6,
    "serve": 7,
    "diagnosis": 7,
    "planning": 7,
    "train": 7,
    "bench": 8,
    "report": 8,
    "study": 8,
    "trial": 8,
    "cli": 9,
    "__main__": 10,
}
#: Packages that stay usable without the rest of the house.
ONLY = {"config": {"errors"}, "refit": {"errors", "formats", "kernels"}}

#: Built from C++, so there is no source file of theirs among the modules.
EXTENSIONS = {"halfbyte.kernels._native"}

#: Files that may be longer than 500 lines, with the reason.
LONG: dict[str, str] = {}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING:``, which never runs."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for inner in ast.walk(block)}


def imports(name: str, *, at_run_time: bool = False) -> Iterator[tuple[str, int]]:
    """Modules of halfbyte that a module names in imports, anywhere in the file, with the line."""
    skipped = for_types_only(TREES[name]) if at_run_time else set()
    for node in ast.walk(TREES[name]):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "halfbyte":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "halfbyte":
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES or full in EXTENSIONS else node.module), node.lineno


def room(module: str) -> str | None:
    """The package (or top-level module) a module belongs to; None for ``halfbyte`` itself, which imports nothing."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_package_has_a_floor() -> None:
    assert {room(name) for name in MODULES} - {None} <= FLOORS.keys()
    assert list(imports("halfbyte")) == []


def test_no_import_goes_up_a_floor_or_across() -> None:
    wrong = []
    for name in MODULES:
        here = room(name)
        for target, line in imports(name):
            there = room(target)
            if here is None or there is None or there == here:
                continue
            if FLOORS[there] >= FLOORS[here] or there not in ONLY.get(here, FLOORS):
                wrong.append(f"{name}:{line} imports {target}")
    assert wrong == []


def test_files_do_not_import_each_other_in_circles() -> None:
    graph = {name: {target for target, _ in imports(name, at_run_time=True) if target != name} for name in MODULES}
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> list[str] | None:
        state[name] = 1
        for target in graph[name]:
            if state.get(target) == 1:
                return [*trail[trail.index(target) :], target] if target in trail else [name, target]
            if target in graph and target not in state and (found := visit(target, [*trail, target])):
                return found
        state[name] = 2
        return None

    for name in MODULES:
        if name not in state:
            assert visit(name, [name]) is None


@pytest.mark.parametrize(
    "module",
    [
        "halfbyte",
        "halfbyte.errors",
        "halfbyte.config",
        "halfbyte.report",
        "halfbyte.study",
        "halfbyte.trial.report",
        "halfbyte.trial.run",
        "halfbyte.trial.verify",
        "halfbyte.trial.probe",
        "halfbyte.cli.main",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = (
        f"import sys, {module}; sys.exit(', '.join({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_everything_opens_no_connection() -> None:
    names = [name for name in MODULES if "kernels.native" not in name]  # the extension may not be built
    names = [name for name in names if "kernels.gpu" not in name]  # nor Triton installed
    code = (
        "import socket, importlib\n"
        "def refuse(*arguments, **named): raise SystemExit('a connection at import')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


PICKLING_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PICKLING_CALLS = {"torch.load", "numpy.load", "np.load", "pandas.read_pickle", "torch.save"}


def test_no_pickle_is_read() -> None:
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules = {(node.module or "").split(".")[0]}
            else:
                modules = set()
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if modules & PICKLING_MODULES or called in PICKLING_CALLS:
                found.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == []


def text_files() -> Iterator[Path]:
    """What the repository holds as text, without folders that are built."""
    suffixes = {".py", ".md", ".toml", ".yml", ".txt", ".cpp", ".hpp", ".j2", ".html", ".svg", ".css", ""}
    built = {".git", ".venv", "build", "dist", "site", "runs", "__pycache__"}
    for folder in ("", ".ci", "bench", "cpp", "docs", "examples", "src", "tests"):
        paths = (ROOT / folder).rglob("*") if folder else ROOT.glob("*")
        for path in paths:
            if path.is_file() and path.suffix in suffixes and not built & set(path.relative_to(ROOT).parts):
                yield path


# Spelled with classes so that this file does not hold what it looks for.
FORBIDDEN = [
    r"[p]ypi\.org",
    r"[p]ythonhosted",
    r"[d]ownload\.pytorch",
    r"[d]eb\.debian",
    r"(extra-)?[i]ndex-url",
    r"[f]ind-links",
    r"(?<![\w./])/[w]ork/",
    r"(?<![\w./])/[r]oot/",
    r"(?<![\w./])/[h]ome/",
]


def test_no_file_names_a_registry_host_or_a_path_of_some_machine() -> None:
    pattern = re.compile("|".join(FORBIDDEN))
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_long_files_have_a_reason() -> None:
    long = {
        str(path.relative_to(ROOT))
        for path in text_files()
        if path.suffix in (".py", ".cpp", ".hpp") and len(path.read_text(encoding="utf-8").splitlines()) > 500
    }
    assert long == set(LONG)


def test_nothing_is_left_to_be_written() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplemented" in ast.unparse(node.exc)
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []
