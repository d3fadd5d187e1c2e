"""The figures of ``/metrics``, each against where it comes from."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from serve_case import PATIENCE, client, metric

from halfbyte.models.precision import precision_from
from halfbyte.rollout.pages import PagePool
from halfbyte.serve.memory import peak_resident_bytes, proportional_bytes, resident_bytes
from halfbyte.serve.opening import open_served
from halfbyte.serve.server import background
from halfbyte.serve.settings import ServeSettings


def test_counts_and_sizes_are_right(folder: Path) -> None:
    settings = ServeSettings(str(folder), served_name="tiny", port=0, kv_memory_mb=2, max_sequences=8)
    opened = open_served(settings)
    engine = opened.engine
    with background(settings, opened) as server:
        prompt = [2 + i % 9 for i in range(40)]
        extra = {"ignore_eos": True}
        for _ in range(3):
            client(server).completions.create(model="tiny", prompt=prompt, max_tokens=5, n=2, extra_body=extra)
        client(server).completions.create(model="tiny", prompt="1", max_tokens=5, extra_body=extra)
        expected = {
            'halfbyte_requests_total{endpoint="completions",outcome="ok"}': 4,
            "halfbyte_prompt_tokens_total": 121,
            "halfbyte_cached_prompt_tokens_total": 64,
            "halfbyte_generated_tokens_total": 35,
            "halfbyte_engine_tokens_total": 35,
            "halfbyte_time_to_first_token_seconds_count": 4,
            "halfbyte_request_seconds_count": 4,
            "halfbyte_kv_pages_total": engine.pool.n_pages,
            "halfbyte_kv_pages_used": 0,
            "halfbyte_kv_pages_cached": 2,
            "halfbyte_kv_capacity_tokens": engine.pool.n_pages * 16,
            "halfbyte_weights_bytes": engine.weights.nbytes,
            "halfbyte_weight_version": 0,
            "halfbyte_engine_faults_total": 0,
        }
        assert {name: metric(server, name) for name in expected} == expected
        page_bytes = PagePool.page_bytes(engine.arch, precision_from("w4a4kv4"), 16)
        assert metric(server, "halfbyte_kv_bytes") == engine.pool.n_pages * page_bytes
        assert metric(server, "halfbyte_engine_step_seconds_total") > 0
        resident, peak = (metric(server, f"halfbyte_{name}resident_bytes") for name in ("", "peak_"))  # in this order
        assert metric(server, "halfbyte_weights_bytes") < metric(server, "halfbyte_proportional_bytes") <= peak
        assert resident <= peak
        text = urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE).read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert all(family.documentation for family in families.values() if not family.name.endswith("_created"))
        labels = families["halfbyte_info"].samples[0].labels
        assert labels["precision"] == "w4a4kv4"
        version = json.loads(urllib.request.urlopen(f"{server.url}/version", timeout=PATIENCE).read())
        assert version["weight_version"] == 0
        assert version["max_length"] == 256


def test_two_servers_in_a_process_count_apart(folder: Path) -> None:
    settings = ServeSettings(str(folder), served_name="tiny", port=0, kv_memory_mb=2)
    with background(settings) as one, background(settings) as two:
        client(one).completions.create(model="tiny", prompt="1", max_tokens=3, extra_body={"ignore_eos": True})
        assert metric(one, "halfbyte_generated_tokens_total") == 3
        assert metric(two, "halfbyte_generated_tokens_total") == 0


def test_memory_is_what_the_system_says() -> None:
    held = bytearray(50 << 20)
    held[::4096] = b"x" * len(held[::4096])
    resident, proportional = resident_bytes(), proportional_bytes()
    assert resident is None or len(held) < resident <= peak_resident_bytes() + (1 << 20)
    assert proportional is None or len(held) < proportional
