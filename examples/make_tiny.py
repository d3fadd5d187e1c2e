"""Make the packaged policy: a Qwen3-MoE-shaped character model, warm-started on sorting digits and stopped half way.

    python examples/make_tiny.py --out src/halfbyte/models/tiny

Supervised next-token training on the training prompts of ``arithmetic:sort`` (held-out prompts are another split), AdamW
lr 2e-3, betas (0.9, 0.98), weight decay 0.01, batch 256, load-balance loss 0.01; stopped as soon as sampled accuracy on
fresh training prompts, measured in the demo's own precision, passes ``--stop``, so that reinforcement learning has room.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from halfbyte.envs import make_env
from halfbyte.kernels import active
from halfbyte.learner.autograd import AutogradExecution
from halfbyte.learner.batch import LearnerBatch, collate
from halfbyte.learner.optimiser import Optimiser
from halfbyte.learner.parameters import Parameters
from halfbyte.models.architecture import Architecture, parameter_shapes
from halfbyte.models.checkpoint_writer import save_checkpoint
from halfbyte.models.decoder import logits as decoder_logits
from halfbyte.models.precision import precision_from
from halfbyte.models.tokenizer import Tokenizer as HouseTokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine
from halfbyte.train.collect import encode_prompt
from halfbyte.train.evaluate import evaluate

SPECIAL = ["<pad>", "<eos>"]
CHARACTERS = "0123456789+-*/=()., abcdxy?:\n"  # 30, so 32 ids with the special ones
ARCHITECTURE = Architecture(
    family="qwen3_moe",
    vocab_size=32,
    hidden_size=128,
    intermediate_size=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    max_positions=256,
    tie_embeddings=False,
    qk_norm=True,
    n_experts=8,
    experts_per_token=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    eos_ids=(1,),
    pad_id=0,
)


def write_tokenizer(folder: Path) -> None:
    """A character-level tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def initial_tensors(arch: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Normal(0, 0.02) weights as transformers initialises them (norms at one), in checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        for name, shape in parameter_shapes(arch).items()
    }


def load_balance_loss(run: AutogradExecution) -> torch.Tensor:
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, equation 4), averaged over layers: 1 when balanced."""
    losses = []
    for layer, logits in run.router_logits.items():
        experts = logits.shape[1]
        share = torch.bincount(run.routes[layer].reshape(-1), minlength=experts) / run.routes[layer].numel()
        losses.append(experts * (share * torch.softmax(logits, dim=1).mean(dim=0)).sum())
    return torch.stack(losses).mean()


def batch_of(tokenizer: HouseTokenizer, env: object, indices: range) -> LearnerBatch:
    """Prompts and their right answers with EOS."""
    precision = precision_from("bf16")
    rows = []
    for index in indices:
        prompt = env.prompt("train", index)  # type: ignore[attr-defined]
        answer = [*tokenizer.encode(str(prompt.answer)), ARCHITECTURE.eos_ids[0]]
        n = len(answer)
        rows.append(
            Trajectory(
                prompt_ids=np.array(encode_prompt(tokenizer, prompt), np.int32),
                response_ids=np.array(answer, np.int32),
                logprobs=np.zeros(n, np.float32),
                mask=np.ones(n, bool),
                versions=np.zeros(n, np.int32),
                sampling=SamplingParams(),
                precision=precision,
                finish_reason="eos",
            )
        )
    return collate(rows)


def main() -> None:
    """Train, stop, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("src/halfbyte/models/tiny"))
    parser.add_argument("--env", default="arithmetic:sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=float, default=0.38, help="sampled accuracy at which to stop")
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--precision", default="bf16", help="precision of the supervised training")
    parser.add_argument("--eval-precision", default="w4a4kv4")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # sums depend on the number of threads; with one the result can be reproduced
    scratch = Path(tempfile.mkdtemp())
    write_tokenizer(scratch)
    tokenizer, env, kernels = HouseTokenizer.from_folder(scratch), make_env(arguments.env), active()
    tensors = initial_tensors(ARCHITECTURE, arguments.seed)
    parameters = Parameters(ARCHITECTURE, tensors, precision_from(arguments.precision), kernels)
    optimiser = Optimiser(parameters.masters, lr=2e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, clip_norm=1.0)
    tables = ARCHITECTURE.rope_tables()
    probes = [env.prompt("train", 2**30 + i) for i in range(256)]
    engine = Engine(ARCHITECTURE, precision_from(arguments.eval_precision), dict(parameters.published()))
    for step in range(arguments.max_steps):
        batch = batch_of(tokenizer, env, range(step * 256, (step + 1) * 256))
        run = AutogradExecution(parameters, batch, kernels, tables)
        logits = decoder_logits(ARCHITECTURE, run, batch.ids, batch.rows)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets)
        (loss + 0.01 * load_balance_loss(run)).backward()
        optimiser.step(parameters.take_gradients(), min(1.0, (step + 1) / 20))
        parameters.refresh()
        if (step + 1) % 5 == 0 and step >= 40:
            engine.load_weights(dict(parameters.published()), version=step + 1)
            accuracy = evaluate(engine, env, tokenizer, probes, SamplingParams(max_tokens=16), samples=2)[
                "eval/accuracy"
            ]
            print(f"step {step + 1}: loss {loss.item():.4f}, sampled accuracy {accuracy:.3f}", flush=True)
            if accuracy >= arguments.stop:
                break
    save_checkpoint(arguments.out, ARCHITECTURE, dict(parameters.published()), tokenizer_from=scratch, overwrite=True)
    size = sum(f.stat().st_size for f in arguments.out.iterdir())
    print(f"saved {arguments.out}: {size / 2**20:.2f} MiB, stopped at step {step + 1}")


if __name__ == "__main__":
    main()
