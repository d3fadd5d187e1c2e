"""TRIAGE inside TRL: the packaged policy learns to sort under TRL's GRPO trainer, sampled in FP4 by halfbyte's engine.

    pip install 'trl>=1.16' 'halfbyte[transformers]'
    python examples/trl_triage.py --steps 40 --correction triage

TRL holds the model (BF16 or FP32, transformers' kernels) and the optimiser; every rollout runs in ``--precision`` on weights that
are handed over as an ordinary checkpoint. Two updates are made on each rollout.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from halfbyte.envs import make_env
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.open_model import model_folder
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.objective import Correction, make_correction, make_segmenter
from halfbyte.objective.trl import correct_grpo_batch
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Request, request_key


class CorrectedTrainer(GRPOTrainer):
    """GRPO with a halfbyte correction; ``mismatch`` collects its metrics, one entry a rollout."""

    correction: Correction = make_correction("none")
    segmenter = make_segmenter("fixed")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        done = correct_grpo_batch(batch, self.correction, segmenter=self.segmenter)
        self.correction = done.correction
        self.mismatch = [*getattr(self, "mismatch", []), done.metrics]
        return batch | {"advantages": done.advantages}


class FourBitRollout:
    """TRL's ``rollout_func``: completions and their log-probs from halfbyte's engine, on the trainer's present weights."""

    def __init__(self, precision: str, max_tokens: int, seed: int) -> None:
        self.precision, self.max_tokens, self.seed = precision_from(precision), max_tokens, seed
        self.calls = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """One completion for each prompt (TRL repeats a prompt for each sample of its group)."""
        with tempfile.TemporaryDirectory() as folder:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
            checkpoint = load_checkpoint(Path(folder))
        engine = Engine(checkpoint.architecture, self.precision, dict(checkpoint.tensors))
        sampling = SamplingParams(max_tokens=self.max_tokens, seed=self.seed)
        ids = [tuple(trainer.processing_class(prompt)["input_ids"]) for prompt in prompts]
        requests = [Request(p, sampling, key=request_key("trl", self.calls, i)) for i, p in enumerate(ids)]
        self.calls += 1
        found = engine.generate(requests)
        return {
            "prompt_ids": [list(p) for p in ids],
            "completion_ids": [t.response_ids.tolist() for t in found],
            "logprobs": [t.logprobs.tolist() for t in found],
        }


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer."""
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


def train(steps: int, correction: str, precision: str, out: str, *, seed: int = 0, **settings: Any) -> CorrectedTrainer:
    """Train the packaged policy; returns the trainer with its log history."""
    folder = model_folder("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    environment = make_env("arithmetic:sort")
    prompts = [environment.prompt("train", i) for i in range(4096)]
    rows = {"prompt": [p.text for p in prompts], "answer": [p.answer for p in prompts]}
    arguments = GRPOConfig(
        **{
            "output_dir": out,
            "max_steps": steps,
            "per_device_train_batch_size": 128,
            "steps_per_generation": 2,  # two updates a rollout, so TRL keeps the log-probs of before the first
            "num_generations": 8,
            "max_completion_length": 16,
            "learning_rate": 3e-4,
            "adam_beta2": 0.95,
            "loss_type": "bnpo",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "seed": seed,
            "disable_tqdm": True,
            **settings,
        }
    )
    trainer = CorrectedTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=exact,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        rollout_func=FourBitRollout(precision, 16, seed),
    )
    trainer.correction = make_correction(correction)
    trainer.train()
    return trainer


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--correction", default="triage")
    parser.add_argument("--precision", default="w4a4kv4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/trl")
    chosen = parser.parse_args()
    trainer = train(chosen.steps, chosen.correction, chosen.precision, chosen.out, seed=chosen.seed)
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward of the first rollout {rewards[0]:.3f}, of the last {rewards[-1]:.3f}")
    print({key: round(value, 5) for key, value in trainer.mismatch[-1].items()})


if __name__ == "__main__":
    main()
