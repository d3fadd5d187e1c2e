"""``halfbyte serve`` as a process: the ready line, signals, the environment, quantised checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_case import PATIENCE, Offline, wait_until

from halfbyte.cli.main import main
from halfbyte.serve.server import background
from halfbyte.serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]


@contextmanager
def command(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment}
    line = [sys.executable, "-m", "halfbyte", "serve", *words, "--port", "0", "--kv-memory-mb", "8"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready"
            assert ready["pid"] == process.pid
            yield process, ready["url"]
        finally:
            if process.poll() is None:
                process.kill()


def api(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def page(url: str, key: str = "none") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def test_sigterm_lets_a_stream_finish_and_the_process_ends_well() -> None:
    with command("tiny", "--stream-seconds", "0", "--no-prefix-cache", HALFBYTE_API_KEY="k") as (process, url):
        with pytest.raises(openai.AuthenticationError):
            api(url).models.list()
        client = api(url, "k")
        options: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "max_tokens": 250, "seed": 1}
        stream = client.completions.create(**options, n=64, stream=True, extra_body={"ignore_eos": True})
        finished = 0
        for number, chunk in enumerate(stream):
            if number == 0:
                process.send_signal(signal.SIGTERM)
            finished += sum(choice.finish_reason is not None for choice in chunk.choices)
        assert finished == 64
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_second_signal_stops_at_once() -> None:
    with command("tiny", "--threads", "1") as (process, url), ThreadPoolExecutor(1) as pool:
        options: dict[str, Any] = {"model": "tiny", "prompt": "1", "max_tokens": 255, "n": 128}
        answer = pool.submit(
            api(url).completions.create, **options, extra_body={"ignore_eos": True, "return_token_ids": True}
        )
        wait_until(lambda: "halfbyte_active_requests 1.0" in page(f"{url}/metrics"), "the request")
        process.send_signal(signal.SIGINT)

        def draining() -> bool:
            try:
                page(f"{url}/health")
            except urllib.error.HTTPError as error:
                return error.code == 503
            except OSError:
                return True
            return False

        wait_until(draining, "the drain")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        answer.exception(PATIENCE)  # an answer if it was quick, an error if not; but it ends


@pytest.mark.parametrize("style", ["compressed-tensors", "halfbyte"])
def test_a_quantised_checkpoint_is_served_with_the_bits_it_has(folder: Path, tmp_path: Path, style: Any) -> None:
    from halfbyte.quantize.export import quantize_model

    out = tmp_path / "fp4"
    quantize_model(
        str(folder),
        out,
        style=style,
        kind="w4a4",
        spec_name="halfbyte",
        calibration=None,
        tensor_parallel=1,
        overwrite=False,
    )
    expected = Offline(str(folder)).text("7+8=", max_tokens=20, seed=5, ignore_eos=True)
    with background(ServeSettings(str(out), served_name="small", port=0, prefix_cache=False)) as server:
        options: dict[str, Any] = {"model": "small", "prompt": "7+8=", "max_tokens": 20, "seed": 5}
        answer = api(server.url).completions.create(**options, extra_body={"ignore_eos": True})
        assert answer.choices[0].text == expected
        shown = json.loads(page(f"{server.url}/version"))
        assert shown["weights"] == "fp4"
        assert shown["model"] == "small"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere", "--port", "0"], "nowhere"),
        (["tiny", "--host", "256.1.1.1"], "cannot listen"),
        (["tiny", "--port", "0", "--follow", "ftp://x"], "ftp"),
    ],
)
def test_what_cannot_be_served_is_a_users_error(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert out == ""


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "prometheus_client"])
def test_a_missing_extra_names_the_command_that_installs_it(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from halfbyte.cli.main import main\n"
        "sys.exit(main(['serve', 'tiny', '--port', '0']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "pip install 'halfbyte[serve]'" in done.stderr
