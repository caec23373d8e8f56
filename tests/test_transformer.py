"""The transformer's forward pass against the official implementation's, in one process."""

import pytest
import torch

from mgpu_runtime.models.streams import StreamInput, log_bias
from tests.goldens import GOLDEN, golden, relative_error
from tests.tiny import transformer

CASES = sorted(path.stem for path in (GOLDEN / "golden").glob("transformer_*.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_velocities_are_the_official_ones(name: str) -> None:
    case = golden(name)
    model = transformer(case.facts["style"])
    with torch.no_grad():
        velocities = model.predict(case.stream("video"), case.stream("audio"), case.get("perturbation_keep_mask"))
    for stream, velocity in zip(("video", "audio"), velocities, strict=True):
        expected = case.get(f"out.{stream}_velocity")
        if expected is None:
            assert velocity is None
        else:
            assert relative_error(velocity, expected) < 1e-5


def test_one_shared_timestep_equals_one_per_token() -> None:
    case = golden("transformer_23_uniform")
    video, audio, model = case.stream("video"), case.stream("audio"), transformer("23")
    shared = [StreamInput(**{**vars(stream), "timesteps": stream.timesteps[:, :1]}) for stream in (video, audio)]
    with torch.no_grad():
        for one, other in zip(model.predict(*shared), model.predict(video, audio), strict=True):
            assert relative_error(one, other) < 1e-6


def test_b09_either_stream_may_be_absent() -> None:
    case = golden("transformer_23_uniform")
    model = transformer("23")
    with torch.no_grad():
        isolated = torch.ones(4, 2, 1)
        isolated[2:] = 0
        together = model.predict(case.stream("video"), case.stream("audio"), isolated)
        video, no_audio = model.predict(case.stream("video"), None)
        no_video, audio = model.predict(None, case.stream("audio"))
    assert no_audio is None and no_video is None
    assert relative_error(video, together[0]) < 1e-6 and relative_error(audio, together[1]) < 1e-6
    with pytest.raises(ValueError, match="nothing to predict"):
        model.predict(None, None)


def test_soft_masks_become_logarithms_and_zero_the_lowest_value() -> None:
    bias = log_bias(torch.tensor([1.0, 0.5, 0.0]), torch.float32)
    assert bias[0] == 0 and bias[2] == torch.finfo(torch.float32).min
    assert torch.isclose(bias[1], torch.tensor(0.5).log())
    assert torch.isfinite(log_bias(torch.tensor([0.0]), torch.bfloat16)).all()


def test_a_stream_with_wrong_shapes_is_refused_with_both_shapes() -> None:
    video = golden("transformer_23_uniform").stream("video")
    with pytest.raises(ValueError, match=r"timesteps must be \(1, 24\) or \(1, 1\), got \(1, 23\)"):
        StreamInput(**{**vars(video), "timesteps": video.timesteps[:, :23]})
    with pytest.raises(ValueError, match="positions must be"):
        StreamInput(**{**vars(video), "positions": video.positions[:, :, :5]})


def test_a_perturbation_of_another_model_is_refused() -> None:
    case = golden("transformer_23_uniform")
    with pytest.raises(ValueError, match=r"perturbation must be \(4, 2, batch\), got \(4, 3, 1\)"):
        transformer("23").predict(case.stream("video"), None, torch.ones(4, 3, 1))
