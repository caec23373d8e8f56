"""Queues the bundled workflow on a real ComfyUI server and prints the path of the clip as its last line."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import av

from comfy_host import ROOT, ComfyHost, JobError, Listener

WORKFLOW = ROOT / "workflows" / "api" / "ltx_mgpu_two_stage_t2v.json"
OUTPUT = ROOT / "outputs"


def main() -> int:
    signal.signal(signal.SIGTERM, _leave)  # so that `finally` and `with` run, and the server ends with the demo
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    started = time.monotonic()
    with ComfyHost() as host, Listener(host) as listener:
        print(f"demo: ComfyUI answers on {host.url} after {time.monotonic() - started:.0f} s", flush=True)
        print("demo: queued workflows/api/ltx_mgpu_two_stage_t2v.json (toy model, devices cpu:2)", flush=True)
        prompt_id = host.queue(graph)
        _show(listener, prompt_id, graph)
        try:
            clip = _keep(host.output_path(host.wait(prompt_id), ".mp4"))
        except JobError as error:
            print(f"demo: the graph failed: {error}", file=sys.stderr)
            print(host.log()[-4000:], file=sys.stderr)
            return 1
    print(f"demo: {_describe(clip)}, {time.monotonic() - started:.0f} s in all", flush=True)
    print(clip)
    return 0


def _show(listener: Listener, prompt_id: str, graph: dict) -> None:
    """Prints a line when a node begins and when its text changes."""
    last = ""
    for kind, data in listener.until_done(prompt_id, timeout=400):
        if kind == "executing" and data.get("node"):
            line = f"demo: {graph[data['node']]['_meta']['title']}"
        elif kind == "text":
            line = f"demo:   {data['text']}"
        else:
            continue
        if line != last:
            print(line, flush=True)
            last = line


def _keep(clip: Path) -> Path:
    """Copies the clip out of the server's temporary folder."""
    OUTPUT.mkdir(exist_ok=True)
    kept = OUTPUT / f"demo_{time.strftime('%Y%m%d_%H%M%S')}.mp4"
    kept.write_bytes(clip.read_bytes())
    return kept


def _describe(clip: Path) -> str:
    """Reads the file back: picture size, frames and sound."""
    with av.open(str(clip)) as container:
        video, sound = container.streams.video[0], container.streams.audio[0]
        frames = sum(1 for _ in container.decode(video))
        return (
            f"{video.width} x {video.height}, {frames} frames at {float(video.average_rate):g} a second, "
            f"sound at {sound.rate} Hz"
        )


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
