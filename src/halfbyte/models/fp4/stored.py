"""FP4 weights in files: found by the names of their parts, checked, and read as codes or as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, NumericsError
from halfbyte.formats import QuantSpec, QuantTensor, to_convention
from halfbyte.models.fp4.quantisation import Quantisation
from halfbyte.models.parameter_names import site_of
from halfbyte.models.safetensors_io import SafetensorsFile

__all__ = ["CodedSource", "StoredCodes", "find_coded"]

_U8, _F32 = (torch.uint8,), (torch.float32,)
_SCALES = {"nvfp4": (torch.float8_e4m3fn, torch.uint8), "mxfp4": (torch.uint8, torch.float8_e8m0fnu)}


@dataclass(frozen=True)
class CodedSource:
    """Where the parts of one weight lie.

    Arguments:
        name: of the weight, as the architecture has it.
        shape: its logical shape [N, K].
        spec: the rule of the codes, in the convention of the file.
        exact: its values are exact in BF16.
        codes, scales, global_scale, input_scale: names of the parts; the last two may be missing.
        files: part -> the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    spec: QuantSpec
    exact: bool
    codes: str
    scales: str
    global_scale: str | None
    input_scale: str | None
    files: Mapping[str, SafetensorsFile]

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors that belong to this weight."""
        return tuple(part for part in (self.codes, self.scales, self.global_scale, self.input_scale) if part)

    @property
    def where(self) -> str:
        """The file of the codes."""
        return str(self.files[self.codes].path)

    def quantised(self) -> QuantTensor:
        """Codes, block scales and one global scale, as a multiplier.

        Raises:
            NumericsError: scales with the sign bit set or NaN, a global scale that is not positive and finite, or not a power
                of two although the rule says so.
        """
        g = torch.ones(()) if self.global_scale is None else self._part(self.global_scale).reshape(()).clone()
        if not bool(g.isfinite() & (g > 0)):
            raise NumericsError(
                f"{self.name}: the global scale is {float(g)}", where=self.where, expected="a positive finite number"
            )
        scales = self._part(self.scales).view(torch.uint8)
        q = QuantTensor(self._part(self.codes), scales, g, self.spec, self.shape).check(self.name)
        g, spec = to_convention(q.global_scale, q.spec, "multiplier")
        if self.spec.global_rounding == "power_of_two" and not float(torch.frexp(g).mantissa) == 0.5:
            raise NumericsError(
                f"{self.name}: the global scale {float(g)} is no power of two, although the rule of the codes says so",
                where=self.where,
                fix="take fp4_spec.json and weights from the same folder",
            )
        return QuantTensor(q.codes, q.scales, g, spec, self.shape)

    def read(self) -> Tensor:
        """The values [N, K]: BF16 where that is exact, else FP32."""
        return self.quantised().dequantise(torch.bfloat16 if self.exact else torch.float32)

    def input_multiplier(self, reciprocal: bool) -> float | None:
        """The stored global scale of the module's input as a multiplier, or None.

        Raises:
            NumericsError: it is not positive and finite (compressed-tensors #595, vLLM #45212: an expert that calibration
                never reached).
        """
        if self.input_scale is None:
            return None
        value = float(self._part(self.input_scale).reshape(()))
        if not 0 < value < float("inf"):
            raise NumericsError(
                f"{self.input_scale} is {value}",
                where=self.where,
                expected="a positive finite number",
                fix="calibrate again, on text that reaches this expert, or fill it from its layer",
            )
        return 1.0 / value if reciprocal else value

    def _part(self, part: str) -> Tensor:
        return self.files[part][part]


class StoredCodes(Mapping[str, QuantTensor]):
    """Weight name -> codes, read and checked on access (:meth:`CodedSource.quantised`)."""

    def __init__(self, sources: Mapping[str, CodedSource]) -> None:
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> QuantTensor:
        return self._sources[name].quantised()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def find_coded(
    quantisation: Quantisation, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, SafetensorsFile], where: str
) -> dict[str, CodedSource]:
    """The weights whose codes the files hold, with every part's dtype and shape checked.

    Arguments:
        shapes: weight name -> shape, of the architecture.
        stored: tensor name -> file.
    Raises:
        CheckpointError: parts that are missing or misfit, all of them in one message; a quantised embedding, norm or router.
    """
    style, spec = quantisation.style, quantisation.spec
    found: dict[str, CodedSource] = {}
    problems: list[str] = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        codes = module + style.codes
        if len(shape) != 2 or not name.endswith(".weight") or codes not in stored:
            continue
        if stored[codes].entries[codes].dtype.is_floating_point:  # ModelOpt's codes have the name of the plain weight
            continue
        if site_of(name) in ("embed", "norm", "router"):
            problems.append(f"{name} is quantised, and halfbyte has no FP4 {site_of(name)}")
            continue
        source = _source(quantisation, name, shape, stored)
        problems += _misfits(source, module + style.global_scale, stored)
        found[name] = source
    if problems:
        rest = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the FP4 weights cannot be used: {'; '.join(problems[:8])}{rest}",
            where=where,
            expected=f"parts as {style.name} stores {spec.format}",
            fix="take config.json and weights from the same model",
        )
    if not found:
        raise CheckpointError(
            "config.json says the weights are FP4, and no file holds any codes",
            where=where,
            expected=f"tensors named as {style.name} does, such as MODULE{style.codes}",
        )
    return found


def _source(
    quantisation: Quantisation, name: str, shape: tuple[int, ...], stored: Mapping[str, SafetensorsFile]
) -> CodedSource:
    """Where the parts of a weight should lie, checked by nothing yet."""
    style, spec, module = quantisation.style, quantisation.spec, name.removesuffix(".weight")
    nvfp4 = spec.format == "nvfp4"
    codes, scales, g, inputs = (module + s for s in (style.codes, style.scales, style.global_scale, style.input_scale))
    return CodedSource(
        name=name,
        shape=shape,
        spec=spec.replace(global_convention=style.convention) if nvfp4 else spec,
        exact=not nvfp4 or spec.global_rounding == "power_of_two",
        codes=codes,
        scales=scales,
        global_scale=g if nvfp4 else None,
        input_scale=inputs if inputs in stored else None,
        files={part: stored[part] for part in (codes, scales, g, inputs) if part in stored},
    )


def _misfits(source: CodedSource, global_scale: str, stored: Mapping[str, SafetensorsFile]) -> Iterator[str]:
    """What is wrong with the parts of a weight."""
    spec, (n, k) = source.spec, source.shape
    one: list[tuple[int, ...]] = [(), (1,)]
    wanted: list[tuple[str, tuple[torch.dtype, ...], list[tuple[int, ...]]]] = [
        (source.codes, _U8, [(n, k // 2)]),
        (source.scales, _SCALES[spec.format], [(n, k // spec.block)]),
    ]
    wanted += [(part, _F32, one) for part in (source.global_scale, source.input_scale) if part is not None]
    if k % spec.block:
        yield f"{source.name} [{n}, {k}] does not divide into blocks of {spec.block}"
    if spec.format == "mxfp4" and global_scale in stored:
        yield f"{global_scale}: MXFP4 has no global scale"
    for part, dtypes, shapes in wanted:
        if part not in stored:
            yield f"{part} is missing"
            continue
        entry = stored[part].entries[part]
        if entry.dtype not in dtypes or entry.shape not in shapes:
            yield f"{part} is {entry.dtype} {list(entry.shape)} instead of {dtypes[0]} {list(shapes[-1])}"
