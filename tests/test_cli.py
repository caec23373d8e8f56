"""The command line end to end: a prompt becomes a playable file, and a model file is told what it is."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mgpu_runtime.cli import main
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.fit import fit
from mgpu_runtime.pipeline.media import read_picture
from mgpu_runtime.weights.report import GIB, FileReport, PartReport, inspect
from tests.goldens import TOY
from tests.weights_files import published


def test_generate_makes_a_clip_with_sound_that_shows_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mgpu")
    output = tmp_path / "clip.mp4"
    options = {
        "checkpoint": TOY / "ltx-toy-23.safetensors",
        "text-encoder": TOY / "gemma-toy",
        "upsampler": TOY / "ltx-toy-upsampler-x2.safetensors",
        "prompt": "a red ball moving right on a dark background",
        "height": 256,
        "width": 384,
        "frames": 17,
        "schedule": "distilled",
        "max-length": 128,
        "tiles": "1x2",
        "devices": "cpu:2",
        "output": output,
    }
    assert main(["generate", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(output)
    assert (printed.err + caplog.text).count("starting 2 workers") == 1
    assert "SP stage: 8 of 8" in printed.err and "TDP stage: 2 of 2" in printed.err
    with av.open(str(output)) as container:
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert container.streams.video[0].average_rate == 24 and container.streams.audio[0].rate == 48000
    with av.open(str(output)) as container:
        seconds = sum(frame.samples for frame in container.decode(audio=0)) / 48000
    assert pictures.shape == (17, 256, 384, 3) and abs(seconds - 17 / 24) < 0.05
    red = np.clip(pictures[..., 0].astype(float) - pictures[..., 1:].max(-1), 0, None)
    columns = (red.sum(1) * np.arange(384)).sum(-1) / red.sum((1, 2))
    assert columns[-1] - columns[0] > 384 / 5


def test_inspect_says_what_a_file_is_and_whether_it_fits(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(TOY / "ltx-toy-23.safetensors"), "--devices", "cpu:2"]) == 0
    lines = dict.fromkeys(line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [
        "file",
        "family",
        "version",
        "layout",
        "config",
        "precision",
        "size",
        "part",
        "needs",
        "memory",
    ]


def test_inspect_counts_the_text_encoder_only_where_it_is_given(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(TOY / "ltx-toy-23.safetensors")
    assert main(["inspect", model, "--devices", "cpu"]) == 0
    assert "(not counted: the text encoder)" in capsys.readouterr().out
    assert main(["inspect", str(TOY / "gemma-toy"), model, "--devices", "cpu"]) == 0
    assert "not counted" not in capsys.readouterr().out
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (GIB, GIB))
    lora = PartReport("LoRA x", parameters=1000, num_bytes=2000, precision="bf16", kind="LoRA")
    assert fit(FileReport(("x",), 2000, "LoRA", parts=(lora,)), ["cuda:0"]) == []


def test_inspect_of_a_broken_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "torn.safetensors"
    path.write_bytes((TOY / "ltx-toy-23.safetensors").read_bytes()[:5000])
    assert main(["inspect", str(path), "--devices", "cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "cut off" in printed.err


@pytest.mark.parametrize(("precision", "transformer_bytes"), [("auto", 2), ("bf16", 2), ("fp32", 4), ("fp8", 1)])
def test_the_first_gpu_holds_every_part_and_the_others_what_they_run(
    precision: str, transformer_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    report = inspect(published("20", tmp_path))
    first, second = fit(report, ["cuda:0", "cuda:1"], precision)
    parts = {part.title: part.parameters for part in report.parts}
    others = 4 if precision == "fp32" else 2
    everywhere = parts["transformer"] * transformer_bytes + parts["video autoencoder"] * others
    assert second.needed == everywhere and second.fits == (everywhere < 72 * GIB)
    rest = (parts["text connectors"] + parts["audio autoencoder"]) * others + parts["vocoder"] * 4
    assert first.needed == everywhere + rest


def test_a_quantised_file_counts_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (GIB, GIB))
    part = PartReport("transformer", parameters=1000, num_bytes=1100, precision="fp8 scaled")
    (device,) = fit(FileReport(("x",), 1100, "LTX-2.3", parts=(part,)), ["cuda:0"], "bf16")
    assert device.needed == 1100


@pytest.mark.parametrize(
    ("option", "words", "sentence"),
    [
        ("--lora", ["a.safetensors", "much"], "strength of a LoRA must be a number"),
        ("--lora-stage2", ["a.safetensors", "1", "2"], "at most 2 words"),
        ("--lora", ["absent.safetensors"], "no file"),
        ("--image", ["absent.png"], "no file absent.png"),
        ("--image", ["picture.png", "1.5"], "whole number"),
        ("--image", ["picture.png", "400"], "400"),
        ("--image", ["picture.png", "0", "2"], "from 0 to 1"),
        ("--image", ["notes.txt"], "no picture"),
        ("--steps", ["5", "--schedule=distilled"], "set steps to 0"),
        ("--stage2-sampler", ["euler", "--stage2=sp", "--sp-max-tokens=100"], "exceed sp_max_tokens 100"),
        ("--image", ["picture.png", "8", "--stage2=sp", "--sp-max-tokens=300"], "of its conditions exceed"),
        ("--video-vae", ["absent.safetensors"], "no file"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_starts_nothing(
    option: str, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LTXClient, "_start", lambda *_: pytest.fail("workers were started"))
    Image.new("RGB", (64, 48), "red").save("picture.png")
    Path("notes.txt").write_text("no picture", encoding="utf-8")
    required = [f"--checkpoint={TOY / 'ltx-toy-23.safetensors'}", f"--text-encoder={TOY / 'gemma-toy'}"]
    required += [f"--upsampler={TOY / 'ltx-toy-upsampler-x2.safetensors'}", "--prompt=x", "--devices=cpu"]
    assert main(["generate", *required, "--height=256", "--width=384", "--frames=17", option, *words]) == 1
    printed = capsys.readouterr().err
    assert sentence in printed.replace("There is no", "no")


def test_help_says_what_the_options_take(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for said in ("--image FILE [FRAME STRENGTH ...]", "most video tokens of a", "passes go through the model at once"):
        assert said in words
    assert "--stage2-sampler {auto,euler,ancestral,res_2s}" in words


def test_a_picture_is_read_upright(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    turned = Image.new("L", (64, 32))
    turned.paste(255, (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    turned.save(path, exif=exif, quality=95)
    picture = read_picture(path)
    assert picture.shape == (1, 64, 32, 3) and picture.dtype == torch.float32
    assert picture[0, :30].min() > 0.9 and picture[0, -30:].max() < 0.1
