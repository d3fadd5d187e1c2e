"""The files that `halfbyte trial init` writes: a commented trial.toml and a few tasks to replace."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.errors import ConfigError
from halfbyte.files import write_text

__all__ = ["init"]

_URL = """[{arm}]
url = {url}
# model = "name"                 # needed where the server lists several
# api_key_env = "MY_TOKEN"       # variable that holds the bearer token
precision = "{precision}"
"""

_SERVED = """[{arm}]
# The trial starts this server, waits until it is healthy, and stops it. Any command will do: vllm, sglang, llama-server...
serve = ["halfbyte", "serve", {model}, "--precision", "{precision}", "--port", "{{port}}",
         "--kv-memory-mb", "{{kv_memory_mb}}", "--no-prefix-cache"]
artefact = {model}
# licence = "path/to/LICENSE"    # where the model folder has none
precision = "{precision}"
kv_memory_mb = {pool}            # the same tokens in both arms: `check` says what fits
"""

_REST = """[sampling]                        # the same for both arms
temperature = 0.0
max_tokens = 256
seed = 0

[run]
repeats = 1                      # of every task in each arm; more where temperature is above 0
concurrency = 4
exclusive = {exclusive}                # only one server fits: it is stopped before the other starts
prefix_cache = "off"             # a cache hit makes the trial invalid; or "reset", or "measure"
timeout = 120.0                  # seconds; a failed request is a result and is not sent again

[limits]                         # chosen before the run: `lock` fixes them
margin = 0.05                    # the pass rate may be lower by less than 5 points
critical = 0                     # critical tasks that may newly fail
failure_rate = 0.05
latency_p50_ratio = 1.2
benefit = "{benefit}"            # or "cost_per_passed", "throughput"
benefit_min = {least}                # improved by at least this fraction
{latency}
[cost]
currency = "USD"
machine_per_hour = 1.0
setup_hours = 4.0
engineer_per_hour = 100.0
operating_per_month = 0.0
requests_per_month = 1000000.0
horizon_months = 12.0

[data]
tuning = []                      # files that the candidate was tuned or calibrated on; tasks must not be among them
"""

_TASKS: tuple[dict[str, object], ...] = (
    {
        "id": "opening-hours",
        "messages": [
            {"role": "system", "content": "You are the assistant of a library. It is open 9 to 17 on weekdays."},
            {"role": "user", "content": "Can I return a book on Sunday at the desk? Answer yes or no, then why."},
        ],
        "scorer": {"type": "regex", "pattern": "^\\W*no\\b", "ignore_case": True},
        "critical": True,
        "tags": ["policy"],
    },
    {
        "id": "total",
        "prompt": "Three copies cost 12.50 each and shipping is 4. What is the total? End with the number.",
        "scorer": {"type": "numeric"},
        "expected": 41.5,
        "tags": ["arithmetic"],
    },
    {
        "id": "extract",
        "prompt": 'Give name and year as JSON with the keys "name" and "year": Ada Lovelace published her notes in 1843.',
        "scorer": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "year": {"const": 1843}},
                "required": ["name", "year"],
            },
        },
        "tags": ["extraction"],
    },
)


def init(folder: Path, baseline: str, candidate: str) -> tuple[Path, Path]:
    """Write trial.toml and tasks.jsonl.

    Arguments:
        baseline, candidate: a model folder that `halfbyte serve` is to serve, or the URL of a server.

    Raises:
        ConfigError: one of the files is there already.
    """
    files = folder / "trial.toml", folder / "tasks.jsonl"
    for file in files:
        if file.exists():
            raise ConfigError("the file is there already", where=str(file), fix="choose another folder")
    remote = [given for given in (baseline, candidate) if given.startswith(("http://", "https://"))]
    benefit = (
        ("throughput", "0.2", "latency_limit = 10.0             # seconds at p95")
        if remote
        else ("peak_memory", "0.3", "")
    )
    rest = _REST.format(
        exclusive="false" if remote else "true ", benefit=benefit[0], least=benefit[1], latency=f"{benefit[2]}\n"
    )
    head = "# A trial: is the candidate good enough to take the baseline's place? docs/trial.md explains every key.\n\n"
    head += f'[trial]\nname = {json.dumps(folder.resolve().name)}\ntasks = "tasks.jsonl"\n\n'
    targets = [_target("baseline", baseline, "bf16", 256), _target("candidate", candidate, "w4a4kv4", 72)]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(files[0], head + "\n".join([*targets, rest]))
    write_text(files[1], "".join(json.dumps(task) + "\n" for task in _TASKS))
    return files


def _target(arm: str, given: str, precision: str, pool: int) -> str:
    if given.startswith(("http://", "https://")):
        return _URL.format(arm=arm, url=json.dumps(given), precision=precision)
    path = Path(given)
    model = str(path.resolve()) if path.exists() else given  # commands run in the trial folder
    return _SERVED.format(arm=arm, model=json.dumps(model), precision=precision, pool=f"{pool}.0")
