"""The nodes with ComfyUI's real modules and a client that only records: what is sent, shown, cancelled and freed.

Each test runs a process of its own, since ComfyUI's top-level modules (`nodes`, `utils`) must not enter pytest's.
"""

from __future__ import annotations

from tests.host_fixtures import run_in_comfy

SETUP = """
import types, torch
pack = load_pack("pack")
SHOWN = []
class Server:
    client_id = "someone"
    def send_progress_text(self, text, node, client): SHOWN.append((node, text))
sys.modules["server"] = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=Server()))
nodes = {node.GET_SCHEMA().node_id: node for node in pack_nodes(pack)}
import comfy.model_management as mm, comfy.utils
from mgpu_runtime.fleet import JobCancelled
from mgpu_runtime.pipeline.jobs import Decoded, PromptContext, SPStage, StageLatents, TDPStage
from mgpu_runtime.pipeline.settings import LTXSettings
Hidden = pack.nodes.comfy.io.Hidden
BARS = []
comfy.utils.set_progress_bar_global_hook(
    lambda value, total, preview, node_id=None: (mm.throw_exception_if_processing_interrupted(),
                                                 BARS.append((value, total, preview, node_id))))

def event(kind, **data):
    return types.SimpleNamespace(kind=kind, job_id="1", rank=0, data=data)

FACTS = types.SimpleNamespace(version="2.3.0", num_layers=48, is_distilled=False, video_channels=128,
    audio_channels=8, audio_mel_bins=16, upsample_scale=2.0, num_heads=32)

class Client:
    settings = LTXSettings("/m/model.safetensors", "/m/gemma", "/m/up.safetensors", "cpu:2")
    devices = ["cpu", "cpu"]
    calls = []
    def check(self): return FACTS
    def _seen(self, name, *given, watch=None, **more):
        self.calls.append((name, given, more))
        for step in range(3):
            watch.on_event(event("progress", stage=name, step=step, of=2, sigma=None))
            watch.on_event(event("preview", image=torch.zeros(16, 16, 3, dtype=torch.uint8)))
            if watch.should_stop():
                raise JobCancelled("cancelled")
        return StageLatents(torch.ones(1, 128, 3, 4, 6), torch.ones(1, 8, 18, 16))
    def sp_stage(self, *given, **more): return self._seen("sp", *given, **more)
    def tdp_stage(self, *given, **more): return self._seen("tdp", *given, **more)
    def decode(self, *given, **more):
        self._seen("decode", *given, **more)
        return Decoded(torch.zeros(17, 8, 8, 3), torch.zeros(1, 2, 100), 48000)

released = []
guard = pack.nodes.comfy.MemoryGuard(lambda: released.append(1), 0)
ltx = pack.nodes.handle.LTXHandle(Client(), guard, None)
prompt = [[torch.zeros(1, 128, 192), {"ltx_mgpu_audio_context": torch.zeros(1, 128, 64)}]]
empty = {"samples": torch.zeros(1, 128, 3, 4, 6)}

def ready(node_id, graph=None):
    return nodes[node_id].PREPARE_CLASS_CLONE({Hidden.unique_id: "4", Hidden.prompt: graph or {}})

SP = dict(fps=24.0, seed=7, schedule="auto", steps=0, video_cfg=-1.0, audio_cfg=-1.0, video_stg=-1.0, audio_stg=-1.0,
          stg_block=-1, rescale=-1.0, modality_scale=-1.0)
TDP = dict(seed=7, upscale=True, mode="tdp (audio kept)", tiles="1x2", overlap=5, normalize_positions=True, fps=0.0)

def sentence(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")
"""


def test_widgets_become_jobs() -> None:
    code = """
with torch.inference_mode():
    out = ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, latent=empty, **SP)
name, given, more = Client.calls[-1]
assert given[0] == SPStage(seed=7, fps=24.0), given[0]          # guidance left to the model stays open
assert given[2] is None and more["audio_latent"] is None
video, sound = out.args
assert video["frame_rate"] == sound["frame_rate"] == 24.0 and sound["type"] == "audio"

ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, negative=prompt, latent=empty,
    sigmas=torch.tensor([1.0, 0.5, 0.0]), **{**SP, "video_cfg": 4.0, "stg_block": 3})
job = Client.calls[-1][1][0]
assert job.sigmas == (1.0, 0.5, 0.0)
assert (job.video.cfg, job.video.stg, job.video.stg_blocks, job.video.modality) == (4.0, 1.0, (3,), 3.0), job.video
assert (job.audio.cfg, job.audio.rescale) == (7.0, 0.7), job.audio

ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, latent=empty,
    **{**SP, "schedule": "distilled", "video_cfg": 2.0})
job = Client.calls[-1][1][0]
assert (job.video.cfg, job.video.stg, job.video.modality, job.audio.cfg) == (2.0, 0.0, 1.0, 1.0), job

ready("LTXMGPUTDPUpscaleStage").execute(ltx=ltx, positive=prompt, latent=video, audio_latent=sound, **TDP)
assert Client.calls[-1][1][0] == TDPStage(seed=7, fps=24.0, tiles="1x2"), Client.calls[-1]
said = sentence(lambda: ready("LTXMGPUTDPUpscaleStage").execute(ltx=ltx, positive=prompt, latent=empty, **TDP))
assert "carries no frame rate" in said, said

images, audio = ready("LTXMGPUDistributedDecode").execute(ltx=ltx, latent=video, tiles="auto", overlap=4).args
assert images.shape == (17, 8, 8, 3) and audio["sample_rate"] == 48000 and audio["waveform"].shape == (1, 2, 100)
"""
    run_in_comfy(SETUP + code)


def test_b123_results_are_ordinary_tensors() -> None:
    code = """
with torch.inference_mode():
    out = ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, latent=empty, **SP)
assert not out.args[0]["samples"].is_inference() and not out.args[1]["samples"].is_inference()
out.args[0]["samples"].add_(1)
"""
    run_in_comfy(SETUP + code)


def test_progress_preview_and_text_reach_the_node() -> None:
    code = """
ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, latent=empty, **SP)
assert BARS[-1][:2] == (2, 2) and BARS[-1][3] == "4"
assert BARS[-1][2][0] == "JPEG" and BARS[-1][2][1].size == (16, 16)
texts = [text for node, text in SHOWN]
assert texts[0].startswith("2 workers · 72 tokens") and "sp 2/2" in texts[-1] and "s/step" in texts[-1], texts
"""
    run_in_comfy(SETUP + code)


def test_b124_interrupt_stops_the_job_and_is_comfyuis_own_exception() -> None:
    code = """
for seen_by_the_bar in (True, False):
    if not seen_by_the_bar:
        comfy.utils.set_progress_bar_global_hook(None)
    mm.interrupt_current_processing()
    try:
        ready("LTXMGPUSPStage").execute(ltx=ltx, positive=prompt, latent=empty, **SP)
    except mm.InterruptProcessingException:
        assert not mm.processing_interrupted()
    else:
        raise AssertionError("the job went on")
"""
    run_in_comfy(SETUP + code)


def test_b130_comfyui_gets_the_memory_back_when_it_asks() -> None:
    code = """
guard.claim(); guard.claim()
assert not released
other = pack.nodes.comfy.MemoryGuard(lambda: None, 0)
other.claim()                                   # reorders the list: the fleet stays
mm.load_models_gpu([guard._patcher])
assert not released
mm.unload_all_models()
assert released == [1]
guard.claim(); mm.unload_all_models()
assert released == [1, 1]
"""
    run_in_comfy(SETUP + code)


def test_the_last_handle_ends_the_fleet_after_a_while() -> None:
    code = """
import gc, time
handle = pack.nodes.handle
handle.GRACE_SECONDS = 0.2
ended = []
class Quick(Client):
    def __init__(self, settings): self.settings = settings
    def release(self): ended.append(self.settings.devices)
handle.LTXClient = Quick
handle.os = types.SimpleNamespace(path=types.SimpleNamespace(getsize=lambda path: 0))
one = handle.open_handle(LTXSettings("/m/a", devices="cpu:1"))
same = handle.open_handle(LTXSettings("/m/a", devices="cpu:1"))
del one; gc.collect(); time.sleep(0.5)
assert not ended                                # its twin still needs the fleet
del same; gc.collect()
again = handle.open_handle(LTXSettings("/m/a", devices="cpu:1"))    # as a new graph does just after the old one went
time.sleep(0.5)
assert not ended
del again; gc.collect(); time.sleep(0.5)
assert ended == ["cpu:1"], ended
"""
    run_in_comfy(SETUP + code)


def test_stages_check_themselves_before_the_prompt_is_encoded() -> None:
    code = """
stage = ready("LTXMGPUSPStage")
asked = dict(ltx=ltx, positive=None, negative=None, latent=empty, **SP)
assert stage.check_lazy_status(**asked) == ["positive", "negative"]
assert stage.check_lazy_status(**{**asked, "positive": prompt, "negative": prompt}) == []
said = sentence(lambda: stage.check_lazy_status(**{**asked, "latent": {"samples": torch.zeros(1, 4, 8, 8)}}))
assert "1 x 4 x 8 x 8" in said, said
said = sentence(lambda: stage.check_lazy_status(**{**asked, "latent": {"samples": torch.zeros(1, 16, 3, 4, 6)}}))
assert "16" in said and "128" in said, said
said = sentence(lambda: stage.check_lazy_status(**{**asked, "latent": {"samples": torch.zeros(1, 128, 80, 32, 32)}}))
assert "81920" in said.replace(",", "") and "32768" in said.replace(",", ""), said

graph = {"4": {"class_type": "LTXMGPUSPStage", "inputs": {"ltx": ["1", 0], "latent": ["3", 0]}},
         "3": {"class_type": "EmptyLTXVLatentVideo", "inputs": {"width": 200, "height": 128, "length": 17}},
         "5": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {"ltx": ["1", 0], "latent": ["4", 0], **TDP}}}
said = sentence(lambda: ready("LTXMGPUSPStage", graph).check_lazy_status(**asked))
assert "width must be a multiple of 32, got 200" in said, said

graph["3"]["inputs"]["width"] = 192             # a second stage that cannot run stops the first
graph["5"]["inputs"].update(tiles="40x40")
assert "tile" in sentence(lambda: ready("LTXMGPUSPStage", graph).check_lazy_status(**asked)).lower()
graph["5"]["inputs"].update(tiles=["9", 0])     # not known yet: left to the stage itself
assert ready("LTXMGPUSPStage", graph).check_lazy_status(**asked)
"""
    run_in_comfy(SETUP + code)
