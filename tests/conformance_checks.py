"""Which check belongs to which kind of golden case; the file name's first part says the kind."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from tests.conformance_bench import Bench, Row, Triple, gather_rows
from tests.conformance_models import (
    check_audio_decode,
    check_audio_encode,
    check_audio_mel,
    check_connectors,
    check_fp8,
    check_lora,
    check_rope,
    check_transformer,
    check_upsampler,
    check_vae_decode,
    check_vae_encode,
    check_vae_statistics,
)
from tests.conformance_sampling import (
    check_guidance,
    check_latent_sizes,
    check_loop,
    check_loop_guided,
    check_patchify,
    check_positions,
    check_sigmas,
    check_steppers,
)
from tests.conformance_tiles import check_tdp, check_tiling_masks, check_tilings, check_vae_distributed, check_vae_tiled
from tests.goldens import Case, read_case

FORWARD_TOLERANCE, LOOP_TOLERANCE = 1e-4, 1e-3  # relative to the largest value, as the goldens' README suggests

_CHECKS: dict[str, Callable[[Case, Bench], Iterator[Triple]]] = {
    r"(transformer|sp)_.*": check_transformer,
    r"lora_.*": check_lora,
    r"fp8_.*": check_fp8,
    r"rope": check_rope,
    r"connectors_.*": check_connectors,
    r"vae_.*_decode": check_vae_decode,
    r"vae_.*_encode": check_vae_encode,
    r"vae_.*_statistics": check_vae_statistics,
    r"vae_.*_distributed_.*": check_vae_distributed,
    r"vae_.*_tiled_.*": check_vae_tiled,
    r"audio_.*_decode": check_audio_decode,
    r"audio_.*_encode": check_audio_encode,
    r"audio_mel(_.*)?": check_audio_mel,
    r"upsampler_.*": check_upsampler,
    r"sigmas": check_sigmas,
    r"positions": check_positions,
    r"patchify": check_patchify,
    r"tiling_masks": check_tiling_masks,
    r"guidance": check_guidance,
    r"steppers": check_steppers,
    r"loop_.*_guided": check_loop_guided,
    r"loop_.*": check_loop,
    r"tdp_.*": check_tdp,
}
# What a damaged case, a missing checkpoint or more ranks than heads bring.
_UNREADABLE = (ValueError, KeyError, TypeError, RuntimeError, OSError, SafetensorError)
_JSON_CHECKS: dict[str, Callable[[dict], Iterator[Triple]]] = {
    "latent_sizes": check_latent_sizes,
    "tilings": check_tilings,
}


@torch.no_grad()
def check_all(rank: int, group: dist.ProcessGroup, directory: str) -> list[Row]:
    """Checks every case of a directory, in the order of names."""
    bench, folder = Bench(Path(directory), group), Path(directory) / "golden"
    rows: list[Row] = []
    for path in [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))]:
        try:
            rows += _check_case(path, bench)
        except _UNREADABLE as error:  # the same on every rank; one case that cannot be checked does not hide the others
            rows.append(Row(path.stem, "-", error=f"{type(error).__name__}: {error}"))
    return rows


def _check_case(path: Path, bench: Bench) -> list[Row]:
    if path.suffix == ".json":
        if path.stem not in _JSON_CHECKS:
            return [Row(path.stem, "-", reason="unknown kind of case")]
        table = json.loads(path.read_text(encoding="utf-8"))
        return gather_rows(path.stem, _JSON_CHECKS[path.stem](table), FORWARD_TOLERANCE)
    case = read_case(path)
    for pattern, check in _CHECKS.items():
        if re.fullmatch(pattern, case.name):
            tolerance = LOOP_TOLERANCE if case.name.startswith("loop") else FORWARD_TOLERANCE
            return gather_rows(case.name, check(case, bench), tolerance)
    return [Row(case.name, "-", reason="unknown kind of case")]
