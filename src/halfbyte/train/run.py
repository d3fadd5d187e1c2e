"""Set up a run from its configuration, run it, and leave a complete run folder."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from torch import Tensor

from halfbyte.config import Config, difference
from halfbyte.envs import Environment, Split
from halfbyte.errors import ConfigError, DataError
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels, active
from halfbyte.kernels.registry import for_device
from halfbyte.learner.learner import Learner
from halfbyte.learner.ranks import Ranks
from halfbyte.models.checkpoint_writer import save_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.objective import delimiter_flags
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.collect import encode_prompt
from halfbyte.train.device import device_of
from halfbyte.train.flight import Flight, load_flight
from halfbyte.train.opening import open_rollouts
from halfbyte.train.ranks import folder_of, open_weights, ranks_of, sharding
from halfbyte.train.run_folder import RunFolder, environment
from halfbyte.train.setting import Setting, learner_precision, open_setting
from halfbyte.train.state import Progress, latest_checkpoint, load_state
from halfbyte.train.tracker import make_tracker
from halfbyte.train.trainer import Trainer

__all__ = ["run"]

#: keys that may differ between a run and its resumption: they change no number
FREE = (
    "train.out",
    "train.tracker",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.save_trajectories_every",
    "alignment.memory_mb",
    "train.saved_trajectories",
    "rollout.backend",
    "rollout.workers",
    "rollout.resources",
    "rollout.url",
    "rollout.python",
    "rollout.server_arguments",
    "rollout.store",
    "rollout.verify_every",
    "learner.compile",
    "learner.rank_timeout",
)
#: finite data sets up to this size are checked before the first step
CHECKED_PROMPTS = 20_000


def run(config: Config, *, resume: bool = False, overwrite: bool = False, ray_address: str | None = None) -> int:
    """Train as ``config`` says. Returns 0 when all steps are done, 130 when stopped (a checkpoint is written).

    Everything is opened and checked before the run folder is touched: a run that cannot start leaves it as it was, and an
    existing run is replaced (``overwrite``) only by one that starts.

    Arguments:
        ray_address: the cluster of ``rollout.backend = "ray"``; None takes ``RAY_ADDRESS``, or starts Ray on this machine.

    Raises:
        UserError: anything the user can mend; the run folder keeps what it had.
    """
    with ranks_of(config) as ranks:
        return _run(config, ranks, resume=resume, overwrite=overwrite, ray_address=ray_address)


def _open_learner(config: Config, ranks: Ranks, setting: Setting, kernels: Kernels) -> Learner:
    device, arch = device_of(config), setting.arch
    segmented = config.objective.segmenter == "delimiter"
    return Learner(
        arch,
        setting.tensors,
        precision=learner_precision(config),
        rollout_precision=setting.precision,
        config=config.learner,
        objective_config=config.objective,
        kernels=for_device(device.type, config.learner.compile),
        device=device,
        total_steps=config.train.steps,
        seed=config.train.seed,
        max_response_tokens=config.rollout.max_tokens,
        n_positions=setting.longest,
        alignment=setting.alignment,
        pack=lambda tensors: RolloutWeights.pack(
            arch, setting.precision, tensors, kernels, version=0, n_positions=setting.longest
        ),
        delimiters=_delimiters(setting.tokenizer, arch.vocab_size) if segmented else None,
        **sharding(ranks),
    )


def _resumed(config: Config, checkpoint: Path | None, learner: Learner) -> tuple[Progress, Flight]:
    """Where a checkpoint left off, with the learner as it was; the beginning without one."""
    if checkpoint is None:
        return Progress(), Flight()
    progress = load_state(checkpoint, learner)
    if progress.step > config.train.steps:
        raise ConfigError(
            f"the run has done {progress.step} steps", where="train.steps", expected=f"at least {progress.step}"
        )
    return progress, load_flight(checkpoint, progress.in_flight)


def _run(config: Config, ranks: Ranks, *, resume: bool, overwrite: bool, ray_address: str | None) -> int:
    folder = folder_of(Path(config.train.out), ranks)
    _refuse_to_mix(folder, config, resume=resume, overwrite=overwrite)
    kernels, counted = active(), config.train.delta_precision
    delta_precision = None if counted is None else precision_from(counted)
    setting = open_setting(config)
    learner = _open_learner(config, ranks, setting, kernels)
    saved = latest_checkpoint(folder.path / "checkpoints") if resume else None
    progress, flight = _resumed(config, saved, learner)
    tensors = dict(learner.parameters.published()) | learner.parameters.published_scales()
    rollouts = open_rollouts(
        config,
        setting,
        ranks,
        kernels,
        tensors,
        version=progress.version,
        guidance=setting.guidance if progress.guidance is None else Plan.from_json(progress.guidance),
        folder=folder.path,
        ray_address=ray_address,
    )
    with closing(rollouts):
        _check_prompts(setting.environment, setting.tokenizer, setting.prompt_limit)
        tracker = make_tracker(
            config.train.tracker if ranks.rank == 0 else None,
            project="halfbyte",
            name=folder.path.name,
            config=config.to_json(),
        )
        with folder.locked():
            if overwrite and ranks.rank == 0:
                _clear(folder)
            folder.create()
            folder.rewind(progress.step if saved is not None else -1)
            folder.write_json("config.json", config.to_json())
            folder.write_json("environment.json", environment(config.train.seed))
            weights = open_weights(folder.path / "refit", rollouts, learner, tensors, progress.version, delta_precision)
            del tensors
            trainer = Trainer(
                config,
                folder,
                rollouts,
                learner,
                setting.environment,
                setting.tokenizer,
                tracker,
                weights,
                progress,
                setting.guidance,
                flight,
            )
            with _graceful_stop(trainer):
                complete = trainer.run()
            tracker.finish()
            if not complete:
                return 130
            published = dict(learner.parameters.published())  # on all ranks: it gathers
            if ranks.rank == 0:
                model = folder.path / "model"
                save_checkpoint(model, setting.arch, published, tokenizer_from=setting.tokenizer_path, overwrite=True)
                folder.write_json("summary.json", trainer.summary())
    return 0


def _refuse_to_mix(folder: RunFolder, config: Config, *, resume: bool, overwrite: bool) -> None:
    """An existing run is resumed with its own configuration, overwritten on request, or left alone."""
    old = folder.read_json("config.json")
    where = str(folder.path)
    if resume:
        if old is None:
            raise ConfigError("there is no run to resume", where=where, expected="a run folder with config.json")
        # a constant schedule does not depend on the number of steps, so such a run may go on for longer
        free = (*FREE, "train.steps") if config.learner.schedule == "constant" else FREE
        changed = [key for key in difference(old, config.to_json()) if key.split(":")[0].strip() not in free]
        if changed:
            raise ConfigError(
                f"the configuration differs from the run's: {'; '.join(changed)}",
                where=where,
                expected="the configuration the run was started with",
                fix="resume without changes, or start a new run with another --out",
            )
    elif old is not None and not overwrite:
        raise ConfigError(
            "the run folder already holds a run",
            where=where,
            fix="--resume goes on with it, --overwrite replaces it, --out names another folder",
        )


def _delimiters(tokenizer: Tokenizer, size: int) -> Tensor:
    """[V] bool: ids whose text ends a line or a sentence; ids without a text end nothing."""
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    return delimiter_flags(texts)


def _check_prompts(env: Environment, tokenizer: Tokenizer, limit: int) -> None:
    """Encode every prompt of a finite data set, so that a bad one is found before the first step and not in mid-run."""
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        size = env.size(split)
        if size == 0:
            raise DataError(f"the environment has no {split} prompts", where=env.name, expected="at least one")
        for index in range(min(size or 1, CHECKED_PROMPTS)):
            encode_prompt(tokenizer, env.prompt(split, index), limit)


def _clear(folder: RunFolder) -> None:
    """Remove what a run writes, and nothing else that may lie in the folder."""
    for name in ("checkpoints", "trajectories", "model", "refit"):
        shutil.rmtree(folder.path / name, ignore_errors=True)
    for name in (
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "vllm.log",
        "workers.jsonl",
    ):
        (folder.path / name).unlink(missing_ok=True)


@contextmanager
def _graceful_stop(trainer: Trainer) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after the current step; a second one interrupts at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if trainer.stop:
            raise KeyboardInterrupt
        trainer.stop = True

    try:
        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the host program handles signals
        yield
        return
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
