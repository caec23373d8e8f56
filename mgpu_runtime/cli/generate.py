"""`python -m mgpu_runtime generate`: prompt, two stages, decode, MP4, without ComfyUI."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..fleet import Event
from ..pipeline.checks import check_components, check_decode, check_plan, check_tdp, token_limit
from ..pipeline.client import LTXClient, Watch
from ..pipeline.condition_checks import check_conditions
from ..pipeline.conditions import Conditions, ImageCondition
from ..pipeline.jobs import SAMPLERS, SCHEDULES, TEXT_MODES, UPSCALE_MODES, Decode, LoRASpec, SPStage, TDPStage
from ..pipeline.settings import DEFAULT_SP_MAX_TOKENS, LTXSettings, default_exchange_timeout
from ..pipeline.tensors import check_video_latent
from ..sampling.sizes import ScaleFactors, latent_size
from ..weights.facts import ModelFacts
from .machine import add_exchange, add_machine

_OWN_FILES = ("video_vae", "audio_vae", "text_projection")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    _add_files(parser.add_argument_group("files"))
    _add_clip(parser.add_argument_group("clip"))
    _add_work(parser.add_argument_group("work"))
    parser.set_defaults(run=_run)


def _add_files(files: argparse._ArgumentGroup) -> None:
    files.add_argument("--checkpoint", type=Path, required=True, help="the whole model, or its transformer alone")
    files.add_argument("--text-encoder", type=Path, required=True, help="a Gemma folder or single file")
    files.add_argument("--upsampler", type=Path, required=True, help="a latent upsampler file")
    for name in _OWN_FILES:
        title = name.replace("_", " ")
        files.add_argument(f"--{name.replace('_', '-')}", type=Path, help=f"the {title}, where it has its own file")
    for stage, where in (("", "both stages"), ("-stage1", "stage 1 alone"), ("-stage2", "stage 2 alone")):
        files.add_argument(
            f"--lora{stage}",
            nargs="+",
            action="append",
            default=[],
            metavar=("FILE", "STRENGTH"),
            help=f"a LoRA for {where} and its strength (1); may be given several times",
        )
    files.add_argument("--output", type=Path, default=Path("clip.mp4"), help="where the clip goes (%(default)s)")


def _add_clip(clip: argparse._ArgumentGroup) -> None:
    clip.add_argument("--prompt", required=True, help="what the clip shows and sounds like")
    clip.add_argument("--negative-prompt", default="", help="what it must not show; used with guidance")
    clip.add_argument(
        "--image",
        nargs="+",
        action="append",
        default=[],
        metavar=("FILE", "FRAME STRENGTH"),
        help="a picture the clip shows, the frame where (0; negative counts from the end) and a strength from 0 to 1 "
        "(1); may be given several times",
    )
    clip.add_argument("--height", type=int, default=1024, help="pixels of the finished clip (%(default)s)")
    clip.add_argument("--width", type=int, default=1536, help="pixels of the finished clip (%(default)s)")
    clip.add_argument("--frames", type=int, default=121, help="8k+1 (%(default)s)")
    clip.add_argument("--fps", type=float, default=24.0, help="frames per second (%(default)s)")
    clip.add_argument("--seed", type=int, default=10, help="the same seed makes the same clip (%(default)s)")
    clip.add_argument(
        "--schedule", default="auto", choices=SCHEDULES, help="auto: distilled if the file says so, else ltx2"
    )
    clip.add_argument("--steps", type=int, default=0, help="of stage 1; 0 takes the model's own number (%(default)s)")
    clip.add_argument("--sampler", default="auto", choices=SAMPLERS, help="of stage 1 (%(default)s)")
    clip.add_argument("--max-length", type=int, default=1024, help="text tokens, a multiple of 128 (%(default)s)")


def _add_work(work: argparse._ArgumentGroup) -> None:
    add_machine(work)
    add_exchange(work)
    work.add_argument(
        "--sp-max-tokens",
        type=int,
        default=DEFAULT_SP_MAX_TOKENS,
        help="most video tokens of a sequence-parallel stage (%(default)s)",
    )
    work.add_argument(
        "--max-batch-size",
        type=int,
        default=0,
        help="how many guidance passes go through the model at once, 0: all (%(default)s)",
    )
    work.add_argument(
        "--text-mode", default="auto", choices=TEXT_MODES, help="where the text encoder runs (%(default)s)"
    )
    work.add_argument("--release-text-encoder", action="store_true", help="free its memory after the prompts")
    work.add_argument(
        "--stage2", default="tdp", choices=UPSCALE_MODES, help="tdp: tiles, sound kept; sp: whole frame, sound follows"
    )
    work.add_argument("--stage2-sampler", default="auto", choices=SAMPLERS, help="auto is euler (%(default)s)")
    work.add_argument("--tiles", default="auto", help='tiles of stage 2: "auto" or rows x columns such as "1x2"')
    work.add_argument("--overlap", type=int, default=5, help="latent cells that tiles share (%(default)s)")


def _run(arguments: argparse.Namespace) -> int:
    from ..pipeline.media import write_mp4  # av is needed here alone

    if not arguments.output.absolute().parent.is_dir():
        raise ValueError(f"the folder of {arguments.output} does not exist: make it, or choose another --output")
    if arguments.output.suffix.lower() != ".mp4":
        raise ValueError(f"--output must end in .mp4, got {arguments.output}")
    client = LTXClient(_settings(arguments))
    facts = client.check()
    pictures = [_picture(words) for words in arguments.image]
    latent, large = _latents(arguments, facts)
    stage1, stage2 = _stages(arguments, pictures)
    decode = Decode(fps=arguments.fps)
    # what the last steps would refuse is refused before the first one runs
    client.check_loras([*stage1.loras, *stage2.loras])
    grid = check_video_latent(latent, facts, client.settings.sp_max_tokens)
    check_components(stage1, facts, client.settings)
    check_plan(stage1, facts, has_negative=True)
    large_grid = check_tdp(stage2, latent, facts, client.settings)
    for stage, its_grid in ((stage1, grid), (stage2, large_grid)):
        limit = token_limit(stage, client.settings)
        check_conditions(pictures, facts, its_grid, has_sound=True, max_tokens=limit)
    check_decode(decode, large, facts, client.settings, with_sound=True)
    watch = Watch(on_event=_report)
    try:
        positive, negative = client.encode(
            arguments.prompt,
            arguments.negative_prompt,
            arguments.max_length,
            mode=arguments.text_mode,
            release=arguments.release_text_encoder,
            watch=watch,
        )
        start = client.sp_stage(stage1, positive, negative, latent, conditions=pictures, watch=watch)
        fine = client.tdp_stage(
            stage2, positive, start.video, audio_latent=start.audio, conditions=pictures, watch=watch
        )
        clip = client.decode(decode, fine.video, audio_latent=fine.audio, watch=watch)
    finally:
        client.release()
    write_mp4(arguments.output, clip, arguments.fps)
    sys.stdout.write(f"{arguments.output}\n")
    return 0


def _settings(arguments: argparse.Namespace) -> LTXSettings:
    own_files = {name: getattr(arguments, name) for name in _OWN_FILES}
    timeout = arguments.exchange_timeout
    return LTXSettings(
        checkpoint=str(arguments.checkpoint.absolute()),
        text_encoder=str(arguments.text_encoder.absolute()),
        upsampler=str(arguments.upsampler.absolute()),
        devices=arguments.devices,
        precision=arguments.precision,
        sp_max_tokens=arguments.sp_max_tokens,
        transport=arguments.transport,
        exchange_timeout=default_exchange_timeout() if timeout is None else timeout,
        **{name: None if path is None else str(path.absolute()) for name, path in own_files.items()},
    )


def _latents(arguments: argparse.Namespace, facts: ModelFacts) -> tuple[Tensor, Tensor]:
    """Makes the empty latents (1, C, F, H, W) of both stages; raises ValueError for a size that cannot be."""
    size = latent_size(
        arguments.frames,
        arguments.height,
        arguments.width,
        arguments.fps,
        scale=ScaleFactors(*facts.scale_factors),
        spatial_upscale=facts.upsample_scale,
    )
    start = (round(side / facts.upsample_scale) for side in (size.height, size.width))
    empty = (1, facts.video_channels, size.frames)
    return torch.zeros(*empty, *start), torch.zeros(*empty, size.height, size.width)


def _stages(arguments: argparse.Namespace, pictures: Conditions) -> tuple[SPStage, TDPStage]:
    both, conditions = _loras(arguments.lora), tuple(condition for condition, _ in pictures)
    first = SPStage(
        arguments.seed,
        arguments.fps,
        arguments.schedule,
        steps=arguments.steps,
        sampler=arguments.sampler,
        max_batch_size=arguments.max_batch_size,
        conditions=conditions,
        loras=(*both, *_loras(arguments.lora_stage1)),
        preview=False,
    )
    second = TDPStage(
        arguments.seed,
        arguments.fps,
        tiles=arguments.tiles,
        overlap=arguments.overlap,
        mode=arguments.stage2,
        sampler=arguments.stage2_sampler,
        max_batch_size=arguments.max_batch_size,
        conditions=conditions,
        loras=(*both, *_loras(arguments.lora_stage2)),
        preview=False,
    )
    return first, second


def _loras(given: Sequence[Sequence[str]]) -> tuple[LoRASpec, ...]:
    specs = []
    for words in given:
        path, strength = _words("--lora FILE STRENGTH", words, "1")
        specs.append(LoRASpec(str(Path(path).absolute()), _number("the strength of a LoRA", strength, float)))
    return tuple(specs)


def _picture(words: Sequence[str]) -> tuple[ImageCondition, Tensor]:
    from ..pipeline.media import read_picture

    path, frame, strength = _words("--image FILE FRAME STRENGTH", words, "0", "1")
    condition = ImageCondition(
        frame=_number("the frame of an image", frame, int),
        strength=_number("the strength of an image", strength, float),
    )
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}: check the path of --image")
    return condition, read_picture(Path(path))


def _words(form: str, words: Sequence[str], *defaults: str) -> list[str]:
    """Fills in what an option leaves open; raises ValueError where it holds too much."""
    if len(words) > 1 + len(defaults):
        raise ValueError(f"{form} takes at most {1 + len(defaults)} words, got {' '.join(words)}")
    return [*words, *defaults[len(words) - 1 :]]


def _number(what: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{what} must be a {'whole ' if kind is int else ''}number, got {text!r}") from None


def _report(event: Event) -> None:
    if event.kind == "log" and event.job_id:  # what belongs to no job is logged already
        sys.stderr.write(f"{event.data['text']}\n")
    if event.kind == "progress":
        data = event.data
        sigma = "" if data.get("sigma") is None else f"  sigma {data['sigma']:.4g}"
        sys.stderr.write(f"{data['stage']}: {data['step']} of {data['of']}{sigma}\n")
