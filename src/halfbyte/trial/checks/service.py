"""How the candidate serves: failures, latency, length of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from halfbyte.statistics import proportions
from halfbyte.statistics.special import Reals
from halfbyte.trial.checks.verdicts import at_most, unknown
from halfbyte.trial.outcome import Check, Detail
from halfbyte.trial.pairs import Block, Pair
from halfbyte.trial.records import Arm, Record
from halfbyte.trial.statistics import percentiles, resample

__all__ = ["failure_rate", "latency_limit", "latency_ratio", "length_ratio"]


def failure_rate(records: Sequence[Record], limit: float, alpha: float) -> Check:
    """Share of the candidate's requests that failed, with Clopper and Pearson's limits (requests taken as independent)."""
    failed = {arm: [r for r in records if r.arm == arm and r.error is not None] for arm in ("baseline", "candidate")}
    n, k = sum(r.arm == "candidate" for r in records), len(failed["candidate"])
    kinds = sorted({r.failure for r in failed["candidate"] if r.failure is not None})
    note = f"{k} of {n} requests failed" + (f" ({', '.join(kinds)})" if kinds else "")
    note += f"; the baseline's: {len(failed['baseline'])}"
    interval = proportions.interval(k, n, alpha)
    if limit > 0 and interval[0] <= limit < interval[1]:
        note += (
            f"; {proportions.requests_for_rate(limit, alpha, k):,} requests with as many failures would hold the limit"
        )
    elif limit == 0:
        note += "; no number of requests shows a rate of 0"
    return at_most(
        "failure_rate",
        "share",
        k / n,
        interval,
        limit,
        note,
        {"failed": k, "requests": n, "baseline_failed": len(failed["baseline"])},
    )


def latency_ratio(name: str, served: Sequence[Block], q: float, limit: float | None, alpha: float) -> Check:
    """Quantile ``q`` of the candidate's latency over the baseline's, by a bootstrap of blocks; failed requests left out."""
    by_block = [{arm: _latencies(block, arm) for arm in block.records} for block in served]
    usable = [block for block in by_block if all(block.values())]
    counts = {arm: sum(len(block[arm]) for block in usable) for arm in ("baseline", "candidate")}
    if (refused := _refused(q, min(counts.values(), default=0), len(usable), alpha)) is not None:
        return unknown(name, "ratio", limit, refused, {"requests": min(counts.values(), default=0)})
    baseline, candidate = [block["baseline"] for block in usable], [block["candidate"] for block in usable]
    before = percentiles.percentile(np.concatenate(baseline), q)
    after = percentiles.percentile(np.concatenate(candidate), q)
    interval = percentiles.ratio_limits(baseline, candidate, q, alpha)
    note = f"p{100 * q:g} {after:.3f} s against {before:.3f} s; bootstrap of {len(usable)} blocks"
    details: dict[str, Detail] = {
        "baseline_seconds": before,
        "candidate_seconds": after,
        "blocks": len(usable),
        **counts,
    }
    return at_most(name, "ratio", after / before, interval, limit, note, details)


def latency_limit(served: Sequence[Block], limit: float, alpha: float) -> Check:
    """The candidate's p95 in seconds, within which its throughput counts."""
    latencies = [found for block in served if (found := _latencies(block, "candidate"))]
    n = sum(map(len, latencies))
    if (refused := _refused(0.95, n, len(latencies), alpha)) is not None:
        return unknown("latency_limit", "seconds", limit, refused, {"requests": n})
    return at_most(
        "latency_limit",
        "seconds",
        percentiles.percentile(np.concatenate(latencies), 0.95),
        percentiles.value_limits(latencies, 0.95, alpha),
        limit,
        f"p95 of {n} requests; bootstrap of {len(latencies)} blocks",
        {"requests": n, "blocks": len(latencies)},
    )


def length_ratio(paired: Mapping[str, Sequence[Pair]], limit: float | None, alpha: float) -> Check:
    """Mean response tokens, candidate over baseline, over pairs that both came back; bootstrap over tasks."""
    sums = np.array(
        [
            [sum(side) for side in zip(*lengths, strict=True)]
            for of_task in paired.values()
            if (lengths := [found for pair in of_task if (found := _lengths(pair)) is not None])
        ],
        float,
    )
    if not len(sums):
        return unknown("length_ratio", "ratio", limit, "the servers report no token counts")
    before, after = sums.sum(axis=0)
    if before == 0:
        return unknown("length_ratio", "ratio", limit, "the baseline's responses are empty")

    def statistic(drawn: Reals) -> Reals:
        totals = drawn @ sums
        return np.asarray(totals[:, 1] / np.maximum(totals[:, 0], 1e-300))

    interval = resample.limits(statistic, len(sums), alpha)
    note = f"{after:.0f} against {before:.0f} tokens; bootstrap of {len(sums)} tasks"
    if interval is None:
        note = f"fewer than {resample.least_clusters(alpha)} tasks"
    details: dict[str, Detail] = {
        "baseline_tokens": float(before),
        "candidate_tokens": float(after),
        "tasks": len(sums),
    }
    return at_most("length_ratio", "ratio", float(after / before), interval, limit, note, details)


def _refused(q: float, n: int, blocks: int, alpha: float) -> str | None:
    """Why a sample does not carry a percentile's limits."""
    needed, least = percentiles.requests_needed(q), resample.least_clusters(alpha)
    if n < needed:
        return (
            f"p{100 * q:g} of {n} requests an arm is not reported: {min(q, 1 - q) * n:.3g} would lie beyond it, and limits "
            f"need {percentiles.EXCEEDANCES} ({needed} requests)"
        )
    if blocks < least:
        return f"{blocks} blocks: no limit at alpha {alpha:g} from fewer than {least}"
    return None


def _latencies(block: Block, arm: Arm) -> list[float]:
    return [record.latency for record in block.records[arm] if record.error is None]


def _lengths(pair: Pair) -> tuple[int, int] | None:
    before, after = pair.baseline.completion_tokens, pair.candidate.completion_tokens
    return (before, after) if pair.answered and before is not None and after is not None else None
