"""Checks of the LoRA node inside ComfyUI's modules. Run by checks_in_comfy.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_stage import EMPTY, PROMPT, SP, TDP, Client, Stage, pack, refusal
from safetensors.torch import save_file

from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import LoRASpec, PromptContext
from mgpu_runtime.pipeline.settings import LTXSettings

ROOT = Path(__file__).parents[1]
LORAS = Path(tempfile.mkdtemp(prefix="loras "))
folder_paths.add_model_folder_path("loras", str(LORAS))
TOY = LTXClient(LTXSettings(str(ROOT / "assets" / "toy" / "ltx-toy-23.safetensors"), devices="cpu:1"))
NODE = pack.by_id["LTXMGPULoRA"]


class Checking(Client):
    """Checks LoRAs against the toy model, and records as its parent does."""

    def check_loras(self, specs: Any) -> Any:
        return TOY.check_loras(specs)


def lora(name: str, *, size: int = 192, **more: torch.Tensor) -> str:
    """Writes a LoRA of one module into models/loras; returns its name in the list."""
    module = "diffusion_model.transformer_blocks.0.attn1.to_q"
    pair = {f"{module}.lora_A.weight": torch.ones(2, size), f"{module}.lora_B.weight": torch.ones(size, 2)}
    save_file({**pair, **{key.replace("__", "."): value for key, value in more.items()}}, LORAS / name)
    return name


def stage() -> Stage:
    """Returns a stage whose client checks LoRAs."""
    made = Stage()
    made.client = Checking()
    made.ltx = pack.nodes.handle.LTXHandle(made.client, made.guard, None)
    return made


def check_loras_ride_in_the_handle_and_in_the_jobs_of_the_stages_behind() -> None:
    here = stage()
    names = lora("one.safetensors"), lora("zwei — два.safetensors")
    (one,) = NODE.execute(ltx=here.ltx, lora=names[0], strength=1.0).args
    (both,) = NODE.execute(ltx=one, lora=names[1], strength=-0.5).args
    specs = tuple(LoRASpec(str(LORAS / name), strength) for name, strength in zip(names, (1.0, -0.5), strict=True))
    assert (here.ltx.loras, one.loras, both.loras) == ((), specs[:1], specs)
    assert both.client is here.client and both.guard is here.guard  # the same fleet, which nothing restarts
    node = here.ready("LTXMGPUSPStage")
    assert node.check_lazy_status(ltx=both, latent=EMPTY, positive=None, **SP) == ["positive"]
    video, sound = node.execute(ltx=both, positive=PROMPT, latent=EMPTY, **SP).args
    assert here.client.last_job.loras == specs
    here.ready("LTXMGPUTDPUpscaleStage").execute(ltx=one, positive=PROMPT, latent=video, audio_latent=sound, **TDP)
    assert here.client.last_job.loras == specs[:1]
    here.ready("LTXMGPUSPStage").execute(ltx=here.ltx, positive=PROMPT, latent=EMPTY, **SP)
    assert here.client.last_job.loras == ()


def check_encode_prompt_sends_loras_and_what_becomes_of_the_text_encoder() -> None:
    here, sent = stage(), []
    context = PromptContext(torch.zeros(1, 128, 192), torch.zeros(1, 128, 64))
    here.client.encode = lambda *given, watch, **more: sent.append((given, more)) or (context, context)
    (one,) = NODE.execute(ltx=here.ltx, lora=lora("one.safetensors"), strength=1.0).args
    node = here.ready("LTXMGPUEncodePrompt")
    node.execute(ltx=one, prompt="a ball", negative_prompt="", max_length=128)  # as a graph from before asks
    node.execute(
        ltx=one, prompt="a ball", negative_prompt="", max_length=128, mode="sharded", release_text_encoder=True
    )
    assert [given for given, _ in sent] == [("a ball", "", 128)] * 2
    options = [(more["mode"], more["release"], more["loras"]) for _, more in sent]
    assert options == [("auto", False, one.loras), ("sharded", True, one.loras)]


def check_a_wrong_file_is_a_sentence_at_its_widget() -> None:
    assert NODE.validate_inputs(lora=lora("one.safetensors")) is True and NODE.validate_inputs() is True
    assert "models/loras" in NODE.validate_inputs(lora="gone.safetensors")
    assert "is a DoRA" in NODE.validate_inputs(lora=lora("dora.safetensors", x__dora_scale=torch.ones(1)))
    (LORAS / "cut.safetensors").write_bytes((LORAS / "one.safetensors").read_bytes()[:-10])
    assert "cut off" in NODE.validate_inputs(lora="cut.safetensors")


def check_a_lora_for_another_model_is_refused_at_the_node() -> None:
    name = lora("wide.safetensors", size=4096)
    said = refusal(lambda: NODE.execute(ltx=stage().ltx, lora=name, strength=1.0))
    assert "another model" in said and "[4096, 4096]" in said and "[192, 192]" in said, said


def check_a_replaced_file_runs_again_and_its_path_is_not_told() -> None:
    name = lora("one.safetensors")
    before = NODE.fingerprint_inputs(ltx=None, lora=name, strength=1.0)
    assert before == NODE.fingerprint_inputs(ltx=None, lora=name, strength=0.5) and "/" not in before
    os.utime(LORAS / name, ns=(1, 1))
    assert NODE.fingerprint_inputs(ltx=None, lora=name, strength=1.0) != before
    assert NODE.fingerprint_inputs(ltx=None, lora="gone.safetensors", strength=1.0) is None


def check_a_lora_that_a_later_stage_cannot_take_stops_the_first() -> None:
    here = stage()
    graph = {
        "4": {"class_type": "LTXMGPUSPStage", "inputs": {"ltx": ["1", 0], "latent": ["3", 0]}},
        "5": {"class_type": "LTXMGPUTDPUpscaleStage", "inputs": {"ltx": ["7", 0], "latent": ["4", 0], **TDP}},
        "6": {"class_type": "LTXMGPULoRA", "inputs": {"ltx": ["1", 0], "lora": lora("one.safetensors")}},
        "7": {"class_type": "LTXMGPULoRA", "inputs": {"ltx": ["6", 0], "lora": lora("wide.safetensors", size=4096)}},
    }

    def status() -> list[str]:
        return here.ready("LTXMGPUSPStage", graph).check_lazy_status(ltx=here.ltx, latent=EMPTY, positive=None, **SP)

    assert "LoRA (LTX MGPU): " in (said := refusal(status)) and "another model" in said, said
    graph["7"]["inputs"]["lora"] = ["9", 0]  # not known yet: left to the node itself
    assert status() == ["positive"]
