"""Accuracy of a trained policy in a precision it need not have been trained in: what a server in that precision would give."""

from __future__ import annotations

from pathlib import Path

from halfbyte.config import Config
from halfbyte.envs import make_env
from halfbyte.kernels import active
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.train.evaluate import evaluate

__all__ = ["evaluate_deployed"]


def evaluate_deployed(model: Path, config: Config, precision: str) -> dict[str, float]:
    """``eval/...`` metrics of the model folder in ``precision``: prompts, samples and random numbers of the run's own evaluation.

    Raises:
        UserError: the model cannot be opened, or the precision is unknown.
    """
    checkpoint, tokenizer = open_model(str(model))
    arch, rollout = checkpoint.architecture, config.rollout
    options = dict(config.env.options)
    if config.env.reward is not None:
        options["reward"] = config.env.reward
    env = make_env(config.env.name, **options)
    limit = min(config.env.max_prompt_tokens, arch.max_positions - rollout.max_tokens)
    engine = Engine(
        arch,
        precision_from(precision),
        dict(checkpoint.tensors),
        detokeniser=tokenizer,
        options=EngineOptions(
            max_batch_tokens=rollout.max_batch_tokens,
            max_sequences=rollout.max_sequences,
            kv_memory_mb=rollout.kv_memory_mb,
            page_size=rollout.page_size,
            max_length=arch.max_positions if env.multi_turn else limit + rollout.max_tokens,
        ),
        kernels=active(),
        version=0,
    )
    size = env.size("eval")
    count = config.eval.prompts if size is None else min(config.eval.prompts, size)
    sampling = SamplingParams(
        temperature=config.eval.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=tuple(rollout.stop),
        seed=config.train.seed,
    )
    prompts = [env.prompt("eval", i) for i in range(count)]
    return evaluate(engine, env, tokenizer, prompts, sampling, samples=config.eval.samples, max_prompt_tokens=limit)
