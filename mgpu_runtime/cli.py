"""The command line: `python -m mgpu_runtime generate` runs the two-stage pipeline without ComfyUI."""

import argparse
import logging
import sys
from pathlib import Path

import torch

from .fleet import Event, FleetError
from .pipeline.checks import check_decode, check_tdp
from .pipeline.client import LTXClient, Watch
from .pipeline.jobs import Decode, SPStage, TDPStage
from .pipeline.settings import DEFAULT_SP_MAX_TOKENS, PRECISIONS, LTXSettings
from .pipeline.tensors import check_video_latent
from .sampling.sizes import ScaleFactors, latent_size


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 refused or failed, 2 for a wrong command line."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return arguments.run(arguments)
    except (ValueError, FleetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mgpu_runtime", description="LTX-2 on several GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands.add_parser("generate", help="make a clip: prompt, two stages, decode, MP4"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("--checkpoint", type=Path, required=True, help="a Lightricks single-file checkpoint")
    files.add_argument("--text-encoder", type=Path, required=True, help="a Gemma 3 folder")
    files.add_argument("--upsampler", type=Path, required=True, help="a latent upsampler file")
    files.add_argument("--output", type=Path, default=Path("clip.mp4"), help="where the clip goes (%(default)s)")
    clip = parser.add_argument_group("clip")
    clip.add_argument("--prompt", required=True, help="what the clip shows and sounds like")
    clip.add_argument("--negative-prompt", default="", help="what it must not show; used with guidance")
    clip.add_argument("--height", type=int, default=1024, help="pixels of the finished clip (%(default)s)")
    clip.add_argument("--width", type=int, default=1536, help="pixels of the finished clip (%(default)s)")
    clip.add_argument("--frames", type=int, default=121, help="8k+1 (%(default)s)")
    clip.add_argument("--fps", type=float, default=24.0, help="frames per second (%(default)s)")
    clip.add_argument("--seed", type=int, default=10, help="the same seed makes the same clip (%(default)s)")
    clip.add_argument(
        "--schedule",
        default="auto",
        help='"distilled", "ltx2", or "auto": distilled if the file name says so (%(default)s)',
    )
    clip.add_argument("--max-length", type=int, default=1024, help="text tokens, a multiple of 128 (%(default)s)")
    work = parser.add_argument_group("work")
    work.add_argument("--devices", default="auto", help='"auto", a list such as "0,1", or "cpu:2"')
    work.add_argument("--precision", default="auto", choices=PRECISIONS, help="auto: bf16 on GPUs, fp32 on CPUs")
    work.add_argument("--sp-max-tokens", type=int, default=DEFAULT_SP_MAX_TOKENS, help="limit (%(default)s)")
    work.add_argument("--stage2", default="tdp", help='"tdp": tiles, sound kept; "sp": whole frame, sound follows')
    work.add_argument("--tiles", default="auto", help='tiles of stage 2: "auto" or rows x columns such as "1x2"')
    work.add_argument("--overlap", type=int, default=5, help="latent cells that tiles share (%(default)s)")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from .pipeline.media import write_mp4  # av is needed here alone

    if not arguments.output.absolute().parent.is_dir():
        raise ValueError(f"the folder of {arguments.output} does not exist: make it, or choose another --output")
    if arguments.output.suffix.lower() != ".mp4":
        raise ValueError(f"--output must end in .mp4, got {arguments.output}")
    client = LTXClient(_settings(arguments))
    facts = client.check()
    size = latent_size(
        arguments.frames,
        arguments.height,
        arguments.width,
        arguments.fps,
        scale=ScaleFactors(*facts.scale_factors),
        spatial_upscale=facts.upsample_scale,
    )
    start_height, start_width = (round(side / facts.upsample_scale) for side in (size.height, size.width))
    latent = torch.zeros(1, facts.video_channels, size.frames, start_height, start_width)
    large = torch.zeros(1, facts.video_channels, size.frames, size.height, size.width)
    stage1 = SPStage(arguments.seed, arguments.fps, arguments.schedule, preview=False)
    stage2 = TDPStage(
        arguments.seed,
        arguments.fps,
        tiles=arguments.tiles,
        overlap=arguments.overlap,
        mode=arguments.stage2,
        preview=False,
    )
    # what the last steps would refuse is refused before the first one runs
    check_video_latent(latent, facts, client.settings.sp_max_tokens)
    check_tdp(stage2, latent, facts, client.settings)
    check_decode(Decode(), large, facts, client.settings, with_sound=True)
    watch = Watch(on_event=_report)
    try:
        positive, negative = client.encode(
            arguments.prompt, arguments.negative_prompt, arguments.max_length, watch=watch
        )
        start = client.sp_stage(stage1, positive, negative, latent, watch=watch)
        fine = client.tdp_stage(stage2, positive, start.video, audio_latent=start.audio, watch=watch)
        clip = client.decode(Decode(), fine.video, audio_latent=fine.audio, watch=watch)
    finally:
        client.release()
    write_mp4(arguments.output, clip, arguments.fps)
    sys.stdout.write(f"{arguments.output}\n")
    return 0


def _settings(arguments: argparse.Namespace) -> LTXSettings:
    return LTXSettings(
        checkpoint=str(arguments.checkpoint.absolute()),
        text_encoder=str(arguments.text_encoder.absolute()),
        upsampler=str(arguments.upsampler.absolute()),
        devices=arguments.devices,
        precision=arguments.precision,
        sp_max_tokens=arguments.sp_max_tokens,
    )


def _report(event: Event) -> None:
    if event.kind == "log":
        sys.stderr.write(f"{event.data['text']}\n")
    if event.kind == "progress":
        data = event.data
        sigma = "" if data.get("sigma") is None else f"  sigma {data['sigma']:.4g}"
        sys.stderr.write(f"{data['stage']}: {data['step']} of {data['of']}{sigma}\n")
