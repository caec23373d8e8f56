"""Checks of the condition nodes inside ComfyUI's modules. Run by checks_in_comfy.py."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from comfy.nested_tensor import NestedTensor
from comfy_extras.nodes_lt import LTXVAddGuide, LTXVImgToVideo
from comfy_stage import PROMPT, SP, TDP, Stage, pack, refusal
from safetensors.torch import save_file

from mgpu_runtime.pipeline.conditions import (
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
)
from mgpu_runtime.pipeline.jobs import LoRASpec

PICTURES = torch.arange(9 * 40 * 30 * 3.0).view(9, 40, 30, 3) / (9 * 40 * 30 * 3)
VIDEO = torch.arange(128 * 2 * 4 * 6.0).view(1, 128, 2, 4, 6)
SOUND = torch.arange(8 * 10 * 16.0).view(1, 8, 10, 16)
CLIP = {"samples": torch.zeros(1, 128, 3, 4, 6)}


def run(node_id: str, **inputs: Any) -> tuple[tuple[Any, torch.Tensor], ...]:
    """Returns the chain that a condition node gives."""
    (chain,) = pack.by_id[node_id].execute(**inputs).args
    return chain


def image(**changes: Any) -> tuple[tuple[Any, torch.Tensor], ...]:
    """Returns the chain of an Image Condition with its widgets as they are at first."""
    widgets = {"image": PICTURES[:1], "frame": 0, "strength": 1.0, "crf": -1, "attention": -1.0}
    return run("LTXMGPUImageCondition", **{**widgets, **changes})


def check_widgets_become_conditions() -> None:
    ((condition, pictures),) = image()
    assert condition == ImageCondition() and torch.equal(pictures, PICTURES[:1])
    ((condition, pictures),) = image(image=PICTURES, frame=-9, strength=0.75, crf=0, attention=0.5)
    assert condition == ImageCondition(-9, 0.75, 0, 0.5) and torch.equal(pictures, PICTURES)
    ((condition, latent),) = run("LTXMGPULatentCondition", latent={"samples": VIDEO}, frame=8, strength=0.5)
    assert condition == LatentCondition(8, 0.5) and torch.equal(latent, VIDEO)
    ((condition, sound),) = run("LTXMGPUReferenceAudio", audio_latent={"samples": SOUND, "type": "audio"}, strength=1.0)
    assert condition == ReferenceAudioCondition() and torch.equal(sound, SOUND)
    clip = {"images": PICTURES, "strength": 1.0, "downscale": 2, "time_scale": 3, "attention": 0.25}
    ((condition, pictures),) = run("LTXMGPUReferenceClip", **clip)
    assert condition == ReferenceCondition(1.0, 2, 3, 0.25) and torch.equal(pictures, PICTURES)


def check_a_factor_of_0_is_read_from_the_models_loras() -> None:
    clip = {"images": PICTURES, "strength": 1.0, "time_scale": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/depth.safetensors"
        module = "diffusion_model.transformer_blocks.0.attn1.to_q"
        pair = {f"{module}.lora_A.weight": torch.zeros(2, 8), f"{module}.lora_B.weight": torch.zeros(8, 2)}
        save_file(pair, path, metadata={"reference_downscale_factor": "2"})
        ltx = Stage().ltx.with_lora(LoRASpec(path))
        for downscale, handle, expected in ((0, ltx, 2), (3, ltx, 3), (0, None, 1), (0, Stage().ltx, 1)):
            ((condition, _),) = run("LTXMGPUReferenceClip", **clip, downscale=downscale, ltx=handle)
            assert condition == ReferenceCondition(1.0, expected, 1), (downscale, condition)


def check_b127_a_longer_chain_leaves_the_shorter_one_as_it_is() -> None:
    first = image()
    before = tuple(first)
    second = image(frame=8, conditions=first)
    third = run("LTXMGPUReferenceAudio", audio_latent={"samples": SOUND}, strength=0.5, conditions=second)
    assert [type(condition) for condition, _ in third] == [ImageCondition, ImageCondition, ReferenceAudioCondition]
    assert first == before and third[:2] == second and second[:1] == first
    for chain in (first, second, third):
        assert isinstance(chain, tuple) and all(isinstance(entry, tuple) for entry in chain)
    assert refusal(lambda: setattr(third[0][0], "frame", 3), AttributeError)


def check_wrong_input_is_one_sentence() -> None:
    for call, words in (
        (lambda: image(image=PICTURES[0]), "the image must be"),
        (lambda: image(image=PICTURES * float("nan")), "the image holds values that are not finite"),
        (lambda: image(attention=0.5), "set attention to -1"),
        (lambda: image(strength=float("nan")), "strength"),
        (lambda: run("LTXMGPULatentCondition", latent={"samples": SOUND}, frame=0, strength=1.0), "has shape 1 x 8"),
        (
            lambda: run(
                "LTXMGPULatentCondition", latent={"samples": NestedTensor((VIDEO, SOUND))}, frame=0, strength=1.0
            ),
            "connect the video part",
        ),
        (lambda: run("LTXMGPUReferenceAudio", audio_latent={"samples": VIDEO}, strength=1.0), "has shape 1 x 128"),
        (lambda: run("LTXMGPUReferenceClip", images=VIDEO, strength=1.0, downscale=0, time_scale=0), "reference clip"),
    ):
        said = refusal(call)
        assert words in said and "\n" not in said, said


class Encoder:
    """Stands for a video VAE as ComfyUI's nodes use one: 32 x 32 pixels and 8 frames to a latent cell."""

    downscale_index_formula = (8, 32, 32)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width = (pixels.shape[0] - 1) // 8 + 1, pixels.shape[1] // 32, pixels.shape[2] // 32
        return torch.full((1, 128, frames, height, width), float(pixels.mean()))


def check_latent_of_comfyuis_image_to_video_keeps_its_first_frame() -> None:
    stage = Stage()
    made = LTXVImgToVideo.execute(PROMPT, PROMPT, PICTURES[:1], Encoder(), 192, 128, 17, 1, 0.75)
    positive, _, latent = made.args
    stage.ready("LTXMGPUSPStage").execute(ltx=stage.ltx, positive=positive, latent=latent, **SP)
    (_, _, _, video), more = stage.client.calls[-1]
    assert torch.equal(video, latent["samples"]) and video[:, :, 0].any() and not video[:, :, 1:].any()
    assert more["noise_mask"].flatten().tolist() == [0.25, 1.0, 1.0]


def check_guides_of_comfyui_are_refused_with_what_to_take_instead() -> None:
    stage = Stage()
    made = LTXVAddGuide.execute(PROMPT, PROMPT, Encoder(), {"samples": torch.zeros(1, 128, 3, 4, 6)}, PICTURES, 8, 1.0)
    positive, _, latent = made.args
    node = stage.ready("LTXMGPUSPStage")
    said = refusal(lambda: node.execute(ltx=stage.ltx, positive=positive, latent=latent, **SP))
    assert "LTXV Add Guide" in said and "Image Condition (LTX MGPU)" in said, said
    assert not stage.client.calls


def check_stages_hand_their_conditions_on() -> None:
    stage = Stage()
    chain = image(frame=8, conditions=image())
    stage.run_sp(conditions=chain)
    assert stage.client.calls[-1][1]["conditions"] == chain
    node = stage.ready("LTXMGPUTDPUpscaleStage")
    video = {**CLIP, "frame_rate": 24.0}
    node.execute(ltx=stage.ltx, positive=PROMPT, latent=video, conditions=chain, **TDP)
    assert stage.client.calls[-1][1]["conditions"] == chain
    node.execute(ltx=stage.ltx, positive=PROMPT, latent=video, **TDP)
    assert stage.client.calls[-1][1]["conditions"] == ()


def check_b119_a_mask_of_the_sound_reaches_the_job() -> None:
    stage = Stage()
    mask = torch.ones(1, 1, 18, 1)
    mask[:, :, :4] = 0
    sound = {"samples": torch.zeros(1, 8, 18, 16), "noise_mask": mask}
    stage.run_sp(audio_latent=sound)
    assert torch.equal(stage.client.calls[-1][1]["audio_mask"], mask)


def check_conditions_are_looked_at_before_the_prompt_is_encoded() -> None:
    stage = Stage()
    asked = {"ltx": stage.ltx, "positive": None, "latent": CLIP, **SP}

    def status(**changes: Any) -> list[str]:
        return stage.ready("LTXMGPUSPStage").check_lazy_status(**{**asked, **changes})

    assert status(conditions=image(frame=-1, image=PICTURES[:1])) == ["positive"]
    latent = run("LTXMGPULatentCondition", latent={"samples": VIDEO}, frame=0, strength=1.0)
    assert status(conditions=latent) == ["positive"]
    voice = run("LTXMGPUReferenceAudio", audio_latent={"samples": SOUND}, strength=1.0)
    for conditions, words in (
        (image(frame=17), "the clip has 17 frames"),
        (image(image=PICTURES[:5]), "5 pictures"),
        (image(image=PICTURES, frame=16), "9 frames long from frame 16 on"),
        (image(frame=8, conditions=voice[:0], image=PICTURES[:2]), "2 pictures"),
        (run("LTXMGPULatentCondition", latent={"samples": VIDEO[..., :5]}, frame=0, strength=1.0), "4x5 cells"),
        (run("LTXMGPUReferenceClip", images=PICTURES, strength=1.0, downscale=4, time_scale=1), "multiple of 128"),
        (run("LTXMGPUReferenceAudio", audio_latent={"samples": SOUND[:, :4]}, strength=1.0), "(1, 4, 10, 16)"),
    ):
        said = refusal(lambda conditions=conditions: status(conditions=conditions))
        assert words in said and "\n" not in said, said
    assert "condition 2" in refusal(lambda: status(conditions=image(frame=17, conditions=image())))
    assert not stage.client.calls


def check_a_following_stage_is_held_against_the_conditions_both_share() -> None:
    stage = Stage()
    chain = run("LTXMGPULatentCondition", latent={"samples": VIDEO}, frame=0, strength=1.0)
    graph = {
        "2": {"class_type": "LTXMGPULoRA", "inputs": {"ltx": ["1", 0]}},
        "4": {"class_type": "LTXMGPUSPStage", "inputs": {"ltx": ["1", 0], "latent": ["3", 0], "conditions": ["9", 0]}},
        "5": {
            "class_type": "LTXMGPUTDPUpscaleStage",
            "inputs": {"ltx": ["2", 0], "latent": ["4", 0], "conditions": ["9", 0], **TDP},
        },
    }
    asked = {"ltx": stage.ltx, "positive": None, "latent": CLIP, "conditions": chain, **SP}

    def status() -> list[str]:
        return stage.ready("LTXMGPUSPStage", graph).check_lazy_status(**asked)

    said = refusal(status)
    assert said.startswith("TDP Upscale Stage: condition 1 is a latent of 4x6 cells") and "8x12" in said, said
    alone = {"class_type": "LTXMGPULatentCondition", "inputs": {"frame": 0, "strength": 1.0, "latent": ["11", 0]}}
    graph["12"] = {"class_type": "LTXMGPUReferenceClip", "inputs": {"images": ["13", 0]}}
    graph["10"] = {**alone, "inputs": {**alone["inputs"], "conditions": ["12", 0]}}
    graph["11"] = {"class_type": "LTXMGPUEncodeVideo", "inputs": {"width": 192, "height": 256, "images": ["13", 0]}}
    graph["5"]["inputs"]["conditions"] = ["10", 0]  # a chain of its own, of which the graph tells what it can
    said = refusal(status)
    assert said.startswith("TDP Upscale Stage: condition 2 is a latent of 8x6 cells") and "8x12" in said, said
    graph["10"]["inputs"] |= {"latent": ["3", 0]}  # the first stage's own, before it is enlarged
    assert "4x6 cells" in refusal(status)
    graph["10"]["inputs"] |= {"latent": ["11", 0], "frame": 17}
    graph["11"]["inputs"]["width"] = 0  # as its pictures are
    assert "the clip has 17 frames" in refusal(status)
    graph["10"]["inputs"]["frame"] = 8
    for change in ({"conditions": ["10", 0]}, {"conditions": ["9", 0], "upscale": False, "overlap": 1}):
        graph["5"]["inputs"] |= change
        assert status() == ["positive"], change
    later = {"ltx": stage.ltx, "positive": None, "latent": {**CLIP, "frame_rate": 24.0}, "conditions": chain, **TDP}
    said = refusal(lambda: stage.ready("LTXMGPUTDPUpscaleStage").check_lazy_status(**later))
    assert "8x12" in said, said


def check_a_prompt_can_choose_the_length_of_its_clip() -> None:
    stage = Stage()
    stage.client.predict_seconds = lambda context, watch: 5.1
    node = stage.ready("LTXMGPUPredictLength")
    assert node.execute(ltx=stage.ltx, positive=PROMPT, fps=24.0, max_seconds=20.0).args == (129, 5.1)
    assert node.execute(ltx=stage.ltx, positive=PROMPT, fps=24.0, max_seconds=2.0).args == (41, 5.1)
