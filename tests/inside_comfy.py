"""Checks of the nodes inside ComfyUI's modules, with a client that only records. Run by test_nodes_in_comfy.py.

Is a program of its own because ComfyUI's top-level modules (`nodes`, `utils`) must not enter pytest's process. Prints
a JSON object: name of the check -> null, or the traceback.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, sys.argv[1])  # ComfyUI's folder
sys.argv = ["main.py", "--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management as mm  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402


def load_pack() -> types.ModuleType:
    """Loads the pack as ComfyUI does: by path."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["pack"] = module
    spec.loader.exec_module(module)
    extension = asyncio.run(module.comfy_entrypoint())
    module.by_id = {node.GET_SCHEMA().node_id: node for node in asyncio.run(extension.get_node_list())}
    return module


pack = load_pack()

from mgpu_runtime.fleet import JobCancelled  # noqa: E402
from mgpu_runtime.pipeline.jobs import Decoded, SPStage, StageLatents, TDPStage  # noqa: E402
from mgpu_runtime.pipeline.settings import LTXSettings  # noqa: E402

Hidden = pack.nodes.comfy.io.Hidden

PROMPT = [[torch.zeros(1, 128, 192), {"ltx_mgpu_audio_context": torch.zeros(1, 128, 64)}]]
EMPTY = {"samples": torch.zeros(1, 128, 3, 4, 6)}
SP = {
    "fps": 24.0,
    "seed": 7,
    "schedule": "distilled",
    "steps": 0,
    "video_cfg": -1.0,
    "audio_cfg": -1.0,
    "video_stg": -1.0,
    "audio_stg": -1.0,
    "stg_block": -1,
    "rescale": -1.0,
    "modality_scale": -1.0,
}
TDP = {
    "seed": 7,
    "upscale": True,
    "mode": "tdp (audio kept)",
    "tiles": "1x2",
    "overlap": 5,
    "normalize_positions": True,
    "fps": 0.0,
}
FACTS = types.SimpleNamespace(
    version="2.3.0",
    version_tuple=(2, 3, 0),
    scale_factors=(8, 32, 32),
    has_video_encoder=True,
    has_audio_encoder=True,
    audio_latent_rate=25.0,
    decode_min_cells=1,
    has_diffusion_decoder=False,
    num_layers=48,
    is_distilled=False,
    video_channels=128,
    audio_channels=8,
    audio_mel_bins=16,
    upsample_scale=2.0,
    num_heads=32,
    require=lambda component: None,  # the file holds everything
)


class Client:
    """Records the jobs it is given, reports three steps, and stops when asked."""

    devices = ["cpu", "cpu"]

    def __init__(self, settings: LTXSettings | None = None) -> None:
        self.settings = settings or LTXSettings("/m/ltx.safetensors", "/m/gemma", "/m/up.safetensors", "cpu:2")
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def check(self) -> types.SimpleNamespace:
        return FACTS

    def sp_stage(self, *given: Any, watch: Any, **more: Any) -> StageLatents:
        self.calls.append((given, more))
        for step in range(3):
            watch.on_event(_event("progress", stage="stage", step=step, of=2, sigma=None))
            watch.on_event(_event("preview", image=torch.zeros(16, 16, 3, dtype=torch.uint8)))
            if watch.should_stop():
                raise JobCancelled("cancelled")
        return StageLatents(torch.ones(1, 128, 3, 4, 6), torch.ones(1, 8, 18, 16))

    tdp_stage = sp_stage

    def decode(self, *given: Any, watch: Any, **more: Any) -> Decoded:
        self.calls.append((given, more))
        return Decoded(torch.zeros(17, 8, 8, 3), torch.zeros(1, 2, 100), 48000)

    def encode_video(self, *given: Any, watch: Any, **more: Any) -> torch.Tensor:
        self.calls.append((given, more))
        return torch.zeros(1, 128, 3, 4, 6)

    def encode_audio(self, *given: Any, watch: Any, **more: Any) -> torch.Tensor:
        self.calls.append((given, more))
        return torch.zeros(1, 8, 18, 16)

    @property
    def last_job(self) -> Any:
        return self.calls[-1][0][0]


class Stage:
    """Holds a handle around a recording client, and what its jobs have shown."""

    def __init__(self) -> None:
        self.client = Client()
        self.released = 0
        self.guard = pack.nodes.comfy.MemoryGuard(self._release, 0)
        self.ltx = pack.nodes.handle.LTXHandle(self.client, self.guard, None)
        self.bars: list[tuple[Any, ...]] = []
        self.texts: list[str] = []
        server = types.SimpleNamespace(client_id="someone", send_progress_text=self._send_text)
        sys.modules["server"] = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=server))
        comfy.utils.set_progress_bar_global_hook(self._hook)

    def ready(self, node_id: str, graph: dict[str, Any] | None = None) -> Any:
        """Returns a node class as ComfyUI prepares it for a run."""
        return pack.by_id[node_id].PREPARE_CLASS_CLONE({Hidden.unique_id: "4", Hidden.prompt: graph or {}})

    def run_sp(self, **changes: Any) -> Any:
        return self.ready("LTXMGPUSPStage").execute(ltx=self.ltx, positive=PROMPT, latent=EMPTY, **{**SP, **changes})

    def _release(self) -> None:
        self.released += 1

    def _send_text(self, text: str, node_id: str, client_id: str) -> None:
        assert (node_id, client_id) == ("4", "someone")
        self.texts.append(text)

    def _hook(self, value: int, total: int, preview: Any, node_id: str | None = None) -> None:
        mm.throw_exception_if_processing_interrupted()  # as the server's own hook begins
        self.bars.append((value, total, preview, node_id))


def check_widgets_become_jobs() -> None:
    stage = Stage()
    stage.run_sp(schedule="auto", negative=PROMPT)
    assert stage.client.last_job == SPStage(seed=7, fps=24.0), stage.client.last_job  # guidance is left to the model
    video, sound = stage.run_sp().args
    assert video["frame_rate"] == sound["frame_rate"] == 24.0 and sound["type"] == "audio"

    stage.ready("LTXMGPUTDPUpscaleStage").execute(
        ltx=stage.ltx, positive=PROMPT, latent=video, audio_latent=sound, sigmas=torch.tensor([0.5, 0.0]), **TDP
    )
    assert stage.client.last_job == TDPStage(seed=7, fps=24.0, sigmas=(0.5, 0.0), tiles="1x2")

    decode = stage.ready("LTXMGPUDistributedDecode")
    images, audio = decode.execute(ltx=stage.ltx, latent=video, tiles="auto", overlap=4).args
    assert images.shape == (17, 8, 8, 3) and audio["waveform"].shape == (1, 2, 100) and audio["sample_rate"] == 48000


def check_clips_and_sound_become_latents_and_come_back() -> None:
    stage, images = Stage(), torch.zeros(17, 64, 96, 3)
    (video,) = stage.ready("LTXMGPUEncodeVideo").execute(ltx=stage.ltx, images=images, width=192, height=0).args
    assert video["samples"].shape == (1, 128, 3, 4, 6) and stage.client.calls[-1][1] == {"height": 0, "width": 192}
    audio, node = {"waveform": torch.zeros(1, 1, 99), "sample_rate": 44100}, stage.ready("LTXMGPUEncodeAudio")
    (sound,) = node.execute(ltx=stage.ltx, audio=audio, frames=0, fps=25.0, video_latent=video).args
    assert stage.client.calls[-1][1] == {"num_frames": 17, "fps": 25.0} and stage.client.calls[-1][0][1] == 44100
    assert sound["type"] == "audio" and sound["frame_rate"] == 25.0
    node.execute(ltx=stage.ltx, audio=audio, video_latent={**video, "frame_rate": 24.0})
    assert stage.client.calls[-1][1] == {"num_frames": 17, "fps": 24.0}
    node.execute(ltx=stage.ltx, audio=audio)
    assert stage.client.calls[-1][1] == {"num_frames": 0, "fps": 24.0}
    decode = stage.ready("LTXMGPUDistributedDecode")
    stage.client.decode = _with_a_line(stage.client.decode)
    images, heard = decode.execute(ltx=stage.ltx, latent=sound, tiles="auto", overlap=4).args
    assert stage.texts[-1] == "2 workers · sound alone: there are no frames · decoding", stage.texts
    assert images is None and heard["sample_rate"] == 48000 and stage.client.calls[-1][0][1] is None
    decode.execute(ltx=stage.ltx, latent={**video, "frame_rate": 24.0}, tiles="auto", overlap=4, audio_latent=sound)
    assert stage.client.last_job.fps == 24.0 and stage.client.calls[-1][1]["audio_latent"].shape == (1, 8, 18, 16)
    said = _refusal(lambda: node.execute(ltx=stage.ltx, audio=audio, video_latent=sound))
    assert "video latent" in said, said


def check_guidance_by_hand_goes_over_the_models_own() -> None:
    stage = Stage()
    stage.run_sp(schedule="ltx2", negative=PROMPT, video_cfg=4.0, stg_block=3)
    video, audio = stage.client.last_job.video, stage.client.last_job.audio
    assert (video.cfg, video.stg, video.stg_blocks, video.modality) == (4.0, 1.0, (3,), 3.0), video
    assert (audio.cfg, audio.rescale) == (7.0, 0.7), audio
    stage.run_sp(schedule="distilled", negative=PROMPT, video_cfg=2.0)
    video, audio = stage.client.last_job.video, stage.client.last_job.audio
    assert (video.cfg, video.stg, video.modality, audio.cfg) == (2.0, 0.0, 1.0, 1.0), video


def check_guidance_nodes_chain_by_noise_level() -> None:
    stage, node = Stage(), Stage().ready("LTXMGPUGuidance")
    names = [widget.id for widget in node.GET_SCHEMA().inputs if widget.id not in ("from_sigma", "guidance")]
    defaults = {name: "" if "blocks" in name else 0 if "skip" in name else -1.0 for name in names}
    early = {**defaults, "video_stg_blocks": "14, 19", "audio_stg_blocks": "28", "audio_rescale": 0.5}
    (first,) = node.execute(from_sigma=1.0, **early).args
    late = {**defaults, "video_cfg": 1.0, "video_skip_step": 2}
    (both,) = node.execute(from_sigma=0.4, guidance=first, **late).args
    stage.run_sp(schedule="ltx2", negative=PROMPT, guidance=both, sampler="res_2s", max_batch_size=1)
    job = stage.client.last_job
    assert (job.sampler, job.audio_mode, job.max_batch_size) == ("res_2s", "generate", 1), job
    (level, strong), (lower, weak) = job.video_by_sigma
    assert (level, lower, strong.cfg, strong.stg_blocks, weak.cfg) == (1.0, 0.4, 3.0, (14, 19), 1.0), job
    assert (weak.skip_step, weak.stg_blocks, strong.skip_step) == (2, (28,), 0), job
    assert [(g.cfg, g.rescale) for _, g in job.audio_by_sigma] == [(7.0, 0.5), (7.0, 0.7)], job
    said = _refusal(lambda: node.execute(from_sigma=0.4, guidance=both, **late))
    assert "two Guidance nodes of the chain hold from the noise level 0.4" in said, said
    said = _refusal(lambda: stage.run_sp(schedule="ltx2", negative=PROMPT, guidance=both, video_cfg=2.0))
    assert "put them back to -1, or disconnect" in said, said
    said = _refusal(lambda: node.execute(from_sigma=0.2, **{**defaults, "video_stg_blocks": "14;19"}))
    assert said.startswith("video_stg_blocks: STG blocks are numbers") and "audio" not in said, said


def check_missing_frame_rate_is_refused() -> None:
    stage = Stage()
    node = stage.ready("LTXMGPUTDPUpscaleStage")
    said = _refusal(lambda: node.execute(ltx=stage.ltx, positive=PROMPT, latent=EMPTY, **TDP))
    assert "carries no frame rate" in said, said


def check_b123_results_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        video, sound = Stage().run_sp().args
    assert not video["samples"].is_inference() and not sound["samples"].is_inference()
    video["samples"].add_(1)


def check_progress_preview_and_text_reach_the_node() -> None:
    stage = Stage()
    stage.run_sp()
    value, total, preview, node_id = stage.bars[-1]
    assert (value, total, node_id) == (2, 2, "4")
    assert preview[0] == "JPEG" and preview[1].size == (16, 16)
    assert stage.texts[0].startswith("2 workers · 72 tokens"), stage.texts
    assert "stage 2/2" in stage.texts[-1] and "s/step" in stage.texts[-1], stage.texts


def check_b124_interrupt_is_comfyuis_own_exception_whoever_sees_it_first() -> None:
    for bar_sees_it in (True, False):
        stage = Stage()
        if not bar_sees_it:
            comfy.utils.set_progress_bar_global_hook(None)
        mm.interrupt_current_processing()
        try:
            stage.run_sp()
        except mm.InterruptProcessingException:
            assert not mm.processing_interrupted()
        else:
            raise AssertionError("the job went on")


def check_b130_comfyui_gets_the_memory_back_when_it_asks() -> None:
    stage, other = Stage(), Stage()
    stage.guard.claim()
    stage.guard.claim()
    other.guard.claim()
    mm.load_models_gpu([stage.guard._patcher])  # merely reorders ComfyUI's list
    assert not stage.released
    mm.unload_all_models()
    assert stage.released == 1
    stage.guard.claim()
    mm.unload_all_models()
    assert stage.released == 2


def check_the_last_handle_ends_the_fleet_after_a_while() -> None:
    handle = pack.nodes.handle
    ended: list[str] = []

    class Quick(Client):
        def release(self) -> None:
            ended.append(self.settings.devices)

    handle.GRACE_SECONDS, handle.LTXClient = 1.0, Quick
    settings = LTXSettings("/m/a", devices="cpu:1")
    one, same = handle.open_handle(settings), handle.open_handle(settings)
    assert one.guard is same.guard  # two entries in ComfyUI's list would drive their one fleet out of the GPU
    del one
    _settle()
    assert not ended  # its twin still needs the fleet
    del same
    again = handle.open_handle(settings)  # as a new graph does just after the old one went
    _settle()
    assert not ended
    del again
    _settle()
    assert ended == ["cpu:1"], ended


def check_stages_look_at_their_input_before_the_prompt_is_encoded() -> None:
    stage = Stage()
    asked = {"ltx": stage.ltx, "positive": None, "negative": None, "latent": EMPTY, **SP}
    status = stage.ready("LTXMGPUSPStage").check_lazy_status
    assert status(**asked) == ["positive", "negative"]
    assert status(**{**asked, "positive": PROMPT, "negative": PROMPT}) == []
    for shape, words in (((1, 4, 8, 8), "1 x 4 x 8 x 8"), ((1, 16, 3, 4, 6), "16"), ((1, 128, 80, 32, 32), "81920")):
        latent = {"samples": torch.zeros(shape)}
        said = _refusal(lambda latent=latent: status(**{**asked, "latent": latent}))
        assert words in said.replace(",", ""), said
    without = {name: value for name, value in asked.items() if name != "negative"}
    said = _refusal(lambda: status(**{**without, "video_cfg": 3.0}))
    assert "negative" in said, said


def check_a_following_stage_that_cannot_run_stops_the_first() -> None:
    stage = Stage()
    asked = {"ltx": stage.ltx, "positive": None, "latent": EMPTY, **SP}
    graph = {
        "3": {"class_type": "EmptyLTXVLatentVideo", "inputs": {"width": 200, "height": 128, "length": 17}},
        "4": {"class_type": "LTXMGPUSPStage", "inputs": {"ltx": ["1", 0], "latent": ["3", 0]}},
        "5": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {"ltx": ["1", 0], "latent": ["4", 0], **TDP}},
    }

    def status() -> list[str]:
        return stage.ready("LTXMGPUSPStage", graph).check_lazy_status(**asked)

    assert "width must be a multiple of 32, got 200" in _refusal(status)
    graph["3"]["inputs"]["width"] = 192
    assert status() == ["positive"]
    graph["5"]["inputs"]["tiles"] = "40x40"
    assert "40x40" in _refusal(status)
    graph["5"]["inputs"]["tiles"] = ["9", 0]  # not known yet: left to the stage itself
    assert status() == ["positive"]


def check_what_follows_is_built_as_it_will_be() -> None:
    stage = Stage()
    asked = {"ltx": stage.ltx, "positive": None, "latent": EMPTY, **SP}
    tdp = {"ltx": ["1", 0], "latent": ["4", 0], "audio_latent": ["4", 1], **TDP}
    decode = {"ltx": ["1", 0], "latent": ["5", 0], "audio_latent": ["5", 1], "tiles": "2x3", "overlap": 2}

    def status(tdp_widgets: dict[str, Any], decode_widgets: dict[str, Any]) -> list[str]:
        graph = {
            "4": {"class_type": "LTXMGPUSPStage", "inputs": {"ltx": ["1", 0], "latent": ["3", 0]}},
            "5": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {**tdp, **tdp_widgets}},
            "6": {"class_type": "LTXMGPUDistributedDecode", "inputs": {**decode, **decode_widgets}},
        }
        return stage.ready("LTXMGPUSPStage", graph).check_lazy_status(**asked)

    link, first = ["9", 0], {"latent": ["4", 0], "audio_latent": ["4", 1]}
    for tdp_widgets, decode_widgets, words in (
        ({"fps": 12.0}, {}, "TDP Upscale Stage: the audio latent has 18 frames"),
        ({"fps": 300.0}, {}, "TDP Upscale Stage: fps must be 1 to 240"),
        ({"sampler": "dpm"}, {}, "TDP Upscale Stage: sampler must be one of"),
        ({"mode": "both"}, {}, "TDP Upscale Stage: mode must be one of"),
        ({"seed": -1}, {}, "TDP Upscale Stage: seed must be"),
        ({}, {"tiles": "9x9"}, "Distributed Decode: Tiles '9x9' do not fit"),
        ({"mode": link}, {"tiles": "9x9"}, "Distributed Decode: Tiles '9x9' do not fit"),
        ({}, {**first, "tiles": "2x5"}, "Distributed Decode: Tiles '2x5' do not fit"),
    ):
        said = _refusal(lambda one=tdp_widgets, two=decode_widgets: status(one, two))
        assert said.startswith(words), said
    for tdp_widgets, decode_widgets in (
        ({}, {}),
        ({"fps": 24.0}, {"tiles": link}),
        ({"fps": 12.0, "audio_latent": ["8", 0]}, {}),
        ({"fps": link, "sampler": link, "seed": link, "mode": link}, {"overlap": link, "tiles": "9x9"}),
        ({"mode": link, "tiles": "40x40"}, {}),
        ({"upscale": link, "tiles": "3x3"}, {"tiles": "9x9"}),
        ({"overlap": link, "tiles": "9x9"}, {"ltx": ["7", 0], "tiles": "9x9"}),
    ):
        assert status(tdp_widgets, decode_widgets) == ["positive"], (tdp_widgets, decode_widgets)


def check_an_upscale_stage_looks_at_the_decode_behind_it() -> None:
    stage = Stage()
    graph = {
        "4": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {"ltx": ["1", 0]}},
        "6": {
            "class_type": "LTXMGPUDistributedDecode",
            "inputs": {"ltx": ["1", 0], "latent": ["4", 0], "tiles": "9x9", "overlap": 4},
        },
    }
    asked = {"ltx": stage.ltx, "positive": None, "latent": {**EMPTY, "frame_rate": 24.0}, **TDP}

    def status(**changes: Any) -> list[str]:
        return stage.ready("LTXMGPUTDPUpscaleStage", graph).check_lazy_status(**asked, **changes)

    assert _refusal(status).startswith("Distributed Decode: Tiles '9x9' do not fit")
    graph["6"]["inputs"]["tiles"] = "2x2"
    assert status() == ["positive"]
    said = _refusal(lambda: status(audio_latent={"samples": torch.zeros(1, 8, 26, 16)}))
    assert "26 frames" in said and "needs 18" in said, said


def _with_a_line(job: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a client's method that first says a line of text."""

    def said(*given: Any, watch: Any, **more: Any) -> Any:
        watch.on_event(_event("log", text="decoding"))
        return job(*given, watch=watch, **more)

    return said


def _event(kind: str, **data: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(kind=kind, job_id="1", rank=0, data=data)


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _settle() -> None:
    gc.collect()
    time.sleep(1.5)


_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    mm.InterruptProcessingException,
)


def report(members: dict[str, Any]) -> None:
    """Runs the checks among a program's members and prints how each ended."""
    results: dict[str, str | None] = {}
    for name, check in list(members.items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = None
            except _FAILURES:
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    report(globals())
