"""What the nodes accept and refuse on their wires; plain tensors, no ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_runtime.pipeline.jobs import PromptContext
from nodes.graph import check_asked_size, followers
from nodes.wires import (
    read_context,
    read_latent,
    read_latents,
    read_sigmas,
    read_sound_latent,
    write_audio,
    write_audio_latent,
    write_context,
    write_latent,
)


class Nested:
    """Is a nested tensor as far as the pack may know one: by its flag and `unbind`."""

    is_nested = True

    def __init__(self, *streams: torch.Tensor) -> None:
        self._streams = streams

    def unbind(self) -> tuple[torch.Tensor, ...]:
        return self._streams


VIDEO = torch.arange(2.0 * 128 * 3 * 4 * 6).view(2, 128, 3, 4, 6)
AUDIO = torch.arange(2.0 * 8 * 18 * 16).view(2, 8, 18, 16)


def test_plain_latents_come_through_unchanged() -> None:
    mask = torch.ones(2, 1, 3, 1, 1)
    mask[:, :, 0] = 0
    start = read_latents({"samples": VIDEO, "noise_mask": mask, "frame_rate": 25.0}, {"samples": AUDIO})
    assert torch.equal(start.video, VIDEO) and torch.equal(start.audio, AUDIO)
    assert torch.equal(start.noise_mask, mask)
    assert start.frame_rate == 25.0


def test_b119_nested_and_plain_are_accepted_for_samples_and_mask_separately() -> None:
    video_mask, audio_mask = torch.zeros(2, 1, 3, 1, 1), torch.ones(2, 1, 18, 1)
    samples = Nested(VIDEO, AUDIO)
    both = read_latents({"samples": samples, "noise_mask": Nested(video_mask, audio_mask)})
    assert torch.equal(both.video, VIDEO) and torch.equal(both.audio, AUDIO)
    assert torch.equal(both.noise_mask, video_mask)
    assert both.audio_mask is None  # it keeps nothing
    plain_mask = read_latents({"samples": samples, "noise_mask": video_mask})
    assert torch.equal(plain_mask.noise_mask, video_mask)


def test_b119_a_mask_that_keeps_sound_is_passed_on_wherever_it_comes_from() -> None:
    video_mask, audio_mask = torch.zeros(2, 1, 3, 1, 1), torch.ones(2, 1, 18, 1)
    audio_mask[:, :, :5] = 0
    nested = Nested(video_mask, audio_mask)
    for latent, audio_latent in (
        ({"samples": Nested(VIDEO, AUDIO), "noise_mask": nested}, None),
        ({"samples": VIDEO, "noise_mask": nested}, {"samples": AUDIO}),
        ({"samples": VIDEO, "noise_mask": video_mask}, {"samples": AUDIO, "noise_mask": audio_mask}),
    ):
        start = read_latents(latent, audio_latent)
        assert torch.equal(start.audio_mask, audio_mask) and torch.equal(start.noise_mask, video_mask)
    with pytest.raises(ValueError, match=r"audio mask 2 x 1 x 18 x 1.*no audio latent"):
        read_latents({"samples": VIDEO, "noise_mask": nested})


def test_one_stream_is_read_alone_and_a_nested_latent_gets_a_hint() -> None:
    assert torch.equal(read_latent({"samples": VIDEO}, "keyframe"), VIDEO)
    assert torch.equal(read_sound_latent({"samples": AUDIO}, "voice"), AUDIO)
    with pytest.raises(ValueError, match=r"The keyframe holds two streams.*connect the video part"):
        read_latent({"samples": Nested(VIDEO, AUDIO)}, "keyframe")
    with pytest.raises(ValueError, match=r"The voice holds two streams.*connect the audio part"):
        read_sound_latent({"samples": Nested(VIDEO, AUDIO)}, "voice")
    with pytest.raises(ValueError, match="The keyframe has shape 2 x 8 x 18 x 16"):
        read_latent({"samples": AUDIO}, "keyframe")
    with pytest.raises(ValueError, match="The voice has shape 2 x 128 x 3 x 4 x 6"):
        read_sound_latent({"samples": VIDEO}, "voice")


def test_latent_of_image_to_video_nodes_keeps_its_first_frames() -> None:
    """Is what LTXV Img To Video gives: the picture's latent in front, a mask of 1 - strength over those frames."""
    mask = torch.ones(1, 1, 3, 1, 1)
    mask[:, :, :1] = 1 - 0.75
    start = read_latents({"samples": VIDEO[:1], "noise_mask": mask})
    assert start.noise_mask.flatten().tolist() == [0.25, 1, 1] and start.audio_mask is None


def test_b119_two_sources_of_audio_name_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"2 x 128 x 3 x 4 x 6.*2 x 8 x 18 x 16.*Disconnect one"):
        read_latents({"samples": Nested(VIDEO, AUDIO)}, {"samples": AUDIO})


def test_b121_nested_latent_on_the_audio_input_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="Separate AV Latent"):
        read_latents({"samples": VIDEO}, {"samples": Nested(VIDEO, AUDIO)})


def test_b121_nested_latent_of_three_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 3"):
        read_latents({"samples": Nested(VIDEO, AUDIO, AUDIO)})


@pytest.mark.parametrize(("video_batch", "audio_batch"), [(2, 1), (1, 2), (2, 2)])
def test_b35_a_batch_of_one_is_repeated(video_batch: int, audio_batch: int) -> None:
    start = read_latents({"samples": VIDEO[:video_batch]}, {"samples": AUDIO[:audio_batch]})
    assert start.video.shape[0] == start.audio.shape[0] == 2
    assert torch.equal(start.audio[1], AUDIO[min(1, audio_batch - 1)])


def test_b35_other_batches_name_both_sizes() -> None:
    with pytest.raises(ValueError, match="batch size 2 and the audio latent 3"):
        read_latents({"samples": VIDEO}, {"samples": AUDIO[:1].expand(3, -1, -1, -1)})


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (128, 3, 4, 6)])
def test_image_latents_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=" x ".join(map(str, shape))):
        read_latents({"samples": torch.zeros(shape)})


def test_output_latent_keeps_unknown_entries_and_drops_the_old_mask() -> None:
    source = {"samples": VIDEO, "noise_mask": torch.ones(1), "batch_index": [0, 1], "other": "kept"}
    out = write_latent(source, VIDEO * 2, 24.0)
    assert set(out) == {"samples", "batch_index", "other", "frame_rate"}
    assert out["frame_rate"] == 24.0 and source["samples"] is VIDEO


def test_audio_latent_is_typed_as_comfyui_types_it() -> None:
    assert write_audio_latent(AUDIO, 24.0) == {"samples": AUDIO, "type": "audio", "frame_rate": 24.0}
    assert write_audio_latent(None, 24.0) is None
    assert write_audio(None, None) is None


def test_context_rides_in_the_conditioning() -> None:
    context = PromptContext(video=torch.ones(1, 128, 192), audio=torch.zeros(1, 128, 64))
    conditioning = write_context(context)
    copied = [[conditioning[0][0], {**conditioning[0][1], "frame_rate": 25}]]  # as LTXVConditioning hands it on
    assert read_context(copied, "positive") == context


def test_conditioning_from_elsewhere_names_encode_prompt() -> None:
    with pytest.raises(ValueError, match=r"negative was not made by Encode Prompt \(LTX MGPU\)"):
        read_context([[torch.zeros(1, 77, 768), {"pooled_output": None}]], "negative")


def test_guides_are_refused() -> None:
    extras = {"ltx_mgpu_audio_context": torch.zeros(1, 128, 64), "keyframe_idxs": torch.zeros(1, 3, 4)}
    with pytest.raises(ValueError, match=r"guide frames.*Image Condition \(LTX MGPU\)"):
        read_context([[torch.zeros(1, 128, 192), extras]], "positive")


@pytest.mark.parametrize("count", [0, 2])
def test_combined_prompts_are_refused(count: int) -> None:
    entry = [torch.zeros(1, 128, 192), {"ltx_mgpu_audio_context": torch.zeros(1, 128, 64)}]
    with pytest.raises(ValueError, match=f"holds {count} prompts"):
        read_context([entry] * count, "positive")


def test_sigmas_become_numbers() -> None:
    assert read_sigmas(torch.tensor([1.0, 0.5, 0.0])) == (1.0, 0.5, 0.0)
    assert read_sigmas(None) is None


def _graph(**asked: Any) -> dict[str, Any]:
    return {
        "3": {"class_type": "EmptyLTXVLatentVideo", "inputs": {"width": 192, "height": 128, "length": 17, **asked}},
        "4": {"class_type": "LTXMGPUSPStage", "inputs": {"latent": ["3", 0]}},
        "5": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {"latent": ["4", 0], "tiles": "1x2"}},
    }


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"width": 100}, "width must be a multiple of 32, got 100.*ask for 96 or 128"),
        ({"height": 130}, "height must be a multiple of 32, got 130.*ask for 128 or 160"),
        ({"length": 20}, r"length must be 8 n \+ 1, got 20.*ask for 17 or 25"),
    ],
)
def test_b29_sizes_that_comfyui_would_round_are_named(asked: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_asked_size(_graph(**asked), "4", "latent")


@pytest.mark.parametrize("asked", [{}, {"length": 1}, {"width": ["9", 0]}])
def test_good_or_unknown_sizes_pass(asked: dict[str, Any]) -> None:
    check_asked_size(_graph(**asked), "4", "latent")


def test_followers_are_found_by_link() -> None:
    graph = _graph()
    assert [found["tiles"] for _, found in followers(graph, "4", 0, "LTXMGPUTDPUpscaleStage", "latent")] == ["1x2"]
    assert not list(followers(graph, "4", 1, "LTXMGPUTDPUpscaleStage", "latent"))
