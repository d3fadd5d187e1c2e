"""Tests of code for a GPU: the same body runs on the CPU (slow, or in an interpreter) and, with ``-m gpu``, on CUDA."""

from __future__ import annotations

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)
