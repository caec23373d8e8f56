"""Guidance: every guidance value of both streams, and others from a noise level on. Describes; no worker is asked."""

from __future__ import annotations

from .comfy import LTX_MGPU_GUIDANCE, io
from .guidance import FROM_THE_START, GuidanceSet, StreamGuidance, read_blocks
from .widgets import guidance_input

_STREAMS = {"video": "the picture", "audio": "the sound"}
MAX_SKIP = 100


class LTXMGPUGuidance(io.ComfyNode):
    """Describes guidance for SP Stage."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUGuidance",
            display_name="Guidance (LTX MGPU)",
            category="LTX MGPU",
            description="Sets how strongly picture and sound follow the prompt, each with values of its own. Chain a "
            "second one with a lower from_sigma to use other values from that noise level on.",
            inputs=[
                *(widget for stream in _STREAMS for widget in _widgets(stream)),
                io.Float.Input(
                    "from_sigma",
                    default=FROM_THE_START,
                    min=0.001,
                    max=1.0,
                    step=0.001,
                    tooltip="The noise level from which on these values hold, down to 0 or to the next lower set of "
                    "the chain. 1 is from the start. Above the highest of the chain the guidance widgets of SP Stage "
                    "hold, and where they are -1 the model's own values.",
                ),
                LTX_MGPU_GUIDANCE.Input(
                    "guidance", optional=True, tooltip="Another Guidance node, whose values hold at other noise levels."
                ),
            ],
            outputs=[
                LTX_MGPU_GUIDANCE.Output("guidance_out", display_name="guidance", tooltip="For SP Stage."),
            ],
        )

    @classmethod
    def execute(
        cls, from_sigma: float, guidance: tuple[GuidanceSet, ...] = (), **widgets: float | int | str
    ) -> io.NodeOutput:
        if any(one.from_sigma == from_sigma for one in guidance):
            raise ValueError(
                f"two Guidance nodes of the chain hold from the noise level {from_sigma:g}: give one another from_sigma"
            )
        made = GuidanceSet(from_sigma, _stream("video", widgets), _stream("audio", widgets))
        return io.NodeOutput((*guidance, made))


def _stream(name: str, widgets: dict[str, float | int | str]) -> StreamGuidance:
    values = {key.removeprefix(f"{name}_"): value for key, value in widgets.items() if key.startswith(f"{name}_")}
    try:
        blocks = read_blocks(values["stg_blocks"])
    except ValueError as error:  # ComfyUI would show a sentence of validate_inputs at every input that it takes
        raise ValueError(f"{name}_stg_blocks: {error}") from error
    return StreamGuidance(**{**values, "stg_blocks": blocks})


def _widgets(stream: str) -> list[io.Input]:
    of = _STREAMS[stream]

    return [
        guidance_input(f"{stream}_cfg", "1", f"How strongly {of} follows the prompt and avoids the negative prompt."),
        guidance_input(
            f"{stream}_stg", "0", f"Spatio-temporal guidance of {of}: away from what a disturbed model would make."
        ),
        io.String.Input(
            f"{stream}_stg_blocks",
            default="",
            tooltip=f'The blocks that spatio-temporal guidance disturbs for {of}, such as "28" or "14, 19"; empty '
            "takes the model's own.",
        ),
        guidance_input(
            f"{stream}_rescale", "0", f"Pulls the contrast of the guided {stream} back to normal.", high=1.0
        ),
        guidance_input(f"{stream}_modality", "1", f"How strongly {of} follows the other of picture and sound."),
        io.Int.Input(
            f"{stream}_skip_step",
            default=0,
            min=0,
            max=MAX_SKIP,
            tooltip=f"After each guided step, this many steps reuse its prediction of {of}: faster, coarser.",
        ),
    ]
