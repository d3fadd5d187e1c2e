"""The preflight that asks the servers: reachable, the model listed, usage and streams as expected, the same chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from halfbyte.errors import UserError
from halfbyte.trial.blocks import EngineFigures
from halfbyte.trial.client import Reply, open_client
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import Finding
from halfbyte.trial.records import ARMS, Arm
from halfbyte.trial.requests import path_of, request_body
from halfbyte.trial.settings import Target
from halfbyte.trial.targets import Server
from halfbyte.trial.tasks import Task

__all__ = ["live_findings"]

_PROBES = 3
_MIB = 1 << 20
_POOL_TOLERANCE = 0.01  # as in checks/benefit.py


async def live_findings(folder: TrialFolder) -> list[Finding]:
    """Start or reach both servers, one after the other, and ask each a few tasks for one token."""
    run = folder.settings.run
    probes = _probes(folder.tasks)
    findings: list[Finding] = []
    replies: dict[Arm, list[Reply]] = {}
    figures: dict[Arm, EngineFigures] = {}
    async with open_client(run.timeout) as client:
        for arm in ARMS:
            server = Server(arm, folder.settings.target(arm), folder.path, client)
            try:
                seconds = await server.start()
                where = f"{server.endpoint.model} at {server.endpoint.base}"
                took = f", up after {seconds:.1f} s" if server.target.started else ""
                findings.append(Finding("preflight", f"{arm}: server", True, f"{where}{took}"))
                before = await server.figures()
                replies[arm] = []
                for task in [*probes, probes[0]]:  # the first one twice: a prefix cache would find it
                    body = request_body(folder.settings, task, 0, server.endpoint.model) | {"max_tokens": 1}
                    replies[arm].append(await client.ask(server.endpoint, path_of(folder.settings), body))
                figures[arm] = await server.figures()
                findings += _answers(arm, replies[arm])
                if run.prefix_cache == "off":
                    findings.append(_cache_off(arm, replies[arm], before, figures[arm]))
                elif run.prefix_cache == "reset" and not server.target.started:
                    findings.append(_cache_reset(arm, await server.reset_cache()))
                if server.target.started:
                    findings += _pool(arm, server.target, figures[arm])
            except UserError as error:
                findings.append(Finding("preflight", f"{arm}: server", False, str(error), error.fix))
            finally:
                await server.stop()
    findings += _template(folder, replies)
    if folder.settings.limits.benefit == "peak_memory":
        findings += _pools(folder, figures)
    return findings


def _probes(tasks: Sequence[Task]) -> list[Task]:
    """A few tasks, among them one with tools and one with a system message, where a template is most likely to differ."""
    special = [next((t for t in tasks if t.tools is not None), None)]
    special.append(next((t for t in tasks if t.conversation()[0].get("role") == "system"), None))
    chosen = [task for task in special if task is not None] + list(tasks)
    return list({task.id: task for task in chosen}.values())[:_PROBES]


def _answers(arm: Arm, replies: Sequence[Reply]) -> Iterator[Finding]:
    failed = [reply.error for reply in replies if reply.error is not None]
    if failed:
        yield Finding(
            "preflight", f"{arm}: answers", False, f"{len(failed)} of {len(replies)} probes failed: {failed[0]}"
        )
        return
    lacking = [
        name for name in ("prompt_tokens", "completion_tokens") if any(getattr(r, name) is None for r in replies)
    ]
    if lacking:
        detail = f"no {' and no '.join(lacking)} in its usage: templates, lengths and cost cannot be compared"
        yield Finding("preflight", f"{arm}: answers", None, detail)
    else:
        yield Finding("preflight", f"{arm}: answers", True, f"{len(replies)} probes answered, with usage")


def _cache_off(arm: Arm, replies: Sequence[Reply], before: EngineFigures, after: EngineFigures) -> Finding:
    name = f"{arm}: prefix cache"
    hits = max((reply.cached_tokens or 0 for reply in replies), default=0)
    if after.cache_hits is not None:
        hits = max(hits, after.cache_hits - (before.cache_hits or 0))
    if hits:
        fix = 'start the server without one (halfbyte serve --no-prefix-cache), or set run.prefix_cache = "reset" or "measure"'
        return Finding("cache", name, False, f"a prompt sent twice was found in the cache ({hits} tokens)", fix)
    if after.cache_hits is None and all(reply.cached_tokens is None for reply in replies):
        return Finding("cache", name, None, "neither usage nor metrics say what it held")
    return Finding("cache", name, True, "a prompt sent twice was computed twice")


def _cache_reset(arm: Arm, done: bool) -> Finding:
    if done:
        return Finding("cache", f"{arm}: prefix cache", True, "the server empties it when asked")
    fix = 'switch the cache off and set run.prefix_cache = "off", or "measure" it'
    return Finding("cache", f"{arm}: prefix cache", False, "the server has no endpoint that empties it", fix)


def _pool(arm: Arm, target: Target, figures: EngineFigures) -> Iterator[Finding]:
    """The pool that was asked for is the pool that there is."""
    if target.kv_memory_mb is None or figures.kv_bytes is None:
        return
    detail = f"{figures.kv_bytes / _MIB:.1f} MiB, {figures.kv_capacity_tokens} tokens"
    if figures.kv_bytes > (1 + _POOL_TOLERANCE) * target.kv_memory_mb * _MIB:
        fix = "pass {kv_memory_mb} to the command in serve"
        yield Finding("memory", f"{arm}: KV pool", False, f"{detail}; {target.kv_memory_mb:g} MiB are set", fix)
    else:
        yield Finding("memory", f"{arm}: KV pool", True, detail)


def _pools(folder: TrialFolder, figures: Mapping[Arm, EngineFigures]) -> Iterator[Finding]:
    """Both pools hold the same tokens: the same context and load, so that memory compares models (vLLM #10207)."""
    first, second = (figures[arm].kv_capacity_tokens if arm in figures else None for arm in ARMS)
    if first is None or second is None:
        yield Finding("memory", "equal KV pools", None, "a server does not report its KV pool: not checked")
        return
    detail = f"{first:,} and {second:,} tokens"
    if abs(first - second) <= _POOL_TOLERANCE * max(first, second):
        yield Finding("memory", "equal KV pools", True, detail)
        return
    pool = folder.settings.candidate.kv_memory_mb
    fix = (
        ""
        if pool is None or not second
        else f"candidate.kv_memory_mb = {pool * first / second:.4g} holds about as many"
    )
    yield Finding("memory", "equal KV pools", False, f"{detail}: memory would compare pools, not models", fix)


def _template(folder: TrialFolder, replies: Mapping[Arm, Sequence[Reply]]) -> Iterator[Finding]:
    first, second = (replies.get(arm, ()) for arm in ARMS)
    pairs = [(a.prompt_tokens, b.prompt_tokens) for a, b in zip(first, second) if a.error is None and b.error is None]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return
    differ = [(a, b) for a, b in known if a != b]
    if not differ:
        yield Finding("template", "chat template", True, f"prompt tokens are equal in {len(known)} probes")
        return
    detail = f"the arms count {differ[0][0]} and {differ[0][1]} prompt tokens for the same messages"
    if folder.settings.run.allow_template_change:
        yield Finding("template", "chat template", None, f"{detail}; allowed by run.allow_template_change")
    else:
        fix = "give both servers the same template; or, if its change is part of the trial, run.allow_template_change = true"
        yield Finding("template", "chat template", False, detail, fix)
