"""A server of our own: what it is started with, what is said when it fails, and that nothing of it stays behind."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.errors import VllmError
from halfbyte.rollout.vllm.server import VllmServer, arguments

#: Stands in for vLLM: writes down what it was given, starts a child, and answers /health.
STANDIN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--break" in sys.argv:
    print("some talk")
    sys.exit("ValueError: injected, no such model")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["SEEN"] + ".part", "w") as out:
    json.dump({"argv": sys.argv[1:], "dev": os.environ.get("VLLM_SERVER_DEV_MODE"), "child": child.pid}, out)
os.rename(os.environ["SEEN"] + ".part", os.environ["SEEN"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never" in sys.argv else 200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, folder.parent.parent):
        (parent / "__init__.py").touch()
    (folder / "api_server.py").write_text(STANDIN)
    return {"PYTHONPATH": str(tmp_path / "site"), "SEEN": str(tmp_path / "seen.json")}


def ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_it_starts_answers_and_ends_with_its_children(tmp_path: Path, environment: dict[str, str]) -> None:
    it = VllmServer(
        sys.executable, "path/to/model", tmp_path / "log", max_length=99, extra=["--more", "1"], environment=environment
    )
    seen = json.loads(Path(environment["SEEN"]).read_text())
    assert VllmClient(it.url).healthy()
    assert seen["dev"] == "1"
    expected = arguments("path/to/model", port=int(it.url.rsplit(":", 1)[1]), max_length=99)
    assert seen["argv"] == [*expected, "--more", "1"]
    given = dict(pairwise(expected))
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--max-model-len"] == "99"
    assert json.loads(given["--weight-transfer-config"]) == {"backend": "halfbyte"}
    it.close()
    it.close()
    assert it.process.poll() is not None
    until = time.monotonic() + 30
    while not ended(seen["child"]) and time.monotonic() < until:
        time.sleep(0.05)
    assert ended(seen["child"])


def test_a_server_that_ends_says_why(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(VllmError, match=r"ended with code 1\n.*ValueError: injected, no such model"):
        VllmServer(sys.executable, "m", tmp_path / "log", extra=["--break"], environment=environment)
    with pytest.raises(VllmError, match="cannot be started"):
        VllmServer(str(tmp_path / "no-python"), "m", tmp_path / "log")


def test_a_server_that_never_answers_is_ended(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(VllmError, match="did not answer within 3 s"):
        VllmServer(sys.executable, "m", tmp_path / "log", extra=["--never"], environment=environment, patience=3.0)
