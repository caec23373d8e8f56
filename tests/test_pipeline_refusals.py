"""Bad input to the pipeline: one sentence that says what to do, and no process started for it."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from mgpu_runtime.cli import main
from mgpu_runtime.fleet import MGPUController, stop
from mgpu_runtime.models.streams import StreamInput
from mgpu_runtime.pipeline.checks import check_decode, check_plan
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import Decode, Encode, PromptContext, SPStage, TDPStage, from_record
from mgpu_runtime.pipeline.settings import TIMEOUT_VARIABLE, LTXSettings, default_exchange_timeout
from mgpu_runtime.sampling.guidance import GuiderParams
from tests.goldens import TOY
from tests.weights_files import TINY_20, TINY_23

SETTINGS = LTXSettings(
    checkpoint=str(TOY / "ltx-toy-23.safetensors"),
    text_encoder=str(TOY / "gemma-toy"),
    upsampler=str(TOY / "ltx-toy-upsampler-x2.safetensors"),
    devices="cpu:2",
    sp_max_tokens=100,
)
PROMPT = PromptContext(torch.zeros(1, 128, 192), torch.zeros(1, 128, 64))
STAGE = SPStage(1, 24.0, "distilled")
TDP = TDPStage(1, 24.0)
LATENT = torch.zeros(1, 128, 2, 2, 3)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch):
    """Fails a test that starts a process for input that should have been refused."""
    stop()
    monkeypatch.setattr(MGPUController, "start", lambda *args, **kwargs: pytest.fail("a fleet was started"))


def client(**changes: object) -> LTXClient:
    return LTXClient(replace(SETTINGS, **changes))


STAGE_REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "too many tokens": (
        lambda: client().sp_stage(STAGE, PROMPT, None, torch.zeros(1, 128, 3, 6, 6)),
        r"108 video tokens exceed sp_max_tokens 100: use fewer frames .* or raise sp_max_tokens in Load LTX MGPU",
    ),
    "too many tokens after the upscale": (
        lambda: client().tdp_stage(replace(TDP, mode="sp"), PROMPT, torch.zeros(1, 128, 3, 3, 3)),
        "108 video tokens exceed sp_max_tokens 100",
    ),
    "heads and workers": (
        lambda: client(devices="cpu:9").sp_stage(STAGE, PROMPT, None, LATENT),
        "8 attention heads cannot be dealt to 9 workers, each needs one; this model runs on 1 to 8",
    ),
    "a transport for other devices": (
        lambda: client(transport="nccl").sp_stage(STAGE, PROMPT, None, LATENT),
        "transport nccl is for CUDA devices, and this exchange is for the CPU: choose auto, csrc, gloo",
    ),
    "another model's latent": (
        lambda: client().sp_stage(STAGE, PROMPT, None, torch.zeros(1, 16, 2, 2, 3)),
        "the latent has 16 channels, this checkpoint's video latents have 128",
    ),
    "an image latent": (
        lambda: client().decode(Decode(), torch.zeros(1, 128, 4, 4)),
        r"a video latent has 5 dimensions .* got \(1, 128, 4, 4\)",
    ),
    "an empty latent": (lambda: client().decode(Decode(), torch.zeros(0, 128, 1, 1, 1)), "the video latent is empty"),
    "values that are not finite": (
        lambda: client().sp_stage(STAGE, PROMPT, None, torch.full_like(LATENT, float("nan"))),
        "the video latent holds values that are not finite",
    ),
    "another model's prompt": (
        lambda: client().sp_stage(STAGE, replace(PROMPT, video=torch.zeros(1, 128, 99)), None, LATENT),
        r"the positive prompt's video context is \(1, 128, 99\), this checkpoint takes \(1, tokens, 192\)",
    ),
    "prompts that do not divide": (
        lambda: client().sp_stage(
            STAGE, PromptContext(PROMPT.video.repeat(3, 1, 1), PROMPT.audio.repeat(3, 1, 1)), None, LATENT
        ),
        "1 clips cannot share 3 positive prompts evenly",
    ),
    "guidance without a negative prompt": (
        lambda: client().sp_stage(replace(STAGE, video=GuiderParams(cfg=3.0)), PROMPT, None, LATENT),
        "needs a negative prompt: connect the negative output of Encode Prompt",
    ),
    "a block that is not there": (
        lambda: client().sp_stage(replace(STAGE, video=GuiderParams(stg=1.0, stg_blocks=(28,))), PROMPT, None, LATENT),
        "video STG names block 28, but this model's blocks are 0 to 3",
    ),
    "another model's sound": (
        lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, audio_latent=torch.zeros(1, 8, 9, 16)),
        r"an audio latent of this checkpoint is \(batch, 2, frames, 16\), got \(1, 8, 9, 16\)",
    ),
    "B35 two videos and three sounds": (
        lambda: client().sp_stage(
            STAGE, PROMPT, None, LATENT.repeat(2, 1, 1, 1, 1), audio_latent=torch.zeros(3, 2, 9, 16)
        ),
        "The audio latent holds 3 clips but the video latent 2",
    ),
    "a mask of another batch": (
        lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, noise_mask=torch.ones(3, 1, 2, 1, 1)),
        "A noise mask for 1 clips",
    ),
    "no upsampler": (
        lambda: client(upsampler=None).tdp_stage(TDP, PROMPT, LATENT),
        "upscale is on but no upsampler is chosen: pick one in Load LTX MGPU, or switch upscale off",
    ),
    "tiles that do not fit": (
        lambda: client().tdp_stage(replace(TDP, tiles="1x5"), PROMPT, LATENT),
        "Tiles '1x5' do not fit, columns: .* larger than the overlap of 5",
    ),
    "tiles that are no tiles": (
        lambda: client().decode(Decode(tiles="two"), LATENT),
        'Tiles must be "auto" or rows x columns such as "2x3", got \'two\'',
    ),
    "no text encoder": (
        lambda: client(text_encoder=None).encode("a ball"),
        "no text encoder is chosen: pick a Gemma folder",
    ),
    "a missing checkpoint": (
        lambda: client(checkpoint="/nowhere/x.safetensors").encode("a ball"),
        "There is no file /nowhere/x.safetensors",
    ),
    "an upsampler as checkpoint": (
        lambda: client(checkpoint=SETTINGS.upsampler).encode("a ball"),
        "a latent upsampler",
    ),
    "a checkpoint as upsampler": (lambda: client(upsampler=SETTINGS.checkpoint).encode("a ball"), "latent upsampler"),
    "devices that are no devices": (lambda: client(devices="gpu").encode("a ball"), "gpu"),
    "no workers": (lambda: client(devices="cpu:0").encode("a ball"), "cpu:0|at least 1"),
}


@pytest.mark.parametrize("name", STAGE_REFUSALS)
def test_bad_input_is_refused_in_one_sentence_before_anything_starts(name: str) -> None:
    call, sentence = STAGE_REFUSALS[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Encode(("a",), 100), "max_length must be a multiple of 128 .* got 100: use 128 or 256"),
        (lambda: Encode(("a",), 0), "got 0: use 128 or 256"),
        (lambda: SPStage(-1, 24.0), "seed must be 0 to"),
        (lambda: SPStage(1, 0.0), "fps must be 1 to 240"),
        (lambda: SPStage(1, float("nan")), "fps must be 1 to 240"),
        (lambda: SPStage(1, 24.0, "karras"), "schedule must be one of auto, distilled, ltx2, .* got 'karras'"),
        (lambda: SPStage(1, 24.0, steps=-3), "steps must be 0"),
        (lambda: SPStage(1, 24.0, sigmas=(0.5, 0.7, 0.0)), "Sigmas must fall at every step, but 0.7 follows 0.5"),
        (lambda: SPStage(1, 24.0, sigmas=()), "at least one level above 0"),
        (lambda: TDPStage(1, 24.0, mode="both"), "mode must be one of tdp, sp"),
        (lambda: TDPStage(1, 24.0, overlap=-1), "overlap must be 0 or more"),
        (lambda: Decode(overlap=-1), "overlap must be 0 or more"),
        (lambda: LTXSettings("model.safetensors"), "checkpoint must be an absolute path"),
        (lambda: replace(SETTINGS, precision="int4"), "precision must be one of"),
        (lambda: replace(SETTINGS, sp_max_tokens=0), "sp_max_tokens must be at least 1"),
        (lambda: replace(SETTINGS, transport="tcp"), "transport must be one of auto, csrc, .* got 'tcp'"),
        (
            lambda: replace(SETTINGS, exchange_timeout=0.0),
            "exchange_timeout must be a number of seconds above 0, got 0",
        ),
        (lambda: replace(SETTINGS, exchange_timeout=float("nan")), "exchange_timeout .* got nan"),
        (lambda: from_record("Delete", {}), "unknown job 'Delete'"),
    ],
)
def test_jobs_and_settings_check_themselves(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_the_environment_sets_the_exchange_s_timeout_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    assert default_exchange_timeout() == SETTINGS.exchange_timeout == 10.0
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2.5")
    assert default_exchange_timeout() == 2.5
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ValueError, match="LTX_MGPU_EXCHANGE_TIMEOUT must be a number of seconds, got 'soon'"):
        default_exchange_timeout()


def test_b24_nothing_on_the_way_to_the_model_swallows_an_argument_it_does_not_know() -> None:
    for call in (
        lambda: SPStage(1, 24.0, time_offset=2.0),
        lambda: from_record("SPStage", {"seed": 1, "fps": 24.0, "time_offset": 2.0}),
        lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, time_offset=2.0),
        lambda: StreamInput(LATENT, LATENT, LATENT, LATENT, LATENT, time_offset=2.0),
    ):
        with pytest.raises(TypeError, match="time_offset"):
            call()


def test_b22_explicit_sigmas_are_used_unchanged_and_end_in_one_zero() -> None:
    assert SPStage(1, 24.0, sigmas=(1.0, 0.5)).sigmas == (1.0, 0.5, 0.0)
    assert SPStage(1, 24.0, sigmas=(1.0, 0.5, 0.0)).sigmas == (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--frames", "72"], "frames must be 8k+1, got 72. The nearest are 65 and 73"),
        (["--frames", "0"], "at least 1 frame, got 0"),
        (["--height", "800"], "multiple of 64, got 800"),
        (["--width", "-64"], "width must be at least"),
        (["--checkpoint", "/nowhere.safetensors"], "There is no file /nowhere.safetensors"),
        (["--output", "/nowhere/clip.mp4"], "the folder of /nowhere/clip.mp4 does not exist"),
        (["--output", "clip.foo"], "--output must end in .mp4, got clip.foo"),
        (["--tiles", "30x9"], "Tiles '30x9' do not fit"),
        (["--sp-max-tokens", "10"], "exceed sp_max_tokens 10"),
        (["--exchange-timeout", "-1"], "exchange_timeout must be a number of seconds above 0, got -1"),
    ],
)
def test_b27_b29_the_command_line_refuses_sizes_up_front(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    arguments = ["generate", "--prompt", "a ball", "--devices", "cpu:2", "--output", str(tmp_path / "clip.mp4")]
    for name in ("checkpoint", "text_encoder", "upsampler"):
        arguments += [f"--{name.replace('_', '-')}", getattr(SETTINGS, name)]
    assert main([*arguments, *options]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "clip.mp4").exists()


NOISE = torch.randn(1, 12, 128)
SOUND = torch.randn(1, 9, 32)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Encode(("a \ud83d b",)), "half of a character at position 2"),
        (lambda: Encode("abc"), "prompts must be a sequence of texts"),
        (lambda: Encode((None,)), "prompts must be a sequence of texts"),
        (lambda: Encode(("a",), 128.0), r"max_length cannot be 128.0 \(float\)"),
        (lambda: SPStage(1.5, 24.0), r"seed cannot be 1.5 \(float\)"),
        (lambda: SPStage("7", 24.0), r"seed cannot be '7' \(str\)"),
        (lambda: SPStage(1, "24"), r"fps cannot be '24' \(str\)"),
        (lambda: SPStage(1, 24.0, steps=2.5), "steps cannot be 2.5"),
        (lambda: TDPStage(1, 24.0, overlap=2.5), "overlap cannot be 2.5"),
        (lambda: TDPStage(1, 24.0, tiles="banana", mode="sp"), "Tiles must be"),
        (lambda: Decode(tiles=7), "Tiles must be"),
        (lambda: client().sp_stage(STAGE, PROMPT, None, "latent"), "video latent must be a tensor of real numbers"),
        (lambda: client().decode(Decode(), LATENT.to(torch.complex64)), "tensor of real numbers, got torch.complex64"),
        (lambda: client().decode(Decode(), LATENT.to("meta")), "tensor of real numbers"),
        (
            lambda: client().sp_stage(STAGE, replace(PROMPT, video=PROMPT.video[:0]), None, LATENT),
            r"video context is \(0, 128, 192\)",
        ),
        (
            lambda: client().sp_stage(STAGE, replace(PROMPT, audio=PROMPT.audio[:, :9]), None, LATENT),
            r"\(1, 128\) video \(prompts, tokens\) but \(1, 9\) in its audio context",
        ),
        (
            lambda: client().sp_stage(STAGE, replace(PROMPT, mask=torch.ones(1, 9)), None, LATENT),
            r"but \(1, 9\) in its mask",
        ),
        (
            lambda: client().sp_stage(STAGE, replace(PROMPT, video=PROMPT.video + torch.nan), None, LATENT),
            "positive prompt holds values that are not finite",
        ),
        (
            lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, noise_mask=torch.ones(1, 1, 0, 1, 1)),
            "the noise mask is empty",
        ),
        (
            lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, noise=(NOISE, None)),
            "audio noise is missing, but the stage makes audio",
        ),
        (
            lambda: client().sp_stage(replace(STAGE, with_audio=False), PROMPT, None, LATENT, noise=(NOISE, SOUND)),
            "audio noise is given, but the stage does not make audio",
        ),
        (
            lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, noise=(NOISE[:, :4], SOUND)),
            r"video noise must be \(1, 12, 128\) \(clips, tokens, channels\), got \(1, 4, 128\)",
        ),
        (
            lambda: client().sp_stage(STAGE, PROMPT, None, LATENT, noise=(NOISE * torch.nan, SOUND)),
            "video noise holds values that are not finite",
        ),
    ],
)
def test_values_that_would_only_fail_in_a_worker_are_refused_in_the_caller(
    call: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    job = SPStage(np.int64(7), Fraction(24000, 1001), steps=np.int32(4))
    assert (type(job.seed), type(job.fps), type(job.steps)) == (int, float, int)


def test_guidance_of_a_stream_that_is_not_made_is_not_asked_for() -> None:
    silent = SPStage(1, 24.0, "ltx2", video=GuiderParams(), with_audio=False)
    facts = client().check()
    check_plan(silent, facts, has_negative=False)
    with pytest.raises(ValueError, match="negative prompt"):
        check_plan(replace(silent, with_audio=True), facts, has_negative=False)


def test_a_checkpoint_without_a_part_is_refused_by_the_job_that_needs_it() -> None:
    """tests/golden's 2.3 file has no vocoder and no audio autoencoder: pictures decode, sound does not."""
    partial = client(checkpoint=str(TINY_23), text_encoder=None, upsampler=None)
    latent, sound = torch.zeros(1, 16, 1, 2, 2), torch.zeros(1, 2, 1, 16)
    check_decode(Decode(), latent, partial.check(), partial.settings, with_sound=False)
    with pytest.raises(ValueError, match="holds no audio autoencoder"):
        partial.decode(Decode(), latent, audio_latent=sound)


def test_a_decoder_that_pads_by_reflection_refuses_a_side_of_one_cell() -> None:
    old = client(checkpoint=str(TINY_20), text_encoder=None, upsampler=None)
    assert old.check().decode_min_cells == 2
    with pytest.raises(ValueError, match="at least 2 latent cells a side"):
        old.decode(Decode("1x1"), torch.zeros(1, 16, 1, 1, 4))


@pytest.mark.parametrize("changes", [{"schedule": "distilled"}, {"schedule": "ltx2", "sigmas": (1.0, 0.0)}])
def test_steps_that_would_be_ignored_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="steps is 4, but .* of its own: set steps to 0"):
        client().sp_stage(SPStage(1, 24.0, steps=4, **changes), PROMPT, PROMPT, LATENT)
