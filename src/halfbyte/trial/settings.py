"""``trial.toml``: the settings of a trial. Unknown keys are errors; limits have no convenient defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from halfbyte.config.problems import Origins, explain
from halfbyte.config.sections import Count, Natural, NotNegative, Positive, Section, Share, Text
from halfbyte.config.settings import read_file
from halfbyte.errors import ConfigError
from halfbyte.trial.records import Arm

__all__ = ["Cost", "Data", "Limits", "Run", "Sampling", "Settings", "Target", "TrialSection", "load_settings"]

Benefit = Literal["peak_memory", "cost_per_passed", "throughput"]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
#: Body fields that the trial sets itself, so [sampling] extra may not.
RESERVED = {"model", "messages", "prompt", "stream", "stream_options", "seed", "temperature", "top_p", "max_tokens",
            "stop", "tools", "n"}  # fmt: skip


class TrialSection(Section):
    """What the trial is.

    Arguments:
        name: for the report.
        tasks: file of tasks, relative to trial.toml.
    """

    name: Text = "trial"
    tasks: Text = "tasks.jsonl"


class Target(Section):
    """A server to be tried: one that runs already (``url``), or one that the trial starts (``serve``).

    Arguments:
        url: base address with the ``/v1``.
        serve: command and arguments; ``{port}`` is replaced by a free port. ``halfbyte`` is this installation's.
        environment: variables of the started server.
        model: name that requests ask for; None for the only one that the server lists.
        api_key_env: variable that holds the bearer token; the token itself never enters a file.
        artefact: the model's folder, for the preflight; None where it is not on this machine.
        licence: its licence file; None looks for LICENSE* in the artefact.
        precision: how the weights are held, in words (``bf16``, ``w4a4kv4``); a preset's name is also checked.
        kv_memory_mb: MiB of its KV pool, for the preflight; replaces ``{kv_memory_mb}`` in ``serve``. Both arms alike.
        start_timeout: seconds until a started server must be healthy.
    """

    url: Text | None = None
    serve: tuple[Text, ...] | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    model: Text | None = None
    api_key_env: Text | None = None
    artefact: Text | None = None
    licence: Text | None = None
    precision: Text | None = None
    kv_memory_mb: Positive | None = None
    start_timeout: Positive = 600.0

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"url takes an address such as http://127.0.0.1:8000/v1, got {url!r}")
        return None if url is None else url.rstrip("/")

    @model_validator(mode="after")
    def _one_way(self) -> Target:
        if (self.url is None) == (self.serve is None):
            raise ValueError("needs url (a server that runs) or serve (a command that starts one), not both")
        if self.serve is not None and not any("{port}" in part for part in self.serve):
            raise ValueError("serve needs {port} where the command takes its port")
        return self

    @property
    def started(self) -> bool:
        """The trial starts and stops this server."""
        return self.serve is not None


class Sampling(Section):
    """Sampling, the same for both arms.

    Arguments:
        seed: of the first repeat; repeat r of a task is sent seed + r, in both arms.
        extra: further fields of the request body.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Count = 256
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop: tuple[Text, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(extra.keys() & RESERVED):
            raise ValueError(f"extra may not set {', '.join(ours)}: the trial does")
        return extra


class Run(Section):
    """How requests are sent.

    Arguments:
        api: ``chat`` sends messages to /chat/completions; ``completions`` sends plain prompts to /completions.
        repeats: of every task, in each arm.
        concurrency: requests in flight.
        block_tasks: tasks in one segment of a block ABBA; 0 cuts them so that there are at least 8 blocks.
        exclusive: only one server fits: it is stopped before the other starts.
        prefix_cache: ``off``: a reported cache hit makes the trial invalid; ``reset``: emptied before every segment, and
            arms must then report the same hits; ``measure``: left alone, hit shares are reported.
        warmup: unscored requests after a start, with a prompt that no task has.
        timeout: seconds of one request, to its end.
        retries: further tries after a failure. None by default: a failure is a result.
        stream: stream responses, which times the first token.
        allow_template_change: accept that arms count different prompt tokens for the same task.
    """

    api: Literal["chat", "completions"] = "chat"
    repeats: Count = 1
    concurrency: Count = 4
    block_tasks: Natural = 0
    exclusive: bool = False
    prefix_cache: Literal["off", "reset", "measure"] = "off"
    warmup: Natural = 2
    timeout: Positive = 120.0
    retries: Annotated[int, Field(ge=0, le=5)] = 0
    stream: bool = True
    allow_template_change: bool = False


class Limits(Section):
    """What the candidate must hold, chosen before the run.

    Arguments:
        margin: the pass rate may be lower by less than this, as a fraction (.05 is 5 points).
        alpha: one-sided error of every bound.
        power: that `plan` sizes the trial for.
        critical: critical tasks that may newly fail.
        failure_rate: largest share of failed requests of the candidate.
        latency_p50_ratio, latency_p95_ratio: upper bounds on candidate / baseline; None does not ask.
        length_ratio: upper bound on the ratio of mean response tokens; None does not ask.
        tool_parse_drop: largest drop of the share of tool tasks whose calls parse; None does not ask.
        benefit: the one metric the change is for.
        benefit_min: fraction by which its lower bound must improve (.3: 30% less memory, or 30% more throughput).
        latency_limit: seconds at p95 within which throughput counts, for benefit = throughput.
    """

    margin: OpenShare
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    power: OpenShare = 0.8
    critical: Natural = 0
    failure_rate: Share = 0.01
    latency_p50_ratio: Positive | None = None
    latency_p95_ratio: Positive | None = None
    length_ratio: Positive | None = None
    tool_parse_drop: Share | None = None
    benefit: Benefit
    benefit_min: NotNegative
    latency_limit: Positive | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Limits:
        if self.benefit != "throughput" and self.benefit_min >= 1:
            raise ValueError(f"benefit_min = {self.benefit_min:g} of {self.benefit} would be more than all of it")
        if self.benefit == "throughput" and self.latency_limit is None:
            raise ValueError("benefit = throughput needs latency_limit: throughput without one says nothing")
        return self


class Cost(Section):
    """Prices, for cost per request and the break-even day.

    Arguments:
        price_by: ``machine``: an arm is charged for all of the machine; ``memory``: for the share of ``machine_memory_gib``
            that its peak takes, where others use the rest.
        utilisation: share of the time in which the machine serves this load.
        setup_hours, engineer_per_hour: once, for the candidate.
        operating_per_month: what the candidate costs to look after beyond the baseline.
        requests_per_month, horizon_months: over which set-up is spread.
    """

    currency: Text = "USD"
    machine_per_hour: NotNegative = 0.0
    price_by: Literal["machine", "memory"] = "machine"
    machine_memory_gib: Positive | None = None
    utilisation: Annotated[float, Field(gt=0, le=1)] = 1.0
    setup_hours: NotNegative = 0.0
    engineer_per_hour: NotNegative = 0.0
    operating_per_month: NotNegative = 0.0
    requests_per_month: NotNegative = 0.0
    horizon_months: Positive = 12.0

    @model_validator(mode="after")
    def _fits_together(self) -> Cost:
        if self.price_by == "memory" and self.machine_memory_gib is None:
            raise ValueError("price_by = memory needs machine_memory_gib")
        return self


class Data(Section):
    """What the candidate was tuned or calibrated on, to be kept apart from the tasks.

    Arguments:
        tuning: files, relative to trial.toml: JSON lines (every text in them counts) or plain text.
        ngram: words of an overlapping run that counts as seen.
    """

    tuning: tuple[Text, ...] = ()
    ngram: Annotated[int, Field(ge=5)] = 13


class Settings(Section):
    """All of trial.toml."""

    trial: TrialSection = Field(default_factory=TrialSection)
    baseline: Target
    candidate: Target
    sampling: Sampling = Field(default_factory=Sampling)
    run: Run = Field(default_factory=Run)
    limits: Limits
    cost: Cost = Field(default_factory=Cost)
    data: Data = Field(default_factory=Data)

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.limits.benefit == "cost_per_passed" and self.cost.machine_per_hour == 0:
            raise ValueError("limits.benefit = cost_per_passed needs cost.machine_per_hour")
        if self.run.exclusive and not (self.baseline.started and self.candidate.started):
            raise ValueError("run.exclusive needs both servers started by the trial (serve), to stop and start them")
        return self

    def target(self, arm: Arm) -> Target:
        """The target of an arm."""
        return self.baseline if arm == "baseline" else self.candidate

    def to_json(self) -> dict[str, Any]:
        """Every key with its value, JSON types only."""
        return self.model_dump(mode="json")


def load_settings(path: Path) -> Settings:
    """The settings in ``path``.

    Raises:
        ConfigError: no such file, not TOML, or naming every key that is unknown or has a value that cannot be used.
    """
    data = read_file(path)
    origins = Origins(str(path))
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a value has no JSON form: {error}", where=str(path)) from error
    try:
        return Settings.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise explain(error, Settings, origins) from error
