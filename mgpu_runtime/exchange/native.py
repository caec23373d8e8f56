"""Builds the C and CUDA sources of `csrc/` once per machine and loads them; nothing of torch is compiled against.

A library ends in the digest of what stands before it, so that a file cut short by a full disk is built again, not
loaded. Loaders ignore what follows an ELF image.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import ExchangeError

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
CACHE_VARIABLE = "LTX_MGPU_CACHE"
CPU_NAME = "exchange_cpu"
NOT_BUILT = "not built"
_STALE = 3600.0  # seconds after which no build can still be under way
_CPU_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-pthread")  # no -march: machines may share the cache
_CUDA_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static")
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class _Target:
    """One library: its name, source, and the compiler command without input and output."""

    name: str
    source: str
    headers: str  # pattern
    flags: tuple[str, ...]
    compilers: tuple[str, ...]  # commands, the best first
    variable: str
    missing: str  # what to tell whoever has none of them
    seconds: float  # time one build may take


def cpu_library() -> ctypes.CDLL:
    """Returns the exchange over shared memory; calls of it release the GIL. Raises ExchangeError without a compiler."""
    return _load(_cpu_target())


def cuda_library(arch: str) -> ctypes.CDLL:
    """Returns the exchange over peer GPU memory, for one compute capability such as "90". Raises ExchangeError."""
    return _load(_cuda_target(arch))


def build_all() -> list[str]:
    """Builds what this machine can use; returns one line for the user per library. Raises nothing.

    Lines read "NAME: " and what came of it, which begins with NOT_BUILT where there is none.
    """
    targets = [_cpu_target()] + [_cuda_target(arch) for arch in _archs_here()]
    lines = []
    for target in targets:
        begin = time.monotonic()
        try:
            path = _library(target)
            was_there = _is_whole(path)
            _load(target)
            news = "already built" if was_there else f"ready after {time.monotonic() - begin:.1f} s"
            lines.append(f"{target.name}: {news}: {path}")
        except ExchangeError as error:
            lines.append(f"{target.name}: {NOT_BUILT}: {error}")
    if len(targets) == 1:
        lines.append(f"exchange_cuda: {NOT_BUILT}: this machine has no CUDA device")
    return lines


def cache_folder() -> Path:
    """Returns the folder for libraries, made if needed: this user's own, closed to others. Raises ExchangeError."""
    named = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(named).expanduser().absolute() if named else _users_caches() / "ltx-mgpu"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise ExchangeError(f"no folder for compiled code ({error}); name one with {CACHE_VARIABLE}") from error
    danger = f"others may write to {folder}" if status.st_mode & 0o022 else ""
    if status.st_uid != os.geteuid():
        danger = f"{folder} belongs to another user"
    if danger:
        raise ExchangeError(f"{danger}, so code from there is not loaded; name another folder with {CACHE_VARIABLE}")
    return folder


def _users_caches() -> Path:
    """Returns the folder for this user's caches. Raises RuntimeError where there is none."""
    named, home = (os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HOME"))
    if os.path.isabs(named):  # the specification has others ignored; they would lie below the working directory
        return Path(named)
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError as error:
            raise RuntimeError("this user has no home folder") from error
    return Path(home) / ".cache"


def _cpu_target() -> _Target:
    return _Target(
        name=CPU_NAME,
        source="exchange_cpu.c",
        headers="exchange_cpu*.h",
        flags=_CPU_FLAGS,
        compilers=("cc", "gcc", "clang"),
        variable="CC",
        missing="no C compiler found; install gcc, or name one with CC",
        seconds=60.0,
    )


def _cuda_target(arch: str) -> _Target:
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return _Target(
        name=f"exchange_cuda_sm{arch}",
        source="exchange_cuda.cu",
        headers="*.h",
        flags=(*_CUDA_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"),
        compilers=("nvcc", *(f"{shlex.quote(folder)}/bin/nvcc" for folder in (*folders, "/usr/local/cuda"))),
        variable="CUDACXX",
        missing="no CUDA compiler found; install the CUDA toolkit, or name its nvcc with CUDACXX",
        seconds=300.0,
    )


def _archs_here() -> list[str]:
    import torch  # only here: building for the CPU needs no torch

    if not torch.cuda.is_available():
        return []
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [f"{major}{minor}" for major, minor in sorted(capabilities)]


def _load(target: _Target) -> ctypes.CDLL:
    path = _library(target)
    if not _is_whole(path):
        with _alone(path, target.seconds):
            if not _is_whole(path):  # another process may have built it while this one waited
                _build(target, _compiler(target), path)
    try:
        library = ctypes.CDLL(str(path))
        library.exchange_wait  # noqa: B018  (all have it; one that has not is damaged)
        return library
    except (OSError, AttributeError) as error:
        raise ExchangeError(
            f"the compiled library {path} cannot be loaded ({error}); another folder can be named with {CACHE_VARIABLE}"
        ) from error


def _library(target: _Target) -> Path:
    """Returns where a target's library lies or will lie.

    Without a compiler that is any library made from the same sources and flags: it may have been built beforehand.
    """
    folder = cache_folder()
    stem = f"{target.name}-{_sources_key(target)}"
    try:
        command = _compiler(target)
    except ExchangeError:
        built = [path for path in sorted(folder.glob(f"{stem}-*.so")) if _is_whole(path)]
        if built:
            return built[-1]
        raise
    compiler = Path(command[0]).resolve()
    status = compiler.stat()
    key = _key(*command, str(compiler), str(status.st_size), str(status.st_mtime_ns))
    return folder / f"{stem}-{key}.so"


def _sources_key(target: _Target) -> str:
    files = [SOURCES / target.source, *sorted(SOURCES.glob(target.headers))]
    try:
        texts = [path.read_text(encoding="utf-8") for path in files]
    except OSError as error:
        raise ExchangeError(f"the sources to compile are not there: {error}") from error
    return _key(*texts, *target.flags, platform.machine())


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler(target: _Target) -> list[str]:
    """Returns the command of the compiler, its program found."""
    named = os.environ.get(target.variable)
    for text in (named,) if named else target.compilers:
        try:
            command = shlex.split(text)
        except ValueError as error:
            raise ExchangeError(f"{target.variable} names {text!r}, which is no command: {error}") from error
        program = shutil.which(command[0]) if command else None
        if program:
            return [program, *command[1:]]
    if named:
        raise ExchangeError(f"{target.variable} names {named!r}, which is not a program that can be run")
    raise ExchangeError(target.missing)


def _build(target: _Target, command: Sequence[str], path: Path) -> None:
    """Compiles to a temporary name and renames, so that no other process ever sees half a library."""
    _remove_stale(path.parent)
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            built = Path(folder) / path.name
            try:
                _compile(target, command, built)
            except ExchangeError as error:
                if Path(folder).is_dir():
                    raise
                raise ExchangeError(f"{path.parent} was removed during a build of {path.name}: start again") from error
            image = built.read_bytes()
            built.write_bytes(image + hashlib.sha256(image).digest())
            built.replace(path)
    except OSError as error:
        raise ExchangeError(
            f"the compiled library cannot be written to {path} ({error}); another folder can be named with "
            f"{CACHE_VARIABLE}"
        ) from error


def _remove_stale(cache: Path) -> None:
    """Removes what builds have left whose process was killed."""
    for folder in cache.glob("build-*"):
        with suppress(FileNotFoundError):  # another process may do the same
            if time.time() - folder.stat().st_mtime > _STALE:
                shutil.rmtree(folder, ignore_errors=True)


def _compile(target: _Target, command: Sequence[str], built: Path) -> None:
    source = str(SOURCES / target.source)
    try:
        code, output = _run([*command, *target.flags, source, "-o", str(built)], target.seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExchangeError(f"{command[0]} could not build {target.source}: {error}") from error
    if code < 0:
        name = signal.Signals(-code).name
        raise ExchangeError(f"{command[0]} could not build {target.source}: it was ended by {name}; is memory short?")
    if code != 0 or not built.is_file():
        raise ExchangeError(f"{command[0]} could not build {target.source}: {_first_error(output)}")


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Runs a compiler; returns its exit code and what it said. When it ends early, so do the processes it started."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The linker's words say more than the compiler's error about the linker, which follows.
    faults = [line for line in lines if any(word in line.lower() for word in ("error", "failed", "cannot"))]
    return [*faults, *lines, "it said nothing"][0]


def _is_whole(path: Path) -> bool:
    try:
        image = path.read_bytes()
    except OSError:
        return False
    return len(image) > _DIGEST and hashlib.sha256(image[:-_DIGEST]).digest() == image[-_DIGEST:]


@contextmanager
def _alone(path: Path, seconds: float) -> Iterator[None]:
    """Holds a lock that one process of the machine can hold; it goes with its process. Raises ExchangeError."""
    deadline = time.monotonic() + seconds
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ExchangeError(
            f"{path.parent} cannot be written to ({error}); name another folder with {CACHE_VARIABLE}"
        ) from error
    try:
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise ExchangeError(f"another process has been building {path.name} for {seconds:g} s")
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks; the rename alone keeps readers safe
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise ExchangeError(f"no lock in the folder for compiled code: {error}") from error
    return True
