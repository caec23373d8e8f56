"""The jobs about prompts as every rank runs them."""

from typing import Any

from torch import Tensor

from .first_rank import on_first_rank
from .jobs import Encode, PredictLength
from .models import LTXModels
from .progress import Progress


def run_encode(
    request: Encode, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Encodes prompts, on the first rank or on all; those that are known already are not encoded again."""
    progress.step("encode prompt", 0, 1)
    contexts = models.encode(request, progress.log)
    progress.step("encode prompt", 1, 1)
    return {
        "contexts": [{"video": c.video, "audio": c.audio, "mask": c.mask} for c in contexts],
        "num_encoded": models.text.num_encoded,
    }


def run_predict_length(
    request: PredictLength, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Predicts a clip's seconds on the first rank."""
    video, audio = tensors["positive_video"], tensors["positive_audio"]
    return {"seconds": on_first_rank(models.info, lambda: models.predict_seconds(video, audio))}
