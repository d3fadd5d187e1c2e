"""The sections of a run's configuration: keys, types, bounds and defaults.

The defaults are the learning recipe of the demo (issue #2: 64 prompts x 8 samples at temperature 1, AdamW with beta2
.95, 3e-4 after 5 warm-up steps falling linearly, clipping at 1, 300 steps).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Many = Annotated[int, Field(ge=1, le=10**6)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
PrecisionChoice = Text | dict[str, Any]


class Section(BaseModel):
    """What all sections share: unknown keys, NaN and infinity are errors, also on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy to start from.

    Arguments:
        path: a model folder, or ``tiny`` for the policy in the package.
    """

    path: Text = "tiny"


class EnvConfig(Section):
    """Tasks and rewards.

    Arguments:
        name: ``arithmetic:<task>``, ``agent:<task>``, ``reasoning_gym:<dataset>``, ``jsonl:<path>`` or
            ``python:<module>:<function>``.
        options: passed to that environment, which checks them.
        reward: ``module:function`` in place of the environment's own reward.
        max_prompt_tokens: longer prompts are an error.
    """

    name: Text = "arithmetic:sort"
    options: dict[str, Any] = Field(default_factory=dict)
    reward: Text | None = None
    max_prompt_tokens: Count = 1024


class RolloutConfig(Section):
    """Sampling for training, and the engine's budgets.

    Arguments:
        temperature: 0.001 to 1000; greedy samples of a group would all be alike.
        top_k, top_p, min_p: filters; 0, 1 and 0 switch them off.
        max_tokens: response tokens of a turn.
        stop: texts that end a response.
        max_batch_tokens: tokens of one forward pass.
        kv_memory_mb: KV pages, MiB.
        page_size: tokens a page, a multiple of 16.
        max_sequences: samples in flight.
        backend: where episodes are played: in this process, by workers on Ray, or by a vLLM server.
        url: address of a running vLLM server; without it one is started.
        python: interpreter of the environment that holds vLLM, for a server of our own.
        server_arguments: more of such a server's command line.
        verify_every: compare the vLLM server with a fresh load after so many updates; 0 never does.
        workers: of a backend that has any.
        resources: what each worker reserves, by name (``CPU``, ``GPU``, names of your own).
        store: how workers on Ray read new weights: from the run ``folder``, on a file system that all share, or by ``http`` from
            the run itself; ``auto`` is ``folder`` where all workers are on this machine. For a vLLM server: the address of the
            run's refit store as the server reaches it, or ``auto`` for its folder.
        staleness: k: tokens may come from weights up to k updates older than those they train; 0 is synchronous.
        overlap: generate beside the learner. Without it the k batches ahead are generated between the steps.
        in_flight: new weights reach samples in flight at their next token; otherwise the weights that begin a batch finish it.
        partial: a step takes the groups that are complete first, longer ones go on; no token gets older than ``staleness``.
    """

    prompts_per_step: Many = 64
    samples_per_prompt: Many = 8
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    max_tokens: Count = 16
    stop: tuple[Text, ...] = ()
    max_batch_tokens: Count = 4096
    kv_memory_mb: Positive = 256.0
    page_size: Annotated[int, Field(ge=16, multiple_of=16)] = 16
    max_sequences: Count = 1024
    backend: Literal["local", "ray", "vllm"] = "local"
    url: Text | None = None
    python: Text | None = None
    server_arguments: tuple[Text, ...] = ()
    verify_every: Natural = 1
    workers: Count = 1
    resources: dict[Text, NotNegative] = Field(default_factory=dict)
    store: Text = "auto"
    staleness: Natural = 0
    overlap: bool = False
    in_flight: bool = False
    partial: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutConfig:
        if self.in_flight and not self.overlap:
            raise ValueError("in_flight needs overlap = true: without it no sample is in flight while weights change")
        if self.backend == "vllm" and (self.url is None) == (self.python is None):
            raise ValueError('backend = "vllm" needs url (a running server) or python (to start one)')
        if self.backend == "vllm" and self.overlap:
            raise ValueError('overlap needs backend = "local": a vLLM server plays a batch when it is submitted')
        if self.backend != "vllm" and (self.url or self.python or self.server_arguments):
            raise ValueError('url, python and server_arguments need backend = "vllm"')
        if self.backend == "ray" and self.store not in ("auto", "folder", "http"):
            raise ValueError('store of backend = "ray" is auto, folder or http')
        if self.partial and not self.in_flight:
            raise ValueError("partial needs in_flight = true: samples that are carried over meet new weights")
        return self


class LearnerConfig(Section):
    """The update.

    Arguments:
        execution: ``emulated``: framework products of operands rounded at the rollout's sites; ``native``: the rollout's own
            kernels, so that the gap is exactly 0.
        require_parity: stop, naming the first layer that differs, when the gap is not 0 (``native`` only).
        products: what the framework multiplies in: ``fp32``, or ``bf16`` with FP32 sums and BF16 results, as on GPUs
            (logits and router stay FP32).
        precision: ``same`` as the rollout's, or a precision of its own.
        lr: peak rate; 0 leaves the weights alone (a control).
        schedule: after the warm-up: linear to 0, cosine to 0, or constant.
        clip_norm: bound on the global gradient norm; None for none.
        epochs, minibatches: passes over a rollout, and updates a pass.
        activation_memory_mb: the micro-batch is as large as activations of this many MiB allow.
        max_tokens_per_microbatch: sets its size in tokens instead.
        router_replay: use the rollout's expert choices.
        device: of the learner; ``auto`` is ``cuda`` where there is one (docs/gpu.md).
        compile: rounding passes through ``torch.compile``: ``auto`` on a GPU, ``on`` on the CPU too, or ``off``; no bit changes.
        rank_timeout: seconds that a rank waits for the others, where ``torchrun`` started several (docs/fsdp.md).
    """

    execution: Literal["emulated", "native"] = "emulated"
    require_parity: bool = False
    products: Literal["fp32", "bf16"] = "fp32"
    precision: PrecisionChoice = "same"
    lr: NotNegative = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    schedule: Literal["linear", "constant", "cosine"] = "linear"
    warmup_steps: Natural = 5
    clip_norm: Positive | None = 1.0
    epochs: Count = 1
    minibatches: Count = 1
    activation_memory_mb: Positive = 256.0
    max_tokens_per_microbatch: Count | None = None
    packing: bool = True
    activation_checkpointing: bool = False
    router_replay: bool = True
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    compile: Literal["off", "auto", "on"] = "auto"
    rank_timeout: Positive = 600.0

    @model_validator(mode="after")
    def _can_have_parity(self) -> LearnerConfig:
        if self.execution == "native" and self.device != "cpu":
            raise ValueError(
                'execution = "native" runs the rollout\'s kernels, which are for the CPU: set device = "cpu"'
            )
        if self.execution == "native" and self.compile == "on":
            raise ValueError('execution = "native" runs the rollout\'s kernels: there is nothing to compile')
        if self.require_parity and self.execution != "native":
            raise ValueError('require_parity needs execution = "native": other products differ in the last bits')
        return self

    @field_validator("precision")
    @classmethod
    def _has_preset(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(value, dict) and value.get("preset") == "same":
            raise ValueError("overrides need a preset by name to start from: set learner.precision.preset too")
        return value


class AlignmentConfig(Section):
    """How the rollout's rounding guides the learner's (TRACE). It acts where both sides round to FP4.

    Arguments:
        method: ``trace``, ``scale_only``, ``hard_replay``, ``shift(t)`` with t from 0 to 1, or ``none``.
        bits: payload of a number: 1 (parity), 2 or 4 (the code).
        sites: what is guided: ``expert_in``, ``expert_mid``, ``linear_in``, ``k``, ``v``.
        layers: ``all``, ``deep:0.5``, ``first:0.5``, a list such as ``2,3``, or ``auto``: the first step records
            everything, and what helps most within ``bytes_per_token`` stays.
        bytes_per_token: budget of ``auto``.
        memory_mb: guidance of finished samples beyond this many MiB is kept in a file.
        max_version_lag: older guidance, in weight versions, is not used.
        measured_tokens: tokens a step whose own rounding is compared with the rollout's, for the metrics.
    """

    method: Text = "trace"
    bits: Literal[1, 2, 4] = 1
    sites: tuple[Literal["expert_in", "expert_mid", "linear_in", "k", "v"], ...] = (
        "expert_in",
        "expert_mid",
        "linear_in",
        "k",
        "v",
    )
    layers: Text = "all"
    bytes_per_token: Positive | None = None
    memory_mb: NotNegative = 256.0
    max_version_lag: Natural = 0
    measured_tokens: Natural = 64


class ObjectiveConfig(Section):
    """The loss; see ``halfbyte.objective`` for what each choice means.

    Arguments:
        eps_low, eps_high: the ratio is clipped to [1 - eps_low, 1 + eps_high]; a higher eps_high is "clip-higher".
        dual_clip: bound on the ratio of negative advantages, above 1; None for none.
        proximal: what the ratio is taken against: the learner at the start of the step, or the rollout.
        kl_coef: factor of the KL to the initial policy; 0 keeps no reference.
        correction, correction_options: a rule of ``halfbyte.objective.corrections`` and its parameters.
        segmenter, segmenter_options: how responses are cut for the diagnosis (``halfbyte.objective.segments``).
        count_rejected: tokens that a correction rejects stay in the denominators.
        skip_zero_advantage: leave samples without advantage out of the passes (not out of the denominators).
    """

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    eps_low: Share = 0.2
    eps_high: NotNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    ratio: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    proximal: Literal["learner", "rollout"] = "learner"
    denominator: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    kl_coef: NotNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    correction: Text = "none"
    correction_options: dict[str, Any] = Field(default_factory=dict)
    segmenter: Text = "change_point"
    segmenter_options: dict[str, Any] = Field(default_factory=dict)
    count_rejected: bool = True
    skip_zero_advantage: bool = True


class EvalConfig(Section):
    """Accuracy on held-out prompts, before and after training.

    Arguments:
        prompts, samples: held-out prompts, and responses to each.
        every: steps between evaluations during training; 0 for none.
        temperature: 0 is greedy; otherwise 0.001 to 1000.
    """

    prompts: Many = 256
    samples: Many = 1
    every: Natural = 0
    temperature: Annotated[float, Field(ge=0, le=0)] | Temperature = 1.0


class TrainConfig(Section):
    """The run.

    Arguments:
        seed: of sampling and of the order of prompts and mini-batches.
        out: run folder.
        checkpoint_every, save_trajectories_every: steps; 0 for never (a checkpoint is written at the end anyway).
        saved_trajectories: samples of such a step that are saved, from the first on.
        keep_checkpoints: older ones are removed.
        tracker: also send metrics to trackio or wandb.
        threads: torch's threads; None leaves it to the thread policy of the command line.
        delta_precision: where the rollout holds no FP4 weights, count the FP4 codes that an update changes in this one.
    """

    steps: Count = 300
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    out: Text = "runs/train"
    checkpoint_every: Natural = 50
    keep_checkpoints: Count = 2
    tracker: Literal["trackio", "wandb"] | None = None
    save_trajectories_every: Natural = 50
    saved_trajectories: Count = 16
    threads: Count | None = None
    delta_precision: Text | None = None
