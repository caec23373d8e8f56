"""The encode job as every rank runs it."""

from typing import Any

from torch import Tensor

from .first_rank import on_first_rank
from .jobs import Encode
from .models import LTXModels
from .progress import Progress


def run_encode(
    request: Encode, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Encodes prompts on the first rank: one text encoder for the fleet, not one for each rank."""
    progress.step("encode prompt", 0, 1)
    contexts = on_first_rank(models.info, lambda: models.encode(request.prompts, request.max_length))
    progress.step("encode prompt", 1, 1)
    return {"contexts": [{"video": c.video, "audio": c.audio, "mask": c.mask} for c in contexts or []]}
