"""The condition nodes: pictures, clips and sound for a stage to follow. They describe and check; no worker is asked.

A wire of type LTX_MGPU_CONDITIONS holds an immutable tuple of (condition, tensor), in the order of the chain.
"""

from __future__ import annotations

from torch import Tensor

from mgpu_runtime.pipeline.conditions import (
    MAX_CRF,
    MAX_REFERENCE_FACTOR,
    Condition,
    Conditions,
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
)
from mgpu_runtime.pipeline.images import check_pictures
from mgpu_runtime.pipeline.reference_factors import reference_factors

from .comfy import LTX_MGPU, LTX_MGPU_CONDITIONS, io
from .handle import LTXHandle
from .wires import Latent, read_latent, read_sound_latent

CRF_BY_MODEL = -1
NO_LIMIT = -1.0
MAX_FRAME = 100_000


class LTXMGPUImageCondition(io.ComfyNode):
    """Describes pictures at a frame of the clip."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "LTXMGPUImageCondition",
            "Image Condition (LTX MGPU)",
            "Lets the clip show a picture at a frame: its first one (image to video), its last one, or any between. "
            "Chain several for keyframes, and connect the last one's output to every stage; each stage fits the "
            "pictures to its own size.",
            [
                io.Image.Input(
                    "image",
                    tooltip="One picture, or 8 n + 1 pictures in a row (9, 17, ...). It is resized until it fills the "
                    "clip and cropped at its centre.",
                ),
                _frame_input("Where the first picture lies"),
                _strength_input("1 keeps the picture as it is, 0 ignores it."),
                io.Int.Input(
                    "crf",
                    default=CRF_BY_MODEL,
                    min=CRF_BY_MODEL,
                    max=MAX_CRF,
                    tooltip="How coarsely a picture is compressed with H.264 first, since the model was trained on "
                    "frames of films and lets clean pictures stand still; 0 leaves it out. -1 takes the model's own "
                    "for one picture, and 0 for several.",
                ),
                _attention_input("For frame 0 leave it at -1."),
            ],
        )

    @classmethod
    def execute(
        cls,
        image: Tensor,
        frame: int,
        strength: float,
        crf: int = CRF_BY_MODEL,
        attention: float = NO_LIMIT,
        conditions: Conditions | None = None,
    ) -> io.NodeOutput:
        condition = ImageCondition(frame, strength, None if crf == CRF_BY_MODEL else crf, _limit(attention))
        return _chained(conditions, condition, _pictures(image, "image"))


class LTXMGPULatentCondition(io.ComfyNode):
    """Describes an encoded piece of video at a frame of the clip."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "LTXMGPULatentCondition",
            "Latent Condition (LTX MGPU)",
            "Lets the clip show an already encoded picture or piece of video at a frame, unchanged. Its size must be "
            "the stage's own, so a stage that enlarges the clip needs a latent of its own.",
            [
                io.Latent.Input("latent", tooltip="From Encode Video (LTX MGPU), a stage, or another LTX encoder."),
                _frame_input("Where the latent's first frame lies"),
                _strength_input("1 keeps the latent as it is, 0 ignores it."),
                _attention_input("For frame 0 leave it at -1."),
            ],
        )

    @classmethod
    def execute(
        cls,
        latent: Latent,
        frame: int,
        strength: float,
        attention: float = NO_LIMIT,
        conditions: Conditions | None = None,
    ) -> io.NodeOutput:
        video = read_latent(latent, "latent of a Latent Condition")
        return _chained(conditions, LatentCondition(frame, strength, _limit(attention)), video)


class LTXMGPUReferenceClip(io.ComfyNode):
    """Describes a clip for an IC-LoRA to look at."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "LTXMGPUReferenceClip",
            "Reference Clip (LTX MGPU)",
            "Shows the model a whole clip beside the one it makes: a depth, pose or edge clip, or the original of a "
            "video to change. Needs an IC-LoRA made for it, loaded with LoRA (LTX MGPU).",
            [
                io.Image.Input("images", tooltip="The frames of the reference clip, 8 n + 1 of them."),
                _strength_input("1 keeps the reference as it is, 0 ignores it."),
                _factor_input("downscale", "smaller than the clip's its pictures are"),
                _factor_input("time_scale", "fewer frames a second than the clip it has"),
                _attention_input(""),
                LTX_MGPU.Input("ltx", optional=True, tooltip="The model with its IC-LoRA, for a factor of 0."),
            ],
        )

    @classmethod
    def execute(
        cls,
        images: Tensor,
        strength: float,
        downscale: int,
        time_scale: int,
        attention: float = NO_LIMIT,
        ltx: LTXHandle | None = None,
        conditions: Conditions | None = None,
    ) -> io.NodeOutput:
        asked = (downscale, time_scale)
        by_lora = reference_factors(ltx.loras) if ltx is not None and 0 in asked else (1, 1)
        factors = [given or read for given, read in zip(asked, by_lora, strict=True)]
        condition = ReferenceCondition(strength, *factors, _limit(attention))
        return _chained(conditions, condition, _pictures(images, "reference clip"))


class LTXMGPUReferenceAudio(io.ComfyNode):
    """Describes a piece of sound that the model hears before the clip begins."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "LTXMGPUReferenceAudio",
            "Reference Audio (LTX MGPU)",
            "Lets the model hear a piece of sound that ends where the clip begins, such as the voice to speak with.",
            [
                io.Latent.Input("audio_latent", tooltip="From Encode Audio (LTX MGPU)."),
                _strength_input("1 keeps the sound as it is, 0 ignores it."),
            ],
        )

    @classmethod
    def execute(cls, audio_latent: Latent, strength: float, conditions: Conditions | None = None) -> io.NodeOutput:
        sound = read_sound_latent(audio_latent, "audio latent of a Reference Audio")
        return _chained(conditions, ReferenceAudioCondition(strength), sound)


def _chained(conditions: Conditions | None, condition: Condition, tensor: Tensor) -> io.NodeOutput:
    """Gives a new chain with one condition more; the old one stays as it is for other nodes that hold it."""
    return io.NodeOutput((*(conditions or ()), (condition, tensor)))


def _pictures(images: Tensor, name: str) -> Tensor:
    check_pictures(images, name)
    return images.detach().to("cpu")


def _limit(attention: float) -> float | None:
    """Returns the attention to ask for; every negative value of the widget means no limit."""
    return None if attention < 0 else attention


def _schema(node_id: str, name: str, description: str, inputs: list[io.Input]) -> io.Schema:
    chain = LTX_MGPU_CONDITIONS.Input("conditions", optional=True, tooltip="Other conditions to go with this one.")
    return io.Schema(
        node_id=node_id,
        display_name=name,
        category="LTX MGPU",
        description=description,
        inputs=[*inputs, chain],
        outputs=[
            LTX_MGPU_CONDITIONS.Output(
                "chain", display_name="conditions", tooltip="For a stage, or for the next condition."
            )
        ],
    )


def _frame_input(meaning: str) -> io.Input:
    return io.Int.Input(
        "frame",
        default=0,
        min=-MAX_FRAME,
        max=MAX_FRAME,
        tooltip=f"{meaning}, in frames of the clip: 0 is the first, -1 the last.",
    )


def _strength_input(meaning: str) -> io.Input:
    return io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, tooltip=meaning)


def _attention_input(more: str) -> io.Input:
    tooltip = f"How strongly the clip and this condition see each other, 0 to 1; -1 sets no limit. {more}"
    return io.Float.Input(
        "attention", default=NO_LIMIT, min=NO_LIMIT, max=1.0, step=0.01, optional=True, tooltip=tooltip.strip()
    )


def _factor_input(name: str, meaning: str) -> io.Input:
    tooltip = (
        f"How many times {meaning}, as the LoRA was trained. 0 reads it from the LoRA's file when ltx is connected; "
        "where nothing is said it is 1."
    )
    return io.Int.Input(name, default=0, min=0, max=MAX_REFERENCE_FACTOR, tooltip=tooltip)
