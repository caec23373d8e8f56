"""The bundled workflow on a real ComfyUI server with two CPU workers: the clip, the warm fleet, cancel, free, death."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from comfy_host import ROOT, ComfyHost, JobError, Listener
from tests.clips import Clip, read_clip
from tests.host_fixtures import (
    API_WORKFLOW,
    EMPTY,
    ENCODE,
    IMAGE_WORKFLOW,
    SOUND_WORKFLOW,
    SP,
    TDP,
    TONE_HZ,
    fleet_pids,
    fleet_processes,
    furnished,
    wait_until,
    workflow_graph,
)

# A stage that runs long enough to be interrupted in the middle.
NO_GUIDANCE = {"video_cfg": 1, "audio_cfg": 1, "video_stg": 0, "audio_stg": 0, "modality_scale": 1}
LONG_STAGE = {f"n{SP}": {"schedule": "ltx2", "steps": 400, "seed": 1, **NO_GUIDANCE}}


@pytest.fixture(scope="module")
def host() -> Iterator[ComfyHost]:
    """Gives a server of this module's own, whose workers come and go, and which is killed at last."""
    with furnished(ComfyHost()) as server:
        yield server


@pytest.fixture(scope="module")
def first_run(host: ComfyHost) -> Path:
    """Runs the bundled workflow once, cold, and gives the saved file."""
    return host.output_path(host.run(workflow_graph(), timeout=240), ".mp4")


@pytest.fixture(scope="module")
def clip(first_run: Path) -> Clip:
    return read_clip(first_run)


def test_clip_shows_a_red_ball_moving_right(clip: Clip) -> None:
    assert clip.frames.shape == (17, 256, 384, 3) and clip.fps == 24
    path = clip.red_path()
    assert path[-1] - path[0] >= 0.2, path
    assert np.diff(path).min() > -0.05, path


def test_clip_sounds_at_300_hz(clip: Clip) -> None:
    assert clip.pitch() == pytest.approx(300, rel=0.05)


def test_b33_sound_covers_the_picture(clip: Clip) -> None:
    picture = len(clip.frames) / clip.fps
    assert abs(clip.seconds_of_sound - picture) <= 0.04 + 1024 / clip.sample_rate  # one audio latent, one AAC frame


def test_second_run_starts_no_process_and_reads_no_weight(host: ComfyHost, first_run: Path, clip: Clip) -> None:
    pids, (mapped, read) = fleet_pids(host.pid), _reads(host)
    assert mapped >= 3  # the checkpoint on each worker, the upsampler
    starts = host.log().count("starting 2 worker")
    again = host.run(workflow_graph(n8={"filename_prefix": "video/again"}), timeout=60)  # only the file name differs
    assert fleet_pids(host.pid) == pids
    outputs = host.run(workflow_graph(**{f"n{SP}": {"seed": 8}}), timeout=120)
    assert fleet_pids(host.pid) == pids and host.log().count("starting 2 worker") == starts == 1
    mapped_now, read_now = _reads(host)
    assert mapped_now == mapped and read_now - read < 1 << 20, "the fleet read files again"
    assert np.array_equal(read_clip(host.output_path(again, ".mp4")).frames, clip.frames)
    assert not np.array_equal(read_clip(host.output_path(outputs, ".mp4")).frames, clip.frames)


def test_b129_another_graph_with_equal_loaders_shares_the_fleet(host: ComfyHost, first_run: Path, clip: Clip) -> None:
    pids = fleet_pids(host.pid)
    outputs = host.run(_renumbered(), timeout=120)
    assert fleet_pids(host.pid) == pids
    assert np.array_equal(read_clip(host.output_path(outputs, ".mp4")).frames, clip.frames)


def test_b131_graph_of_the_first_release_makes_the_same_clip(host: ComfyHost, first_run: Path, clip: Clip) -> None:
    released = ROOT / "tests" / "released" / "0.1.0" / "api" / API_WORKFLOW.name
    outputs = host.run(workflow_graph(released), timeout=120)
    assert np.array_equal(read_clip(host.output_path(outputs, ".mp4")).frames, clip.frames)


def test_progress_preview_and_text_are_sent(host: ComfyHost, first_run: Path) -> None:
    with Listener(host) as listener:
        prompt_id = host.queue(workflow_graph(**{f"n{SP}": {"seed": 9}}))
        messages = list(listener.until_done(prompt_id, 120))
    steps = [data["value"] for kind, data in messages if kind == "progress" and data["node"] == SP]
    assert steps == sorted(steps) and steps[-1] == 8
    assert sum(kind == "preview" for kind, _ in messages) >= 8
    texts = [data["text"] for kind, data in messages if kind == "text" and data["node"] == SP]
    assert "2 workers · 72 tokens" in texts[-1] and "s/step" in texts[-1]


def test_b124_b108_cancel_stops_within_two_steps_and_the_fleet_stays(
    host: ComfyHost, first_run: Path, clip: Clip
) -> None:
    pids = fleet_pids(host.pid)
    with Listener(host) as listener:
        prompt_id = host.queue(workflow_graph(**LONG_STAGE))
        asked_at = asked_step = last_step = None
        for kind, data in listener.until_done(prompt_id, 120):
            if kind != "progress" or data["node"] != SP:
                continue
            last_step = data["value"]
            if last_step >= 3 and asked_at is None:
                asked_at, asked_step = time.monotonic(), last_step
                host.post("/interrupt", {})
        took = time.monotonic() - asked_at
    with pytest.raises(JobError) as caught:
        host.wait(prompt_id, 10)
    assert "execution_interrupted" in caught.value.kinds
    assert last_step - asked_step <= 2 and took < 4, (asked_step, last_step, took)
    outputs = host.run(workflow_graph(**{f"n{ENCODE}": {"negative_prompt": " "}}), timeout=120)
    assert fleet_pids(host.pid) == pids
    assert np.array_equal(read_clip(host.output_path(outputs, ".mp4")).frames, clip.frames)


def test_combined_prompts_are_refused_and_the_next_graph_works(host: ComfyHost, first_run: Path) -> None:
    pids = fleet_pids(host.pid)
    graph = workflow_graph(**{f"n{SP}": {"positive": ["20", 0]}})
    graph["20"] = {
        "class_type": "ConditioningCombine",
        "inputs": {"conditioning_1": [ENCODE, 0], "conditioning_2": [ENCODE, 1]},
    }
    with pytest.raises(JobError, match="holds 2 prompts"):
        host.run(graph, timeout=60)
    host.run(workflow_graph(**{f"n{TDP}": {"seed": 3}}), timeout=120)
    assert fleet_pids(host.pid) == pids


def test_b35_a_batch_of_two_runs(host: ComfyHost, first_run: Path) -> None:
    graph = workflow_graph(**{f"n{EMPTY}": {"batch_size": 2}, f"n{TDP}": {"upscale": False, "overlap": 2}})
    saved = read_clip(host.output_path(host.run(graph, timeout=180), ".mp4"))
    assert saved.frames.shape == (34, 128, 192, 3)
    assert not np.array_equal(saved.frames[:17], saved.frames[17:])


def test_sp_mode_refines_the_sound_too(host: ComfyHost, first_run: Path) -> None:
    graph = workflow_graph(**{f"n{TDP}": {"mode": "sp (audio follows)"}})
    saved = read_clip(host.output_path(host.run(graph, timeout=180), ".mp4"))
    assert saved.frames.shape == (17, 256, 384, 3)
    assert saved.pitch() == pytest.approx(300, rel=0.05)


@pytest.fixture(scope="module")
def image_clip(host: ComfyHost, first_run: Path) -> Clip:
    """Gives the clip of the workflow that begins with ComfyUI's example picture."""
    return read_clip(host.output_path(host.run(workflow_graph(IMAGE_WORKFLOW), timeout=180), ".mp4"))


def test_image_workflow_begins_with_its_picture(host: ComfyHost, image_clip: Clip, clip: Clip) -> None:
    assert image_clip.frames.shape == (17, 256, 384, 3)
    square = (
        Image.open(host.base / "input" / "example.png").convert("RGB").resize((384, 384), Image.Resampling.BILINEAR)
    )
    picture = np.asarray(square.crop((0, 64, 384, 320)), dtype=np.float64)  # fills 384 x 256, cropped at its centre

    def distance(frame: np.ndarray) -> float:
        return float(np.sqrt(((frame - picture) ** 2).mean()))

    assert distance(image_clip.frames[0]) < 65, "the toy's autoencoder alone is about 50 off"
    assert min(distance(frame) for frame in [*clip.frames, *image_clip.frames[4:]]) > 130


def test_b33_sound_workflow_carries_the_original_sound(host: ComfyHost, first_run: Path) -> None:
    """Load Audio runs as ComfyUI has it, beside an empty stand-in for torchaudio (tests/stand_ins)."""
    saved = read_clip(host.output_path(host.run(workflow_graph(SOUND_WORKFLOW), timeout=180), ".mp4"))
    assert saved.frames.shape == (17, 256, 384, 3) and saved.sample_rate == 48000
    assert saved.pitch() == pytest.approx(TONE_HZ, rel=0.02)
    picture = len(saved.frames) / saved.fps
    assert abs(saved.seconds_of_sound - picture) <= 0.04 + 1024 / saved.sample_rate  # one audio latent, one AAC frame


@pytest.mark.slow
def test_b127_image_workflow_is_the_same_again_with_one_worker(host: ComfyHost, image_clip: Clip) -> None:
    outputs = host.run(workflow_graph(IMAGE_WORKFLOW, n1={"devices": "cpu:1"}), timeout=240)
    again = read_clip(host.output_path(outputs, ".mp4"))
    assert np.array_equal(again.frames, image_clip.frames)
    assert np.array_equal(again.waveform, image_clip.waveform)


def test_b130_free_memory_ends_the_workers_and_the_next_graph_starts_them(host: ComfyHost, first_run: Path) -> None:
    before = fleet_pids(host.pid)
    assert before
    host.post("/free", {"unload_models": True})
    assert wait_until(lambda: not fleet_pids(host.pid), 10), "workers are still there"
    host.run(workflow_graph(**{f"n{SP}": {"seed": 10}}), timeout=240)
    assert fleet_pids(host.pid) and not fleet_pids(host.pid) & before


def test_a_killed_worker_is_named_and_the_next_graph_works(host: ComfyHost, first_run: Path) -> None:
    prompt_id = _start_long_stage(host)
    workers = [process for process in fleet_processes(host.pid) if not process.children()]
    workers[-1].kill()
    with pytest.raises(JobError, match="rank") as caught:
        host.wait(prompt_id, 30)
    assert caught.value.failure["node_id"] == SP
    host.run(workflow_graph(**{f"n{SP}": {"seed": 11}}), timeout=240)


def test_b102_no_worker_outlives_a_killed_server(host: ComfyHost, first_run: Path) -> None:
    """Is the last test of the module: it takes the server down in the middle of a job."""
    _start_long_stage(host)
    workers = fleet_processes(host.pid)
    assert len(workers) >= 3
    host.stop(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive, alive


def _start_long_stage(host: ComfyHost) -> str:
    """Queues a long stage and returns its id once the third step is done."""
    with Listener(host) as listener:
        prompt_id = host.queue(workflow_graph(**LONG_STAGE))
        for kind, data in listener.until_done(prompt_id, 60):
            if kind == "progress" and data["node"] == SP and data["value"] >= 3:
                return prompt_id
    raise AssertionError("the long stage ended early")


def _reads(host: ComfyHost) -> tuple[int, int]:
    """Counts the weight files that the workers said they have mapped, and the bytes read by calls."""
    read = sum(process.io_counters().read_chars for process in fleet_processes(host.pid))
    return host.log().count("INFO mgpu: Mapped "), read


def _renumbered() -> dict:
    """Returns the bundled graph with other node ids."""
    graph = {f"1{node}": content for node, content in workflow_graph().items()}
    for content in graph.values():
        for name, value in content["inputs"].items():
            if isinstance(value, list):
                content["inputs"][name] = [f"1{value[0]}", value[1]]
    return graph
