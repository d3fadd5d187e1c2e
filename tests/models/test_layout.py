"""Stacked parameters and their checkpoint names, against transformers' own modules and files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.errors import CheckpointError, ShapeError
from halfbyte.models import Architecture, ParameterLayout, checkpoint_views, from_checkpoint, parameter_shapes
from halfbyte.models.safetensors_io import SafetensorsFile


def architecture(oracle: Any) -> Architecture:
    return Architecture.from_hf(oracle.model.config.to_dict())


def test_parameters_are_those_of_transformers_in_memory(oracle: Any) -> None:
    layout = ParameterLayout(architecture(oracle))
    theirs = {name: parameter.detach() for name, parameter in oracle.model.named_parameters()}
    assert {name: tuple(p.shape) for name, p in theirs.items()} == layout.shapes
    ours = layout.from_checkpoint(SafetensorsFile(oracle.folder / "model.safetensors"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_views_are_the_tensors_of_transformers_files(oracle: Any) -> None:
    a = architecture(oracle)
    stored = SafetensorsFile(oracle.folder / "model.safetensors")
    views = dict(checkpoint_views(dict(oracle.model.named_parameters()), a))
    assert list(views) == list(parameter_shapes(a))
    assert views.keys() == set(stored)
    for name, view in views.items():
        assert torch.equal(view, stored[name]), name
        assert not view.requires_grad


def test_views_share_memory_with_the_parameters(moe: Any) -> None:
    a = architecture(moe)
    layout = ParameterLayout(a)
    parameters = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    bytes_of = {p.untyped_storage().data_ptr() for p in parameters.values()}
    for number, (_, view) in enumerate(layout.checkpoint_views(parameters), start=1):
        assert view.untyped_storage().data_ptr() in bytes_of
        view.fill_(number)
    # every element of every parameter belongs to exactly one view, in the order of the names
    flat = torch.cat([p.flatten() for p in parameters.values()])
    counts = {n: torch.Size(s).numel() for n, s in enumerate(parameter_shapes(a).values(), start=1)}
    found = dict(zip(*(x.tolist() for x in flat.unique(return_counts=True)), strict=True))
    assert found == counts
    gate_up = parameters["model.layers.1.mlp.experts.gate_up_proj"]
    width = a.moe_intermediate_size
    assert float(gate_up[2, 0, 0]) < float(gate_up[2, width, 0])
    assert gate_up[2, :width].unique().numel() == gate_up[2, width:].unique().numel() == 1


def test_from_checkpoint_owns_its_memory_and_casts(moe: Any) -> None:
    stored = dict(SafetensorsFile(moe.folder / "model.safetensors"))
    parameters = from_checkpoint(stored, architecture(moe), dtype=torch.bfloat16)
    norm, source = parameters["model.norm.weight"], stored["model.norm.weight"]
    assert norm.dtype == torch.bfloat16
    assert torch.equal(norm, source.bfloat16())
    same = from_checkpoint(stored, architecture(moe))["model.norm.weight"]
    assert same.data_ptr() != source.data_ptr()
    assert all(p.is_contiguous() for p in parameters.values())


def test_views_of_gradients_have_the_checkpoint_names_too(moe: Any) -> None:
    layout = ParameterLayout(architecture(moe))
    parameters = {name: torch.randn(shape, requires_grad=True) for name, shape in layout.shapes.items()}
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    loss = (parameters["model.layers.2.mlp.experts.gate_up_proj"][1, 24:] * 3).sum()
    loss.backward()
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in parameters.items()}
    nonzero = [n for n, view in layout.checkpoint_views(gradients) if bool(view.any())]
    assert nonzero == [name]
    assert torch.equal(layout.view(gradients, name), torch.full((24, 32), 3.0))


def test_what_does_not_fit_is_named(moe: Any) -> None:
    a = architecture(moe)
    stored = dict(SafetensorsFile(moe.folder / "model.safetensors"))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    with pytest.raises(ShapeError, match=r"experts\.3\.down_proj"):
        from_checkpoint({**stored, name: stored[name].t()}, a)
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj"):
        from_checkpoint({n: t for n, t in stored.items() if n != name}, a)
    with pytest.raises(CheckpointError, match="lm_head"):
        ParameterLayout(replace(a, tie_embeddings=True)).view(stored, "lm_head.weight")
