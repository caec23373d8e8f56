"""The pipeline through its client: the toy's reference clips, every worker count, batches, warm fleets, cancels."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgpu_runtime.fleet import Event, JobCancelled, SymmetricRunnerError, current, stop
from mgpu_runtime.pipeline.client import LTXClient, Watch
from mgpu_runtime.pipeline.jobs import Decode, PromptContext, SPStage, TDPStage
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.sampling.patchify import audio_tokens, video_tokens
from tests.conditioned import SOUND, conditioned_clips
from tests.goldens import GOLDEN, TOY, Case, read_case, relative_error
from tests.toy import toy_client
from tests.weights_files import read_all

UPSAMPLER = str(GOLDEN / "checkpoints" / "tiny_upsampler_x2.safetensors")


def reference(index: int) -> Case:
    """A stored clip of the toy model: noise in, latents, sound and frames out."""
    return read_case(TOY / "reference" / f"clip{index}.safetensors")


@pytest.fixture(scope="module", autouse=True)
def no_fleet_left():
    yield
    stop()


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_reference_clips_replay_from_their_noise(num_workers: int) -> None:
    client = toy_client(f"cpu:{num_workers}")
    for case in (reference(0), reference(1)):
        facts = case.facts
        positive, _ = client.encode(facts["prompt"], "", facts["text_length"])
        stage1 = SPStage(facts["seed"], facts["fps"], sigmas=tuple(facts["stage1_sigmas"]), schedule="distilled")
        start = torch.zeros(1, 128, 3, 4, 4)
        first = client.sp_stage(
            stage1, positive, None, start, noise=(case["stage1.video_noise"], case["stage1.audio_noise"])
        )
        assert relative_error(video_tokens(first.video), case["stage1.video_latent"]) < 1e-5
        assert relative_error(audio_tokens(first.audio), case["stage1.audio_latent"]) < 1e-5
        stage2 = TDPStage(facts["seed"], facts["fps"], sigmas=tuple(facts["stage2_sigmas"]), mode="sp")
        second = client.tdp_stage(
            stage2,
            positive,
            first.video,
            audio_latent=first.audio,
            noise=(case["stage2.video_noise"], case["stage2.audio_noise"]),
        )
        assert relative_error(video_tokens(second.video), case["stage2.video_latent"]) < 1e-5
        assert relative_error(audio_tokens(second.audio), case["stage2.audio_latent"]) < 1e-5
        clip = client.decode(Decode("1x1"), second.video, audio_latent=second.audio)
        frame = (clip.frames[facts["stage2_frame_indices"][0]] * 255).round()
        assert (frame - case["stage2.frames"][0].float()).abs().max() <= 1
        assert relative_error(clip.waveform[..., :4800], case["stage2.waveform_first_4800"]) < 1e-4
        assert clip.sample_rate == 48000 and clip.frames.shape == (17, 256, 256, 3)


def _six_head_clip(checkpoint: Path, num_workers: int) -> dict[str, torch.Tensor]:
    """Runs both stages and the decode from seeds; the token count does not divide by 2, 3 or 32."""
    client = LTXClient(LTXSettings(str(checkpoint), upsampler=UPSAMPLER, devices=f"cpu:{num_workers}"))
    generator = torch.Generator().manual_seed(0)
    positive = PromptContext(torch.randn(1, 7, 96, generator=generator), torch.randn(1, 7, 48, generator=generator))
    negative = PromptContext(torch.randn(1, 5, 96, generator=generator), torch.randn(1, 5, 48, generator=generator))
    guided = client.sp_stage(
        SPStage(3, 24.0, "ltx2", steps=2, preview=False), positive, negative, torch.zeros(2, 16, 3, 3, 5)
    )
    fine = client.tdp_stage(
        TDPStage(4, 24.0, tiles="2x3", overlap=1, preview=False), positive, guided.video, audio_latent=guided.audio
    )
    follows = client.tdp_stage(
        TDPStage(5, 24.0, mode="sp", preview=False), positive, guided.video, audio_latent=guided.audio
    )
    clip = client.decode(Decode("2x2", overlap=1), fine.video)
    return {
        "stage 1 video": guided.video,
        "stage 1 audio": guided.audio,
        "tiled video": fine.video,
        "kept audio": fine.audio,
        "whole video": follows.video,
        "following audio": follows.audio,
        "frames": clip.frames,
        **conditioned_clips(client),
    }


@pytest.mark.slow
def test_the_same_seed_gives_the_same_clip_for_1_2_and_3_workers(six_heads: Path) -> None:
    one = _six_head_clip(six_heads, 1)
    assert torch.equal(one["kept audio"], one["stage 1 audio"])
    assert not torch.equal(one["following audio"], one["stage 1 audio"])
    assert torch.equal(one["kept sound"], SOUND.expand(2, -1, -1, -1))
    assert torch.equal(one["guided audio"][:, :, 3:7], SOUND[:, :, 3:7].expand(2, -1, -1, -1))
    assert {name: bool(torch.isfinite(clip).all()) for name, clip in one.items()} == dict.fromkeys(one, True)
    assert one["tiled video"].shape == (2, 16, 3, 6, 10) and one["frames"].shape == (2 * 17, 192, 320, 3)
    for num_workers in (2, 3):
        many = _six_head_clip(six_heads, num_workers)
        assert {name: torch.equal(many[name], one[name]) for name in one} == dict.fromkeys(one, True)


@pytest.fixture(scope="module")
def two() -> LTXClient:
    return toy_client("cpu:2")


@pytest.fixture(scope="module")
def prompts(two: LTXClient) -> tuple[PromptContext, PromptContext]:
    return two.encode("a red ball moving right on a dark background", "", 128)


STAGE = SPStage(10, 24.0, "distilled", preview=False)
SMALL = torch.zeros(1, 128, 2, 2, 3)


def test_an_empty_prompt_is_legal_and_differs_from_another(prompts: tuple) -> None:
    positive, negative = prompts
    assert positive.video.shape == negative.video.shape == (1, 128, 192)
    assert torch.isfinite(negative.video).all() and not torch.equal(positive.video, negative.video)


def test_b37_an_item_of_a_batch_equals_the_item_run_alone(two: LTXClient, prompts: tuple) -> None:
    both = two.sp_stage(STAGE, prompts[0], None, SMALL.repeat(2, 1, 1, 1, 1))
    for item in (0, 1):
        alone = two.sp_stage(replace(STAGE, seed=STAGE.seed + item), prompts[0], None, SMALL)
        assert relative_error(both.video[item : item + 1], alone.video) < 1e-5
        assert relative_error(both.audio[item : item + 1], alone.audio) < 1e-5


def test_b03_one_frame_with_one_audio_token(two: LTXClient, prompts: tuple) -> None:
    clip = two.sp_stage(STAGE, prompts[0], None, torch.zeros(1, 128, 1, 2, 2))
    assert clip.video.shape == (1, 128, 1, 2, 2) and clip.audio.shape == (1, 2, 1, 16)
    decoded = two.decode(Decode(), clip.video, audio_latent=clip.audio)
    assert decoded.frames.shape == (1, 64, 64, 3) and decoded.waveform.shape[:2] == (1, 2)


def test_b09_a_clip_without_sound(two: LTXClient, prompts: tuple) -> None:
    silent = two.sp_stage(replace(STAGE, with_audio=False), prompts[0], None, SMALL)
    assert silent.audio is None
    fine = two.tdp_stage(TDPStage(1, 24.0, tiles="1x2", overlap=2, preview=False), prompts[0], silent.video)
    assert fine.audio is None and fine.video.shape == (1, 128, 2, 4, 6)
    decoded = two.decode(Decode(), fine.video)
    assert decoded.waveform is None and decoded.sample_rate is None


def test_b31_an_audio_latent_one_frame_off_is_fitted_and_more_is_refused(two: LTXClient, prompts: tuple) -> None:
    for num_frames in (8, 10):
        fitted = two.sp_stage(STAGE, prompts[0], None, SMALL, audio_latent=torch.zeros(1, 2, num_frames, 16))
        assert fitted.audio.shape == (1, 2, 9, 16)
    with pytest.raises(ValueError, match="11 frames .25 a second., but this clip of 24 fps needs 9"):
        two.sp_stage(STAGE, prompts[0], None, SMALL, audio_latent=torch.zeros(1, 2, 11, 16))


def test_a_kept_frame_stays_as_it_was(two: LTXClient, prompts: tuple) -> None:
    latent = torch.randn(1, 128, 2, 2, 3, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, 2, 1, 1)
    mask[:, :, 0] = 0
    made = two.sp_stage(STAGE, prompts[0], None, latent, noise_mask=mask)
    assert torch.allclose(made.video[:, :, 0], latent[:, :, 0], atol=1e-6)
    assert not torch.allclose(made.video[:, :, 1], latent[:, :, 1], atol=1e-2)


def test_a_second_identical_job_starts_no_process_and_reads_no_weights(two: LTXClient, prompts: tuple) -> None:
    def run() -> tuple:
        files_read = []
        results = two.sp_stage(STAGE, prompts[0], None, SMALL, watch=Watch())
        controller = current(two._key(), lambda: pytest.fail("a second fleet was started"))
        stream = controller.stream(
            name="Decode", fields={"tiles": "1x1", "overlap": 4}, tensors={"latent": SMALL, "audio_latent": None}
        )
        files_read.append(stream.drain()["files_read"])
        return results.video, controller.worker_pids, files_read

    first, second = run(), run()
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


def test_b108_b124_a_cancel_ends_within_two_steps_and_the_next_job_is_unharmed(two: LTXClient, prompts: tuple) -> None:
    expected = two.sp_stage(STAGE, prompts[0], None, SMALL)
    steps: list[int] = []
    sigmas = tuple(1 - step / 200 for step in range(200))

    def note(event: Event) -> None:
        if event.kind == "progress":
            steps.append(event.data["step"])

    watch = Watch(on_event=note, should_stop=lambda: len(steps) > 3)
    with pytest.raises(JobCancelled):
        two.sp_stage(replace(STAGE, sigmas=sigmas), prompts[0], None, SMALL.repeat(1, 1, 1, 8, 8), watch=watch)
    assert steps[-1] <= 3 + 2
    again = two.sp_stage(STAGE, prompts[0], None, SMALL)
    assert torch.equal(again.video, expected.video) and torch.equal(again.audio, expected.audio)


def test_previews_show_the_middle_frame_at_each_step(two: LTXClient, prompts: tuple) -> None:
    images, texts = [], []

    def note(event: Event) -> None:
        assert event.rank == 0
        if event.kind == "preview":
            images.append(event.data)
        elif event.data["stage"] == "SP stage":
            texts.append(event.data)

    two.sp_stage(replace(STAGE, preview=True), prompts[0], None, SMALL, watch=Watch(on_event=note))
    assert len(images) == 8 and images[0]["image"].shape == (64, 96, 3) and images[0]["image"].dtype == torch.uint8
    assert [(t["stage"], t["step"], t["of"]) for t in texts] == [("SP stage", step, 8) for step in range(9)]
    assert texts[1]["sigma"] == 1.0


def test_results_are_ordinary_tensors(two: LTXClient, prompts: tuple) -> None:
    with torch.inference_mode():
        made = two.sp_stage(STAGE, prompts[0], None, SMALL)
    assert not made.video.is_inference() and made.video.requires_grad is False
    made.video.add_(1)


def test_b113_b127_a_seed_decides_every_draw_whatever_the_process_drew_before(two: LTXClient, prompts: tuple) -> None:
    """Run 2 with the same seed equals run 1, another seed does not, and the caller's generator is left alone."""
    before = torch.random.get_rng_state()
    first = two.sp_stage(STAGE, prompts[0], None, SMALL)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.randn(3)
    other = two.sp_stage(replace(STAGE, seed=11), prompts[0], None, SMALL)
    again = two.sp_stage(STAGE, prompts[0], None, SMALL)
    assert torch.equal(first.video, again.video) and torch.equal(first.audio, again.audio)
    assert not torch.equal(first.video, other.video)


def test_a_callback_that_raises_takes_its_job_with_it(two: LTXClient, prompts: tuple) -> None:
    def fail(event: Event) -> None:
        raise KeyError("from the caller")

    with pytest.raises(KeyError) as held:
        two.sp_stage(STAGE, prompts[0], None, SMALL, watch=Watch(on_event=fail))
    assert two.sp_stage(STAGE, prompts[0], None, SMALL).video.shape == SMALL.shape
    assert held.value.args == ("from the caller",)


def test_what_only_the_first_rank_meets_costs_the_fleet_nothing(prompts: tuple, tmp_path: Path) -> None:
    """A text encoder with NaN weights passes every check of headers and fails where it is loaded, on rank 0."""
    folder = tmp_path / "gemma"
    shutil.copytree(TOY / "gemma-toy", folder)
    tensors, metadata = read_all(folder / "model.safetensors")
    tensors["language_model.model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "damaged", metadata=metadata)
    os.replace(folder / "damaged", folder / "model.safetensors")
    client = LTXClient(replace(toy_client("cpu:2").settings, text_encoder=str(folder)))
    with pytest.raises(SymmetricRunnerError, match="'norm.weight' holds numbers that are not finite"):
        client.encode("a ball", "", 128)
    pids = current(client._key(), lambda: pytest.fail("the fleet was lost")).worker_pids
    assert client.sp_stage(STAGE, prompts[0], None, SMALL).video.shape == SMALL.shape
    assert current(client._key(), lambda: pytest.fail("the fleet was lost")).worker_pids == pids


def test_a_text_encoder_replaced_in_place_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    shutil.copytree(TOY / "gemma-toy", folder)
    client = LTXClient(replace(toy_client("cpu:1").settings, text_encoder=str(folder)))
    before = client._key()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert client._key() != before


@pytest.mark.slow
def test_a_preview_that_cannot_be_made_does_not_cost_the_clip() -> None:
    """The 2.0 autoencoder pads by reflection and cannot decode a side of one cell; the stage itself can make it."""
    checkpoint = GOLDEN / "checkpoints" / "tiny_ltx20.safetensors"
    client = LTXClient(LTXSettings(str(checkpoint), devices="cpu:2"))
    facts = client.check()
    prompt = PromptContext(torch.ones(1, 4, facts.video_context_width), torch.ones(1, 4, facts.audio_context_width))
    kinds = set()
    made = client.sp_stage(
        replace(STAGE, preview=True),
        prompt,
        None,
        torch.zeros(1, 16, 1, 1, 4),
        watch=Watch(on_event=lambda event: kinds.add(event.kind)),
    )
    assert made.video.shape == (1, 16, 1, 1, 4) and "preview" not in kinds


def test_b124_a_cancel_while_the_workers_start_is_heard_at_once() -> None:
    client = toy_client("cpu:1")  # another configuration: the running fleet ends and a new one starts
    began = time.monotonic()
    with pytest.raises(JobCancelled, match="while the workers were starting"):
        client.encode("a ball", "", 128, watch=Watch(should_stop=lambda: time.monotonic() - began > 0.5))
    assert time.monotonic() - began < 0.5 + 2 + 5  # two seconds, and what ending the other fleet may take
