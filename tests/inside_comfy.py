"""Checks of the nodes inside ComfyUI's modules, with a client that only records. Run by checks_in_comfy.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.model_management as mm
import comfy.utils
import torch
from comfy_stage import EMPTY, PROMPT, SP, TDP, Client, Stage, event, pack, refusal

from mgpu_runtime.pipeline.jobs import SPStage, TDPStage
from mgpu_runtime.pipeline.settings import LTXSettings


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
    said = refusal(lambda: node.execute(ltx=stage.ltx, audio=audio, video_latent=sound))
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
    said = refusal(lambda: node.execute(from_sigma=0.4, guidance=both, **late))
    assert "two Guidance nodes of the chain hold from the noise level 0.4" in said, said
    said = refusal(lambda: stage.run_sp(schedule="ltx2", negative=PROMPT, guidance=both, video_cfg=2.0))
    assert "put them back to -1, or disconnect" in said, said
    said = refusal(lambda: node.execute(from_sigma=0.2, **{**defaults, "video_stg_blocks": "14;19"}))
    assert said.startswith("video_stg_blocks: STG blocks are numbers") and "audio" not in said, said


def check_missing_frame_rate_is_refused() -> None:
    stage = Stage()
    node = stage.ready("LTXMGPUTDPUpscaleStage")
    said = refusal(lambda: node.execute(ltx=stage.ltx, positive=PROMPT, latent=EMPTY, **TDP))
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

    settings = LTXSettings("/m/a", devices="cpu:1")
    with mock.patch.multiple(handle, GRACE_SECONDS=0.5, LTXClient=Quick):
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
        said = refusal(lambda latent=latent: status(**{**asked, "latent": latent}))
        assert words in said.replace(",", ""), said
    without = {name: value for name, value in asked.items() if name != "negative"}
    said = refusal(lambda: status(**{**without, "video_cfg": 3.0}))
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

    assert "width must be a multiple of 32, got 200" in refusal(status)
    graph["3"]["inputs"]["width"] = 192
    assert status() == ["positive"]
    graph["5"]["inputs"]["tiles"] = "40x40"
    assert "40x40" in refusal(status)
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
        said = refusal(lambda one=tdp_widgets, two=decode_widgets: status(one, two))
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

    assert refusal(status).startswith("Distributed Decode: Tiles '9x9' do not fit")
    graph["6"]["inputs"]["tiles"] = "2x2"
    assert status() == ["positive"]
    said = refusal(lambda: status(audio_latent={"samples": torch.zeros(1, 8, 26, 16)}))
    assert "26 frames" in said and "needs 18" in said, said


def _with_a_line(job: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a client's method that first says a line of text."""

    def said(*given: Any, watch: Any, **more: Any) -> Any:
        watch.on_event(event("log", text="decoding"))
        return job(*given, watch=watch, **more)

    return said


def _settle() -> None:
    gc.collect()
    time.sleep(1.0)
