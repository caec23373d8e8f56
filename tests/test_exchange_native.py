"""Building the exchange's native code: compilers that fail, caches that cannot be trusted, and what is left behind."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mgpu_runtime.cli import main
from mgpu_runtime.exchange import ExchangeError, native


def test_no_compiler_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ExchangeError, match="no C compiler found; install gcc"):
        native.cpu_library()
    assert any("no C compiler found" in line for line in native.build_all())


def test_a_library_that_was_built_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path))
    try:
        native.cpu_library()
    except ExchangeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("CC", "/no/compiler")
    assert native.cpu_library().exchange_wait


@pytest.mark.parametrize(
    "damage", [lambda image: b"", lambda image: image[: len(image) // 2], lambda image: b"x" + image]
)
def test_a_broken_file_in_the_cache_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path))
    try:
        path = native._library(native._cpu_target())
        native._build(native._cpu_target(), native._compiler(native._cpu_target()), path)
    except ExchangeError as error:
        pytest.skip(str(error))
    path.write_bytes(damage(path.read_bytes()))
    assert native.cpu_library().exchange_wait
    assert native._is_whole(path)


def test_a_compiler_s_error_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'a warning'\necho 'fatal error: no stdatomic.h' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ExchangeError, match="could not build exchange_cpu.c: fatal error: no stdatomic.h"):
        native.cpu_library()
    assert not list((tmp_path / "cache").glob("*.so"))


def compiler_that(tmp_path: Path, does: str) -> Path:
    """Makes a compiler of a few shell lines, with a compiler to call in $cc."""
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if real is None:
        pytest.skip("no C compiler")
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncc={real}\nfor out; do :; done\n{does}\n")
    compiler.chmod(0o755)
    return compiler


def test_a_compiler_that_is_killed_leaves_nothing_that_is_taken_for_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("LTX_MGPU_CACHE", str(cache))
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, '$cc "$@"; truncate -s 1000 "$out"; kill -9 $$')))
    with pytest.raises(ExchangeError, match="was ended by SIGKILL; is memory short"):
        native.cpu_library()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def _load_in(cache: Path, compiler: Path) -> None:
    os.environ.update(LTX_MGPU_CACHE=str(cache), CC=str(compiler))
    native.cpu_library()


def loader(cache: Path, compiler: Path) -> multiprocessing.Process:
    """Starts a process that loads the library."""
    process = multiprocessing.get_context("fork").Process(target=_load_in, args=(cache, compiler))
    process.start()
    return process


def test_of_8_processes_that_build_at_once_one_does(tmp_path: Path) -> None:
    compiler = compiler_that(tmp_path, f'echo once >> {tmp_path}/calls; exec $cc "$@"')
    processes = [loader(tmp_path / "new" / "cache", compiler) for _ in range(8)]
    for process in processes:
        process.join(60.0)
    assert [process.exitcode for process in processes] == [0] * 8
    assert (tmp_path / "calls").read_text() == "once\n"


def test_a_builder_that_is_killed_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, pid = tmp_path / "cache", tmp_path / "pid"
    compiler = compiler_that(tmp_path, f'[ -e {pid} ] && exec $cc "$@"; echo $$ > {pid}.part; mv {pid}.part {pid}\n')
    compiler.write_text(compiler.read_text() + "exec sleep 60\n")
    builder = loader(cache, compiler)
    while not pid.exists():
        assert builder.is_alive()
        time.sleep(0.01)
    builder.kill()
    builder.join()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    monkeypatch.setenv("LTX_MGPU_CACHE", str(cache))
    monkeypatch.setenv("CC", str(compiler))
    began = time.monotonic()
    assert native.cpu_library().exchange_wait
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_that_is_removed_during_a_build_is_an_error_and_the_next_build_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    cache, remove = tmp_path / "cache", f"[ -e {tmp_path}/removed ] || rm -r {tmp_path}/cache; touch {tmp_path}/removed"
    lines = {"before": f'{remove}; exec $cc "$@"', "after": f'$cc "$@"; {remove}'}
    monkeypatch.setenv("LTX_MGPU_CACHE", str(cache))
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, lines[when])))
    with pytest.raises(ExchangeError, match="cache was removed during a build of exchange_cpu-.*: start again"):
        native.cpu_library()
    assert native.cpu_library().exchange_wait


def test_a_full_disk_is_told_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, 'exec $cc "$@"')))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(Path, "write_bytes", side_effect=full),
        pytest.raises(ExchangeError, match="cannot be written to .*No space left on device.*LTX_MGPU_CACHE"),
    ):
        native.cpu_library()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    said = "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status"
    assert native._first_error(said).endswith("No space left on device")


def test_a_cache_that_is_read_only_gives_what_is_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("LTX_MGPU_CACHE", str(cache))
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, 'exec $cc "$@"')))
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch.object(os, "open", side_effect=denied):  # as root, a folder's mode would forbid nothing
        with pytest.raises(ExchangeError, match=r"cache cannot be written to \(.*denied\); name another folder"):
            native.cpu_library()
    native.cpu_library()
    with mock.patch.object(os, "open", side_effect=denied):
        assert native.cpu_library().exchange_wait


def test_a_compiler_s_name_that_is_no_command_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(ExchangeError, match="CC names 'gcc \"', which is no command"):
        native.cpu_library()


def test_a_library_without_its_functions_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_is_whole", lambda path: True)
    try:
        target = replace(native._cpu_target(), source="other.c", headers="none")
        monkeypatch.setattr(native, "SOURCES", tmp_path)
        (tmp_path / "other.c").write_text("int other;\n")
        native._build(target, native._compiler(target), native._library(target))
    except ExchangeError as error:
        pytest.skip(str(error))
    with pytest.raises(ExchangeError, match="cannot be loaded .*exchange_wait"):
        native._load(target)


@pytest.mark.parametrize(("name", "value"), [("XDG_CACHE_HOME", "below/here"), ("HOME", ""), ("HOME", "below")])
def test_the_cache_is_never_below_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    for variable in ("LTX_MGPU_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    home = mock.Mock(pw_dir=str(tmp_path / "home"))
    with mock.patch.object(native.pwd, "getpwuid", return_value=home):
        assert native.cache_folder() == tmp_path / "home" / ".cache" / "ltx-mgpu"


def test_what_a_killed_build_has_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "build-old", tmp_path / "build-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "half.so").touch()
    os.utime(old, (0, 0))
    native._remove_stale(tmp_path)
    assert new.is_dir() and not old.exists()


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        native._run(["sh", "-c", f"sleep 60 & echo $! > {said}; wait"], 0.5)
    child, until = Path("/proc") / said.read_text().strip() / "stat", time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until


def test_the_command_says_what_is_there_and_fails_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("CC", "/no/compiler")
    assert main(["build"]) == 1 and "exchange_cpu: not built" in capsys.readouterr().out
    monkeypatch.delenv("LTX_MGPU_CACHE")
    monkeypatch.delenv("CC")
    try:
        native.cpu_library()
    except ExchangeError as error:
        pytest.skip(str(error))
    assert main(["build"]) == 0 and "exchange_cpu: already built" in capsys.readouterr().out


def test_a_cache_of_another_user_is_described_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path))
    with (
        mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1),
        pytest.raises(ExchangeError, match="belongs to another user"),
    ):
        native.cpu_library()


def test_a_cache_that_others_may_write_to_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LTX_MGPU_CACHE", str(tmp_path))
    with pytest.raises(ExchangeError, match="others may write"):
        native.cpu_library()
