"""Which charts a report shows, and from which metrics. A panel without data is left out and listed as not recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfbyte.report import mismatch
from halfbyte.report.chart import Band, Line, Point, line_chart, smooth, stacked_chart
from halfbyte.report.panel import Panel
from halfbyte.report.records import Record
from halfbyte.report.sample_tokens import read_tokens
from halfbyte.report.scale import number

__all__ = ["PHASES", "panels"]

#: Phases of a step in the order they run, with the metric that holds their seconds.
PHASES = (
    ("rollout", "time/rollout"),
    ("reward", "time/reward"),
    ("learner", "time/learner"),
    ("publish", "time/publish"),
)


@dataclass(frozen=True)
class _Metric:
    """A plain panel: some metrics over steps on one axis."""

    title: str
    keys: tuple[tuple[str, str], ...]
    note: str
    logarithmic: bool = False
    y_range: tuple[float, float] | None = None


_BY_LAYER = "align/code_mismatch/"

_GAP = (
    _Metric(
        "Gap: learner minus rollout log-prob",
        (("gap/mean_abs", "mean |g|"), ("gap/p99_abs", "99th percentile"), ("gap/max_abs", "largest")),
        "Nats per sampled token, same weights on both sides. Zero means the two executions agree exactly.",
        logarithmic=True,
    ),
    _Metric(
        "KL of rollout and learner",
        (("gap/k3_kl", "k3 estimate"),),
        "Mean of exp(g) - 1 - g over real tokens, in nats (g is the gap).",
        logarithmic=True,
    ),
    _Metric(
        "Effective sample size",
        (("gap/ess", "share"),),
        "Of the importance weights between rollout and learner; 1 means every token counts fully.",
    ),
)
_ALIGNMENT = (
    _Metric(
        "Codes that differ",
        (("align/code_mismatch", "own rounding"), ("align/code_mismatch_guided", "under guidance")),
        "Share of the learner's activation codes that are not the rollout's, on a sample of tokens.",
        logarithmic=True,
    ),
    _Metric(
        "Scales that differ",
        (("align/scale_mismatch", "block scales"), ("align/unguided", "tokens without guidance")),
        "Shares: block scales that are not the rollout's by the learner's own rounding; tokens without guidance.",
    ),
)
_POLICY = (
    _Metric("Entropy", (("entropy/mean", "mean"),), "Of the policy's next-token distribution, nats per token."),
    _Metric("Response length", (("length/mean", "mean"), ("length/max", "longest")), "Tokens per response."),
)
_FLIGHT = (
    _Metric(
        "Age of tokens",
        (("stale/mean", "mean"), ("stale/max", "oldest")),
        "Weight updates between drawing a token and training on it.",
    ),
    _Metric(
        "Groups in flight",
        (("flight/groups", "in flight"),),
        "Prompts submitted and not trained on, when a step has its batch.",
    ),
    _Metric(
        "Waiting",
        (("time/idle_learner", "learner for rollouts"), ("time/idle_rollout", "rollouts for work")),
        "Seconds per step.",
    ),
    _Metric("Throughput", (("time/tokens_per_second", "tokens"),), "New tokens per second of whole steps."),
)
_OPTIMISER = (
    _Metric("Learning rate", (("optim/lr", "learning rate"),), ""),
    _Metric("Gradient norm", (("optim/grad_norm", "norm"),), "Before clipping."),
    _Metric("Policy loss", (("loss/policy", "loss"),), ""),
    _Metric(
        "Clipped tokens",
        (("ratio/clipped_low", "low"), ("ratio/clipped_high", "high"), ("ratio/clipped_dual", "dual")),
        "Share of tokens whose gradient a bound on the ratio removes.",
    ),
)
_REFIT = (
    _Metric(
        "Weights that an update changes",
        (("refit/changed", "BF16 weights"), ("refit/changed_codes", "FP4 codes")),
        "Share whose bits differ from the version before.",
        logarithmic=True,
    ),
    _Metric(
        "Size of a version",
        (("refit/bytes", "delta"), ("refit/full_bytes", "all weights")),
        "Bytes that a reader of the run's store fetches for an update.",
        logarithmic=True,
    ),
)


def panels(record: Record) -> list[Panel]:
    """All panels in reading order, also those without data (their ``svg`` is empty)."""
    out = [_reward(record), _accuracy(record)]
    out += [_metric_panel(record, m) for m in _GAP + _ALIGNMENT]
    out += [_depth(record)]
    out += _mismatch(record)
    out += [_metric_panel(record, m) for m in _POLICY]
    out += [_time(record), _speed(record)]
    if record.series("stale/mean"):  # a synchronous run has nothing in flight
        out += [_metric_panel(record, m) for m in _FLIGHT]
    out += [_metric_panel(record, m) for m in _REFIT]
    out += [_metric_panel(record, m) for m in _OPTIMISER]
    return out


def _mismatch(record: Record) -> list[Panel]:
    """The sign structure of the gap: by step from the metrics, by token from the last saved samples that have it."""
    masses = [record.series(f"quadrant/mass_{name}") for name, _, _ in mismatch.QUADRANTS]
    chosen = record.config.get("objective")
    correction = str(chosen.get("correction", "")) if isinstance(chosen, Mapping) else ""
    newest_first = reversed(list(record.sample_files.values()))
    samples = next((found for path in newest_first if (found := read_tokens(path))), [])
    return [
        mismatch.quadrant_stack(masses),
        mismatch.indicator(record.series("segment/over_threshold"), record.series("reward/mean")),
        mismatch.carpet(samples),
        mismatch.gap_density(samples),
        mismatch.weight_histogram(samples, correction),
    ]


def _smoothed(points: Sequence[tuple[float, float]], colour: int) -> tuple[list[Line], int]:
    """The raw series behind its moving mean; the window's length (1: no smoothing, few points)."""
    window = len(points) // 25
    if window < 2:
        return [Line(points, colour)], 1
    window += 1 - window % 2
    return [Line(points, colour, faint=True), Line(smooth(points, window), colour)], window


def _smoothing_note(window: int) -> str:
    return f" Strong line: mean over {window} steps." if window > 1 else ""


def _label(title: str, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return title
    (first, a), (last, b) = points[0], points[-1]
    return f"{title}: {number(a)} at step {number(first)}, {number(b)} at step {number(last)}"


def _reward(record: Record) -> Panel:
    mean, deviation = record.series("reward/mean"), dict(record.series("reward/std"))
    lines, window = _smoothed(mean, 0)
    bands = []
    if mean and all(x in deviation for x, _ in mean):
        bands = [Band([(x, y - deviation[x]) for x, y in mean], [(x, y + deviation[x]) for x, y in mean], 0)]
    note = "Mean over the step's samples" + ("; the band is one standard deviation of the samples." if bands else ".")
    svg = line_chart(_label("Reward", mean), lines, bands=bands)
    return Panel("Reward", (), note + _smoothing_note(window), svg)


def _accuracy(record: Record) -> Panel:
    train = record.series("accuracy/train")
    lines, window = _smoothed(train, 0)
    points = []
    for step, row in record.evaluations:
        if "eval/accuracy" in row:
            value = row["eval/accuracy"]
            low, high = row.get("eval/accuracy_low", value), row.get("eval/accuracy_high", value)
            note = f"step {step}: {value:.3f} [{low:.3f}, {high:.3f}]"
            points.append(Point(float(step), value, low, high, 1, note))
    svg = line_chart(
        _label("Held-out accuracy", [(p.x, p.y) for p in points] or train), lines, points, y_range=(0.0, 1.0)
    )
    series = ((0, "training prompts", train), (1, "held-out prompts, 95% interval", points))
    legend = tuple((colour, text) for colour, text, data in series if data)
    return Panel("Accuracy, sampled", legend, "Share of correct responses." + _smoothing_note(window), svg)


def _metric_panel(record: Record, metric: _Metric) -> Panel:
    found = [(i, text, record.series(key)) for i, (key, text) in enumerate(metric.keys)]
    found = [item for item in found if item[2]]
    lines = [Line(points, colour) for colour, _, points in found]
    label = "; ".join(_label(f"{metric.title}, {text}", points) for _, text, points in found)
    svg = line_chart(label, lines, y_range=metric.y_range, logarithmic=metric.logarithmic)
    legend = tuple((colour, text) for colour, text, _ in found) if len(metric.keys) > 1 else ()
    return Panel(metric.title, legend, metric.note, svg)


def _depth(record: Record) -> Panel:
    """The mismatch of every site over the layers, averaged over the last quarter of the run."""
    rows = [values for _, values in record.train if any(key.startswith(_BY_LAYER) for key in values)]
    found: dict[str, dict[int, list[float]]] = {}
    for values in rows[-max(1, len(rows) // 4) :]:
        for key, value in values.items():
            layer, _, site = key.removeprefix(_BY_LAYER).partition("/")
            if key.startswith(_BY_LAYER) and layer.isdigit() and len(layer) < 6:
                found.setdefault(site, {}).setdefault(int(layer), []).append(value)
    series = [
        (site, [(float(layer), sum(v) / len(v)) for layer, v in sorted(by_layer.items())])
        for site, by_layer in sorted(found.items())
    ]
    lines = [Line(points, i) for i, (_, points) in enumerate(series)]
    label = "; ".join(
        f"codes of {site} that differ, from layer 0 on: {number(p[0][1])} to {number(p[-1][1])}" for site, p in series
    )
    legend = tuple((i, site) for i, (site, _) in enumerate(series))
    note = "Share of codes that the learner's own rounding would change, over the layers (x), last quarter of the run."
    return Panel("Codes that differ, by depth", legend, note, line_chart(label, lines, logarithmic=True))


def _time(record: Record) -> Panel:
    phases = [(name, key) for name, key in PHASES if record.series(key)]
    steps = sorted({x for _, key in phases for x, _ in record.series(key)})
    by_step = {key: dict(record.series(key)) for _, key in phases}
    stack = [[(x, max(0.0, by_step[key].get(x, 0.0))) for x in steps] for _, key in phases]
    totals = {name: sum(by_step[key].values()) for name, key in phases}
    whole = sum(totals.values()) or 1.0
    legend = tuple((i, f"{name} {100 * totals[name] / whole:.0f}%") for i, (name, _) in enumerate(phases))
    label = "Seconds per step, " + ", ".join(f"{name} {number(seconds)} s in total" for name, seconds in totals.items())
    return Panel("Time per phase", legend, "Seconds per step, stacked.", stacked_chart(label, stack))


def _speed(record: Record) -> Panel:
    # beside the learner, this is the wait for rollouts, not their time
    seconds = {} if record.series("time/idle_learner") else dict(record.series("time/rollout"))
    points = [(x, tokens / seconds[x]) for x, tokens in record.series("tokens/rollout") if seconds.get(x, 0.0) > 0]
    lines, window = _smoothed(points, 0)
    note = "New tokens per second of the rollout phase." + _smoothing_note(window)
    return Panel("Rollout speed", (), note, line_chart(_label("Tokens per second", points), lines))
