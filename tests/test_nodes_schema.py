"""What the running server says about the nodes, and the inputs it refuses; one server, no worker started."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_host import ComfyHost, JobError, RequestError
from tests.host_fixtures import EMPTY, ENCODE, IMAGE_WORKFLOW, LOAD, SP, TDP, fleet_pids, workflow_graph

NODES = {
    "LTXMGPULoad": ("Load LTX MGPU", ["LTX_MGPU"]),
    "LTXMGPUEncodePrompt": ("Encode Prompt (LTX MGPU)", ["CONDITIONING", "CONDITIONING"]),
    "LTXMGPUSPStage": ("SP Stage", ["LATENT", "LATENT"]),
    "LTXMGPUTDPUpscaleStage": ("TDP Upscale Stage", ["LATENT", "LATENT"]),
    "LTXMGPUDistributedDecode": ("Distributed Decode", ["IMAGE", "AUDIO"]),
    "LTXMGPUPredictLength": ("Predict Length (LTX MGPU)", ["INT", "FLOAT"]),
    "LTXMGPUGuidance": ("Guidance (LTX MGPU)", ["LTX_MGPU_GUIDANCE"]),
    "LTXMGPUImageCondition": ("Image Condition (LTX MGPU)", ["LTX_MGPU_CONDITIONS"]),
    "LTXMGPULatentCondition": ("Latent Condition (LTX MGPU)", ["LTX_MGPU_CONDITIONS"]),
    "LTXMGPUReferenceClip": ("Reference Clip (LTX MGPU)", ["LTX_MGPU_CONDITIONS"]),
    "LTXMGPUReferenceAudio": ("Reference Audio (LTX MGPU)", ["LTX_MGPU_CONDITIONS"]),
    "LTXMGPUEncodeVideo": ("Encode Video (LTX MGPU)", ["LATENT"]),
    "LTXMGPUEncodeAudio": ("Encode Audio (LTX MGPU)", ["LATENT"]),
    "LTXMGPULoRA": ("LoRA (LTX MGPU)", ["LTX_MGPU"]),
}

# Released inputs keep their order, since saved workflows hold widget values by position. Append here, never insert.
INPUT_ORDER = {
    "LTXMGPULoad": "checkpoint text_encoder upsampler devices precision sp_max_tokens video_vae audio_vae "
    "text_projection duration_head transport",
    "LTXMGPUEncodePrompt": "ltx prompt negative_prompt max_length mode release_text_encoder",
    "LTXMGPUSPStage": "ltx positive latent fps seed schedule steps video_cfg audio_cfg video_stg audio_stg stg_block "
    "rescale modality_scale negative audio_latent sigmas sampler max_batch_size audio_mode schedule_tokens conditions "
    "guidance",
    "LTXMGPUTDPUpscaleStage": "ltx positive latent seed upscale mode tiles overlap normalize_positions fps "
    "audio_latent sigmas sampler conditions",
    "LTXMGPUDistributedDecode": "ltx latent tiles overlap audio_latent",
    "LTXMGPUPredictLength": "ltx positive fps max_seconds",
    "LTXMGPUGuidance": "video_cfg video_stg video_stg_blocks video_rescale video_modality video_skip_step audio_cfg "
    "audio_stg audio_stg_blocks audio_rescale audio_modality audio_skip_step from_sigma guidance",
    "LTXMGPUImageCondition": "image frame strength crf attention conditions",
    "LTXMGPULatentCondition": "latent frame strength attention conditions",
    "LTXMGPUReferenceClip": "images strength downscale time_scale attention ltx conditions",
    "LTXMGPUReferenceAudio": "audio_latent strength conditions",
    "LTXMGPUEncodeVideo": "ltx images width height",
    "LTXMGPUEncodeAudio": "ltx audio frames fps video_latent",
    "LTXMGPULoRA": "ltx lora strength",
}


@pytest.mark.parametrize("node_id", NODES)
def test_node_is_registered_with_names_tooltips_and_order(host: ComfyHost, node_id: str) -> None:
    info = host.get(f"/object_info/{node_id}")[node_id]
    assert (info["display_name"], info["output"]) == NODES[node_id]
    assert info["category"] == "LTX MGPU" and info["description"]
    assert all(info["output_tooltips"])
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert all(options[1].get("tooltip") for options in inputs.values())
    order = info["input_order"]["required"] + info["input_order"].get("optional", [])
    assert order == INPUT_ORDER[node_id].split()


def test_model_lists_show_files_and_gemma_folders(host: ComfyHost) -> None:
    required = host.get("/object_info/LTXMGPULoad")["LTXMGPULoad"]["input"]["required"]
    assert required["checkpoint"][1]["options"] == ["ltx-toy-23.safetensors"]
    assert required["text_encoder"][1]["options"] == ["gemma-toy"]
    assert required["upsampler"][1]["options"] == ["none", "ltx-toy-upsampler-x2.safetensors"]


def test_load_lists_transformers_and_parts_in_files_of_their_own(host: ComfyHost) -> None:
    whole = (host.base / "models" / "checkpoints" / "ltx-toy-23.safetensors").resolve()
    for place in ("diffusion_models/dit.safetensors", "vae/sound.safetensors", "text_encoders/projection.safetensors"):
        path = host.base / "models" / place
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(whole)
    inputs = host.get("/object_info/LTXMGPULoad")["LTXMGPULoad"]["input"]
    checkpoints = inputs["required"]["checkpoint"][1]["options"]
    assert checkpoints[0] == "ltx-toy-23.safetensors" and checkpoints[-1] == "dit.safetensors"
    parts = {name: options[1] for name, options in inputs["optional"].items()}
    assert parts.pop("transport")["default"] == "auto"
    assert {name: options["default"] for name, options in parts.items()} == dict.fromkeys(parts, "none")
    assert parts["video_vae"]["options"] == parts["audio_vae"]["options"]
    assert "sound.safetensors" in parts["audio_vae"]["options"]
    assert "projection.safetensors" in parts["text_projection"]["options"]
    assert parts["duration_head"]["options"] == ["none"]


# Refused when queued: the text is shown at the input.
AT_THE_INPUT = [
    (LOAD, {"devices": "0,0"}, "devices", "0"),
    (LOAD, {"devices": "gpu"}, "devices", "gpu"),
    (LOAD, {"devices": "cpu:0"}, "devices", "cpu:0"),
    (LOAD, {"devices": "0,1"}, "devices", "0,1"),
    (LOAD, {"sp_max_tokens": 0}, "sp_max_tokens", "smaller than min"),
    (ENCODE, {"max_length": 100}, "max_length", "use 128 or 256"),
    (ENCODE, {"max_length": 0}, "max_length", "multiple of 128"),
    (EMPTY, {"width": 0}, "width", "smaller than min"),
    (EMPTY, {"length": -1}, "length", "smaller than min"),
    (SP, {"fps": 0}, "fps", "smaller than min"),
    (SP, {"seed": -1}, "seed", "smaller than min"),
    (SP, {"steps": -1}, "steps", "smaller than min"),
    (TDP, {"tiles": "2by2"}, "tiles", "2by2"),
    (TDP, {"tiles": "0x2"}, "tiles", "0x2"),
    (TDP, {"overlap": -1}, "overlap", "smaller than min"),
]


@pytest.mark.parametrize(
    ("node", "change", "input_name", "words"), AT_THE_INPUT, ids=[str(case[1]) for case in AT_THE_INPUT]
)
def test_bad_widget_is_refused_at_its_input(
    host: ComfyHost, node: str, change: dict[str, Any], input_name: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        host.queue(workflow_graph(**{f"n{node}": change}))
    assert caught.value.status == 400
    errors = caught.value.answer["node_errors"][node]["errors"]
    assert [error["extra_info"]["input_name"] for error in errors] == [input_name]
    assert words in errors[0]["message"] + errors[0]["details"]


# Refused when run, before any worker starts.
BEFORE_ANY_WEIGHT = [
    (EMPTY, {"width": 200}, SP, "width must be a multiple of 32, got 200"),
    (EMPTY, {"height": 100}, SP, "height must be a multiple of 32, got 100"),
    (EMPTY, {"length": 20}, SP, "length must be 8 n + 1, got 20"),
    (LOAD, {"checkpoint": "absent.safetensors"}, LOAD, "No file 'absent.safetensors' under models/checkpoints"),
    (LOAD, {"checkpoint": "../../secret"}, LOAD, "No file '../../secret'"),
    (LOAD, {"text_encoder": "absent"}, LOAD, "No file 'absent' under models/text_encoders"),
    (LOAD, {"video_vae": "absent.safetensors"}, LOAD, "No file 'absent.safetensors' under models/vae"),
    (LOAD, {"audio_vae": "torn.safetensors"}, LOAD, "torn"),
    (LOAD, {"precision": "fp4"}, LOAD, "fp4"),
    (LOAD, {"checkpoint": "upsampler.safetensors"}, LOAD, "upsampler"),
    (LOAD, {"checkpoint": "torn.safetensors"}, LOAD, "torn"),
    (LOAD, {"checkpoint": "text.safetensors"}, LOAD, "text"),
    (LOAD, {"devices": "cpu:9"}, LOAD, "8 attention heads cannot be dealt to 9 workers"),
    (LOAD, {"transport": "tcp"}, LOAD, "transport"),
    (LOAD, {"sp_max_tokens": 10}, SP, "10"),
    (LOAD, {"upsampler": "none"}, SP, "upsampler"),
    (SP, {"schedule": "fast"}, SP, "fast"),
    (TDP, {"mode": "fast"}, SP, "fast"),
    (TDP, {"tiles": "9x9"}, SP, "9"),
    (TDP, {"overlap": 12, "tiles": "1x2"}, SP, "12"),
]


@pytest.fixture(scope="module")
def bad_files(host: ComfyHost) -> None:
    """Puts files that are no LTX checkpoint beside the toy model."""
    folder = host.base / "models" / "checkpoints"
    upsampler = host.base / "models" / "latent_upscale_models" / "ltx-toy-upsampler-x2.safetensors"
    (folder / "upsampler.safetensors").symlink_to(upsampler.resolve())
    whole = (folder / "ltx-toy-23.safetensors").read_bytes()
    for path in (folder / "torn.safetensors", host.base / "models" / "vae" / "torn.safetensors"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole[: len(whole) // 2])
    (folder / "text.safetensors").write_text("this is no model\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("node", "change", "fails_at", "words"), BEFORE_ANY_WEIGHT, ids=[str(case[1]) for case in BEFORE_ANY_WEIGHT]
)
def test_bad_input_is_one_sentence_before_any_worker_starts(
    host: ComfyHost, bad_files: None, node: str, change: dict[str, Any], fails_at: str, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        host.run(workflow_graph(**{f"n{node}": change}), timeout=30)
    failure = caught.value.failure
    assert failure["node_id"] == fails_at, failure["exception_message"]
    assert failure["exception_type"] == "ValueError"
    message = failure["exception_message"].strip()
    print(message)
    assert words in message and "\n" not in message and len(message) < 600, message
    assert not fleet_pids(host.pid)


# The graph from an image: what is wrong with its condition, the node that says so, and its words.
CONDITIONS = [
    ({"frame": 99}, "6", "the clip has 17 frames"),
    ({"frame": -18}, "6", "-17"),
    ({"attention": 0.5}, "5", "no meaning for an image at frame 0"),
]


@pytest.mark.parametrize(("change", "fails_at", "words"), CONDITIONS, ids=[str(case[0]) for case in CONDITIONS])
def test_bad_condition_is_one_sentence_before_any_worker_starts(
    host: ComfyHost, change: dict[str, Any], fails_at: str, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        host.run(workflow_graph(IMAGE_WORKFLOW, n5=change), timeout=30)
    failure = caught.value.failure
    assert failure["node_id"] == fails_at and words in failure["exception_message"], failure["exception_message"]
    assert not fleet_pids(host.pid)


@pytest.mark.parametrize("change", [{"strength": 1.5}, {"crf": 52}, {"crf": -2}, {"attention": -1.5}], ids=str)
def test_bad_widget_of_a_condition_is_refused_at_its_input(host: ComfyHost, change: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        host.queue(workflow_graph(IMAGE_WORKFLOW, n5=change))
    errors = caught.value.answer["node_errors"]["5"]["errors"]
    assert [error["extra_info"]["input_name"] for error in errors] == list(change)


def test_server_log_has_no_import_failure_of_the_pack(host: ComfyHost) -> None:
    failures = {line.split(": ")[1] for line in host.log().splitlines() if "IMPORT FAILED" in line}
    assert failures <= {"nodes_audio.py", "nodes_audio_encoder.py"}  # core files that need torchaudio
