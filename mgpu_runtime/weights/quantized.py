"""How a file holds quantised weights, told from names, dtypes and shapes.

Formats (published by Lightricks and by ComfyUI, whose files differ in the names of the scales only):
fp8: `X.weight` in e4m3 or e5m2, in a file without any scale;
fp8 scaled: weight times `X.weight_scale` (older files: `X.scale_weight`), one number or one a row;
nvfp4: two e2m1 numbers a byte, the first in the high half, times one e4m3 scale per 16 inputs (`X.weight_scale`, in
cuBLAS's tiles of 128 x 4), times the scalar `X.weight_scale_2`. ComfyUI pads such weights to multiples of 16.
`X.input_scale` (`X.scale_input`) serves matrix products in 8 bit, which this program does not do. `X.comfy_quant` is
a few bytes of JSON that name the format; older files hold one `scaled_fp8` for all. See quantized_numbers for the sums.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from .bundle import Checkpoint
from .checkpoint import CheckpointFile
from .header import TensorEntry
from .keymaps import COMPONENTS, FP8_MARKER
from .quantized_numbers import FP4_BLOCK, FP4_TILE_COLUMNS, FP4_TILE_ROWS

Kind = Literal["fp8", "fp8 scaled", "nvfp4"]
Shape = tuple[int, ...]

FLOATS = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", "F64": "fp64"}  # what a weight that is not quantised may be
FP8 = ("F8_E4M3", "F8_E5M2")

# Names of a tensor's scale in the dialects, and what else may stand beside a tensor.
_SCALES = {"weight": ("weight_scale", "scale_weight"), "bias": ("bias_scale", "scale_bias")}
_SECOND_SCALE = "weight_scale_2"
_NOTES = ("input_scale", "scale_input", "comfy_quant")
_COMPANIONS = {*(name for names in _SCALES.values() for name in names), _SECOND_SCALE, *_NOTES, FP8_MARKER}
_RUNNABLE = {"float8_e4m3fn", "float8_e5m2", "nvfp4"}  # as markers call what we read
_PADDING = 16  # ComfyUI's nvfp4 weights are whole multiples of this a side

# Part of a tensor's name -> the format it gives away, none of which is run.
_FOREIGN = {
    r"\.(absmax|quant_map|nested_\w+)$|\.quant_state\.": "bitsandbytes 4 bit",
    r"\.weight_scale_inv$": "blockwise fp8",
    r"\.(wscales|smooth_factor\w*|proj_down|proj_up)$": "SVDQuant 4 bit",
    r"\.(qweight|qzeros)$": "GPTQ or AWQ",
    r"\.(weight_s_rel|weight_codebook)$": "w4a8",
}


@dataclass(frozen=True)
class Quantization:
    """How a file holds one tensor in less than 16 bit.

    Attributes:
        kind: the format, see the head of this file.
        shape: of the tensor, counted in numbers: two a byte for nvfp4.
        scale, second_scale: names of the tensors that undo it, as the module would call them.
        num_scales: how many numbers `scale` has.
    """

    kind: Kind
    shape: Shape
    scale: str | None = None
    second_scale: str | None = None
    num_scales: int = 1

    def is_transposed(self, expected: Shape) -> bool:
        """Tells an fp8 matrix that is stored (in, out); a square one is taken as published, (out, in)."""
        return self.kind != "nvfp4" and len(self.shape) == 2 and self.shape != expected == self.shape[::-1]

    def shape_for(self, expected: Shape) -> Shape:
        """Returns the shape that a module sees: the expected one where the stored fits it, else the stored one."""
        padded = tuple(_round_up(size, _PADDING) for size in expected)
        fits = self.is_transposed(expected) or (self.kind == "nvfp4" and self.shape == padded)
        return expected if fits else self.shape

    def has_scales_for(self, expected: Shape) -> bool:
        """Tells whether fp8 scales are one number or one a row of the module's matrix."""
        return self.kind == "nvfp4" or self.num_scales in (1, expected[0])


def is_companion(name: str) -> bool:
    """Tells a scale or marker from a tensor of the model, by its name."""
    return name.rsplit(".", 1)[-1] in _COMPANIONS


def read_quantization(file: Checkpoint, component: str) -> dict[str, Quantization]:
    """Returns {the module's tensor name: how the file holds it} for the quantised tensors of a component.

    Reads headers, and of tensors only the markers that are a few bytes of text. Raises ValueError with one sentence
    for a format that is not run, a scale without its tensor, a tensor without its scale, a tensor of no float dtype.
    """
    sources = file.component(component)
    entries = {target: file.entry(component, target) for target in sources}
    markers = [target for target in sources if target.endswith(".comfy_quant")]
    by_file: dict[CheckpointFile, list[str]] = {}
    for target in markers:
        by_file.setdefault(file.file_of(component, target), []).append(sources[target])
    formats = {name: title for holder, names in by_file.items() for name, title in read_formats(holder, names).items()}
    formats.update(declared_formats(file.supplier(component).metadata, file.where(component)))
    return recognise(entries, sources, f"{COMPONENTS[component]} in {file.where(component)}", formats)


def recognise(
    entries: Mapping[str, TensorEntry], sources: Mapping[str, str], what: str, formats: Mapping[str, str]
) -> dict[str, Quantization]:
    """Returns read_quantization's result for any tensors, `entries` and the file's own names by the module's names.

    `what` names them in sentences, `formats` holds the formats declared for some, see read_formats.
    """
    reader = _Reader(entries, sources, what)
    reader.refuse_foreign(formats)
    found = {target: quantization for target in reader.tensors if (quantization := reader.quantization(target))}
    reader.check_companions(found)
    reader.check_scales(found)
    return found


def count_parameters(shapes: Mapping[str, Shape], quantized: Mapping[str, Quantization]) -> int:
    """Counts the parameters among some tensors, by the module's names; scales and markers are none."""
    return sum(
        prod(quantized[name].shape if name in quantized else shape)
        for name, shape in shapes.items()
        if not is_companion(name)
    )


def describe_precision(file: Checkpoint, component: str) -> str:
    """Names how a component is stored: "bf16", "fp16", "fp32", "fp8", "fp8 scaled", "nvfp4" or "mixed".

    Quantised files keep small tensors wide, so any quantised tensor names the format; two formats are "mixed", and so
    are float dtypes of which none makes nine tenths. Raises ValueError as read_quantization does.
    """
    kinds = {quantization.kind for quantization in read_quantization(file, component).values()}
    if kinds:
        return kinds.pop() if len(kinds) == 1 else "mixed"
    sizes: dict[str, int] = {}
    for target in file.component(component):
        entry = file.entry(component, target)
        sizes[FLOATS[entry.dtype]] = sizes.get(FLOATS[entry.dtype], 0) + entry.numel
    most = max(sizes, key=sizes.__getitem__)
    return most if sizes[most] >= 0.9 * sum(sizes.values()) else "mixed"


class _Reader:
    """Looks through the header entries of one component."""

    def __init__(self, entries: Mapping[str, TensorEntry], sources: Mapping[str, str], what: str) -> None:
        self.entries = entries
        self.sources = sources
        self.what = what
        self.tensors = [target for target in sources if not is_companion(target)]

    def refuse_foreign(self, formats: Mapping[str, str]) -> None:
        """Raises ValueError where a name or a marker tells of a format that is not run."""
        for pattern, title in _FOREIGN.items():
            for target in self.sources:
                if re.search(pattern, target):
                    raise self._not_run(title, self.sources[target])
        for name, title in formats.items():
            if title not in _RUNNABLE:
                raise self._not_run(title, name)

    def quantization(self, target: str) -> Quantization | None:
        """Recognises one tensor; None for an ordinary float tensor."""
        entry, scale = self.entries[target], self._scale_name(target)
        if entry.dtype in FP8:
            return self._fp8(target, entry, scale)
        if entry.dtype == "U8" and scale is not None and self.entries[scale].dtype == "F8_E4M3":
            return self._nvfp4(target, entry, scale)
        if entry.dtype == "I8":
            raise self._not_run("int8", self.sources[target])
        self._check_float(target)
        return None

    def check_companions(self, found: dict[str, Quantization]) -> None:
        """Raises ValueError for a scale or marker that no quantised tensor uses."""
        for target in filter(is_companion, self.sources):
            base, _, suffix = target.rpartition(".")
            kind = "bias" if suffix in _SCALES["bias"] else "weight"
            if suffix != FP8_MARKER and f"{base}.{kind}" not in found:
                raise ValueError(
                    f"The {self.what} has {self.sources[target]!r}, but no quantised {kind} that it belongs to. A "
                    "weight without its scale, or scaled twice, gives noise: download the file again, or choose "
                    "another one."
                )

    def check_scales(self, found: dict[str, Quantization]) -> None:
        """Raises ValueError for an fp8 tensor without a scale, unless the whole component is unscaled."""
        unscaled = [target for target, quantization in found.items() if quantization.kind == "fp8"]
        is_scaled = len(found) > len(unscaled) or any(map(is_companion, self.sources))
        if unscaled and is_scaled:
            raise ValueError(
                f"The {self.what} is a scaled fp8 file, but {len(unscaled)} of its fp8 tensors have no scale, such as "
                f"{self.sources[unscaled[0]]!r}. Download the file again, or choose another one."
            )

    def _scale_name(self, target: str) -> str | None:
        base, _, leaf = target.rpartition(".")
        found = [name for name in (f"{base}.{suffix}" for suffix in _SCALES.get(leaf, ())) if name in self.entries]
        if len(found) > 1:
            raise ValueError(
                f"The {self.what} has two scales for one {leaf}, {self.sources[found[0]]!r} and "
                f"{self.sources[found[1]]!r}. Choose the original file."
            )
        return found[0] if found else None

    def _fp8(self, target: str, entry: TensorEntry, scale: str | None) -> Quantization:
        if scale is None:
            return Quantization("fp8", entry.shape)
        scales = self.entries[scale]
        if scales.dtype in ("U8", "F8_E8M0"):
            raise self._not_run("mxfp8", self.sources[target])
        self._check_float(scale)
        # one number, or one a row of a matrix, which may be stored either way round
        if scales.numel != 1 and (len(entry.shape) != 2 or scales.numel not in entry.shape):
            raise self._not_run(f"blockwise fp8 with {list(scales.shape)} scales", self.sources[target])
        return Quantization("fp8 scaled", entry.shape, scale, num_scales=scales.numel)

    def _nvfp4(self, target: str, entry: TensorEntry, scale: str) -> Quantization:
        second = f"{target.rpartition('.')[0]}.{_SECOND_SCALE}"
        if second not in self.entries:
            raise ValueError(
                f"The {self.what} has no {_SECOND_SCALE!r} for the nvfp4 weight {self.sources[target]!r}. Download the "
                "file again, or choose another one."
            )
        self._check_float(second)
        scales, shape = self.entries[scale], entry.shape
        rows, columns = (shape[0], 2 * shape[1]) if len(shape) == 2 else (0, 0)
        needed = _round_up(rows, FP4_TILE_ROWS) * _round_up(columns // FP4_BLOCK, FP4_TILE_COLUMNS)
        if not rows or columns % FP4_BLOCK or scales.numel != needed or self.entries[second].numel != 1:
            raise ValueError(
                f"The {self.what} has the nvfp4 weight {self.sources[target]!r} of shape {list(shape)} with scales of "
                f"shape {list(scales.shape)} and {list(self.entries[second].shape)}, which do not fit each other. "
                "Choose the original file."
            )
        return Quantization("nvfp4", (rows, columns), scale, second, scales.numel)

    def _check_float(self, target: str) -> None:
        if self.entries[target].dtype not in FLOATS:
            raise ValueError(
                f"The {self.what} holds {self.sources[target]!r} as {self.entries[target].dtype}, but floating-point "
                "numbers are needed there. Choose the original file."
            )

    def _not_run(self, title: str, name: str) -> ValueError:
        return ValueError(
            f"The {self.what} is quantised as {title} (tensor {name!r}), which this program does not run. Choose the "
            "bf16, fp8 or nvfp4 file."
        )


def read_formats(file: CheckpointFile, names: Iterable[str]) -> dict[str, str]:
    """Returns {the file's name of a `comfy_quant` marker: the format it declares}; reads the markers' few bytes.

    Raises ValueError for a marker that is no JSON.
    """
    start = file.content_key[2] - max(entry.end for entry in file.keys.values())  # of the data, which ends the file
    formats = {}
    with open(file.path, "rb") as stream:
        for name in names:
            stream.seek(start + file.keys[name].start)
            text = stream.read(file.keys[name].end - file.keys[name].start).rstrip(b"\0")
            formats[name] = _format(text, f"{name!r} in {file.path}")
    return formats


def declared_formats(metadata: Mapping[str, str], path: str) -> dict[str, str]:
    """Returns {layer: the format declared for it} of a file's metadata; raises ValueError where that is no JSON."""
    table = metadata.get("_quantization_metadata")
    if table is None:
        return {}
    try:
        layers = json.loads(table)["layers"].items()
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{path} is damaged: its metadata "_quantization_metadata" cannot be read ({error}).'
        ) from error
    return {name: _format(json.dumps(layer), name) for name, layer in layers}


def _format(text: str | bytes, name: str) -> str:
    """Returns what a marker's JSON calls the format; a bare string is the format itself."""
    try:
        content = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"The quantisation marker {name} is damaged: it is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        return str(content)
    return f"{content.get('format')}{' with convrot' if content.get('convrot') else ''}"


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
