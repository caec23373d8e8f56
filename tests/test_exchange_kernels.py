"""The CUDA exchange without a GPU: its index arithmetic as loops on the CPU, and its sources through nvcc.

The reference is made with torch's slices, not with the strides under test.
"""

import ctypes
import re
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest
import torch

from mgpu_runtime.exchange import ExchangeError, native
from mgpu_runtime.exchange.board import Board
from mgpu_runtime.exchange.layout import Geometry, Move, deal, starts
from mgpu_runtime.exchange.peer_buffers import MAX_RANKS, Failure, PeerBuffers, _declared, _Page
from mgpu_runtime.exchange.peer_memory import PeerMemory
from mgpu_runtime.exchange.rows import Rows, rows_to_all, with_whole_rows
from tests.boards import two_boards

ARCHS = ("80", "90", "100", "120")
THREADS = 512  # of the kernel
GUARD = 64  # bytes around every result that nothing may write to


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the host shim")
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-fPIC", "-shared"]
    command = [compiler, *flags, str(native.SOURCES / "host_shim.cpp"), "-o", str(path)]
    sanitize = ["-fsanitize=undefined", "-fno-sanitize-recover"]  # misaligned words and overflows, where it is there
    built = subprocess.run([*command, *sanitize], capture_output=True, text=True)
    if built.returncode != 0:
        built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(path))
    address, number = ctypes.c_void_p, ctypes.c_int
    library.shim_push.argtypes = [address] * 4 + [number] * 3 + [address] * 2
    library.shim_places.argtypes = [address, number, ctypes.c_int64, ctypes.c_int64, number, address]
    library.shim_blocks_for.argtypes = [ctypes.c_int64, number, number, number]
    library.shim_target_end.argtypes, library.shim_target_end.restype = [address], ctypes.c_int64
    return library


def exchange(shim, geometry, inputs, *, num_blocks, threads=THREADS, offset=0):
    """Runs every rank's push; returns the results (uint8), and the widths and block counts of the last rank's push.

    Results begin `offset` bytes behind a 16-byte boundary. Fails where a byte of a result is not written exactly once,
    or one outside is written at all.
    """
    world = geometry.world_size
    sizes = [geometry.result_bytes(rank) for rank in range(world)]
    memory = [_aligned(size + 2 * GUARD, offset) for size in sizes]
    counts = [np.zeros(size + 2 * GUARD, np.uint8) for size in sizes]
    results = (ctypes.c_void_p * world)(*(part.ctypes.data + GUARD for part in memory))
    counted = (ctypes.c_void_p * world)(*(part.ctypes.data + GUARD for part in counts))
    widths, shares = (ctypes.c_int * world)(), (ctypes.c_int * world)()
    for rank, x in enumerate(inputs):
        x, strides = with_whole_rows(geometry, x)
        rows = rows_to_all(geometry, rank, strides)
        ends = [shim.shim_target_end(ctypes.byref(row)) for row in rows]
        assert all(end <= size for end, size in zip(ends, sizes, strict=True))
        done = shim.shim_push(rows, x.data_ptr(), results, counted, world, num_blocks, threads, widths, shares)
        assert done == 0, "a block's share of its target is wrong"
    for count, size in zip(counts, sizes, strict=True):
        assert (count[GUARD : GUARD + size] == 1).all(), "not every byte was written exactly once"
        assert not count[:GUARD].any() and not count[GUARD + size :].any()
    return [part[GUARD : GUARD + size] for part, size in zip(memory, sizes, strict=True)], list(widths), list(shares)


def case(move, tokens, num_heads, *, batch=2, channels=8, dtype=torch.bfloat16):
    """Returns a geometry, every rank's input, and every rank's result, cut from one whole tensor."""
    world, heads = len(tokens), deal(num_heads, len(tokens))
    size = torch.empty((), dtype=dtype).element_size()
    shape = (batch, sum(tokens), num_heads, channels)
    numbers = torch.Generator().manual_seed(sum(tokens) + num_heads)
    count = batch * sum(tokens) * num_heads * channels * size
    whole = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=numbers).view(dtype).view(shape)
    by_tokens = [whole[:, first : first + n] for first, n in zip(starts(tokens), tokens, strict=True)]
    by_heads = [whole[:, :, first : first + n] for first, n in zip(starts(heads), heads, strict=True)]
    if move is Move.ALLGATHER:
        geometry = Geometry(move, batch, tuple(tokens), (1,) * world, num_heads * channels * size)
        return geometry, by_tokens, [whole] * world
    geometry = Geometry(move, batch, tuple(tokens), heads, channels * size)
    if move is Move.SEND_RECV_HEADS:
        return geometry, by_tokens, by_heads
    return geometry, by_heads, by_tokens


def check(shim, move, tokens, num_heads, *, num_blocks=11, threads=THREADS, offset=0, spread=False, **kind):
    """Fails unless every rank gets its bytes; `spread` gives inputs whose rows lie apart by odd numbers of elements."""
    geometry, inputs, expected = case(move, tokens, num_heads, **kind)
    inputs = [_spread(x) if spread else x.contiguous() for x in inputs]
    results, widths, shares = exchange(shim, geometry, inputs, num_blocks=num_blocks, threads=threads, offset=offset)
    for result, want in zip(results, expected, strict=True):
        assert result.tobytes() == _bytes(want)
    return widths, shares


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("move", list(Move))
def test_every_rank_gets_its_rows(shim, move, world):
    uneven = [3 * rank % 5 for rank in range(world)]  # zeros among them
    for tokens in ([7] * world, uneven, [0] * (world - 1) + [5], [0] * world):
        for num_heads in (32, world + 1, 1):
            check(shim, move, tokens, num_heads, num_blocks=2 * world + 1)


@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_32_heads_of_128_channels(shim, world):
    for move in Move:
        check(shim, move, [5 + rank % 2 for rank in range(world)], 32, batch=1, channels=128, num_blocks=132)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("move", list(Move))
def test_every_dtype_width_and_misalignment(shim, move, dtype):
    for channels in (1, 3, 4, 16):
        for offset in (0, 8, 2, 1):
            for spread in (False, True):
                check(
                    shim, move, [3, 0, 4], 5, channels=channels, dtype=dtype, offset=offset, spread=spread, threads=32
                )


def test_every_block_count_deals_evenly(shim):
    for world in (1, 3, 8):
        for num_blocks in range(1, 133):
            _, shares = check(
                shim, Move.SEND_RECV_HEADS, [2] * world, 8, batch=1, num_blocks=num_blocks, threads=4, channels=16
            )
            assert shares == [max(1, len(range(target, num_blocks, world))) for target in range(world)]
            if (world, num_blocks) == (8, 132):
                assert shares == [17] * 4 + [16] * 4


def test_words_are_as_wide_as_addresses_allow(shim):
    wide, _ = check(shim, Move.SEND_RECV_HEADS, [4, 4], 4, channels=128)
    assert wide == [16, 16]
    wide, _ = check(shim, Move.SEND_RECV_HEADS, [4, 4], 4, channels=12)  # rows of 48 bytes, 96 apart
    assert wide == [16, 16]
    wide, _ = check(shim, Move.SEND_RECV_HEADS, [4, 4], 2, channels=12)  # rows of 24 bytes
    assert wide == [8, 8]
    wide, _ = check(shim, Move.SEND_RECV_HEADS, [4, 4], 2, channels=128, offset=4)
    assert wide == [4, 4]
    wide, _ = check(shim, Move.GATHER_HEADS, [1, 1], 2, batch=1, channels=8)  # a stride that is not used may be odd
    assert wide == [16, 16]


@pytest.mark.parametrize("word_bytes", [1, 16])
def test_places_hold_beyond_32_bits(shim, word_bytes):
    """Steps of a thread through 100 GiB, against one division for each."""
    batch, tokens, row_words = 3, 1_000_003, 2**31 // 1_000 + 7
    rows = Rows(
        batch=batch,
        tokens=tokens,
        row_bytes=row_words * word_bytes,
        source_first=5 * word_bytes,
        source_batch_stride=tokens * (row_words + 3) * word_bytes,
        source_token_stride=(row_words + 3) * word_bytes,
    )
    step, first = 132 * THREADS * 977 + 13, 16_777_259
    total = batch * tokens * row_words
    num = 4_000
    assert total * word_bytes > 2**41 // 16 and first + num * step < total
    got = (ctypes.c_int64 * num)()
    shim.shim_places(ctypes.byref(rows), word_bytes, first, step, num, got)
    numbers = [first + index * step for index in range(num)]
    want = [
        5 * word_bytes
        + (n // row_words // tokens) * rows.source_batch_stride
        + (n // row_words % tokens) * rows.source_token_stride
        + n % row_words * word_bytes
        for n in numbers
    ]
    assert list(got) == want


def test_the_grid_fits_the_work_and_the_gpu(shim):
    for world in (1, 2, 3, 8, 32):
        assert shim.shim_blocks_for(0, 1, world, 132) == world
        assert shim.shim_blocks_for(THREADS * 4 * 16, 16, world, 132) == world
        assert shim.shim_blocks_for(THREADS * 4 * 16 + 1, 16, world, 132) == 2 * world
        assert shim.shim_blocks_for(2**50, 1, world, 132) == 132
    assert shim.shim_blocks_for(2**30, 16, 8, 4) == 4  # fewer blocks than targets: each serves several


def test_strided_inputs_are_copied_only_where_rows_are_not_whole():
    geometry = Geometry(Move.SEND_RECV_HEADS, 2, (3, 3), (2, 2), 16)
    x = torch.zeros(2, 3, 3, 4, 8, dtype=torch.bfloat16)
    apart, strides = with_whole_rows(geometry, x[:, :, 1])  # q of a joint q, k and v
    assert apart.data_ptr() == x[:, :, 1].data_ptr() and strides == (3 * 3 * 64, 3 * 64, 16)
    heads_first = torch.zeros(2, 4, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    copied, strides = with_whole_rows(geometry, heads_first)
    assert copied.is_contiguous() and strides == (3 * 64, 64, 16)


def test_a_failure_is_read_from_the_page():
    buffers = object.__new__(PeerBuffers)
    buffers.world_size, buffers._page, buffers._handle = 3, _Page(), None
    assert buffers.failure() is None
    buffers._page.failed, buffers._page.number, buffers._page.missing = 1, 7, 0b101
    buffers._page.waited_ns = 2_500_000_000
    assert buffers.failure() == Failure(number=7, missing=(0, 2), seconds=2.5)


def _peer_memory(board: Board, *, gone: bool = False) -> PeerMemory:
    """Returns rank 0 of two, without a GPU; the other rank has ended or not."""
    exchange = object.__new__(PeerMemory)
    exchange.rank, exchange.world_size, exchange._timeout, exchange._board = 0, 2, 0.1, board
    exchange._processes = mock.Mock(is_gone=lambda rank: gone)
    exchange._buffers, exchange._broken, exchange._calls, exchange._sources = mock.Mock(bank_bytes=1 << 20), "", 0, []
    return exchange


def test_memory_is_given_back_only_when_no_peer_can_write_to_it_any_more(caplog):
    for left, gone, free in ((True, False, True), (False, True, True), (False, False, False)):
        mine, other = two_boards()
        exchange = _peer_memory(mine, gone=gone)
        buffers = exchange._buffers
        if left:
            other.leave()
        caplog.clear()
        exchange.close()
        exchange.close()
        assert [call[0] for call in buffers.method_calls] == ["leave", "close"]
        buffers.close.assert_called_once_with(free=free)
        assert ("keeps 2 MB of its GPU's memory" in caplog.text) == (not free)
    exchange = _peer_memory(None)  # where the others' processes cannot be seen
    buffers = exchange._buffers
    exchange.close()
    buffers.close.assert_called_once_with(free=False)


def test_a_peer_that_is_out_of_step_is_named_before_anything_is_written():
    mine, other = two_boards()
    exchange = _peer_memory(mine)
    usual, odd = (Geometry(Move.SEND_RECV_HEADS, 1, (2, n), (2, 2), 8) for n in (2, 3))
    exchange._compare(usual, torch.float16)
    other.started(1, odd, torch.float16)
    other.started(2, usual, torch.float16)
    exchange._calls += 1
    mine.started(2, usual, torch.float16)
    with pytest.raises(ExchangeError, match="rank 0 cannot do exchange number 1 over csrc: rank 1 called another"):
        exchange._refuse_unlike()
    exchange._buffers.stop.assert_called_once_with()
    with pytest.raises(ExchangeError, match="cannot be used any more: rank 0 cannot do exchange number 1"):
        exchange.check()


def test_python_and_c_agree_on_the_layout():
    header = (native.SOURCES / "exchange_rows.h").read_text()
    kernels = (native.SOURCES / "exchange_kernels.h").read_text()
    cpu = (native.SOURCES / "exchange_cpu.c").read_text()
    assert re.search(r"typedef struct {([^}]*)} Block;", cpu).group(1).count("uint64_t") == 3
    assert _names(re.search(r"typedef struct {([^}]*)} Block;", cpu).group(1)) == [name for name, _ in Rows._fields_]
    assert _fields(header, "Rows") == [name for name, _ in Rows._fields_]
    assert _fields(kernels, "Page") == [name for name, _ in _Page._fields_]
    assert f"kMaxRanks = {MAX_RANKS};" in header


def test_kernels_compile_for_every_architecture(tmp_path):
    """Once with the flags of `native`, for four architectures and without warnings."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    target = native._cuda_target("90")
    flags = [flag for flag in target.flags if not flag.startswith("-gencode")]
    for arch in ARCHS:
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    flags += ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Xptxas", "-v"]
    library = tmp_path / "exchange.so"
    built = subprocess.run(
        [nvcc, *flags, str(native.SOURCES / target.source), "-o", str(library)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", built.stderr)
    assert len(stacks) == 2 * len(ARCHS) and set(stacks) == {("0", "0")}  # arguments are not copied to local memory
    found = _declared(ctypes.CDLL(str(library)))  # every function is there
    made, handle, bus = ctypes.c_void_p(), ctypes.create_string_buffer(64), ctypes.create_string_buffer(32)
    assert b"more ranks" in found.exchange_make(0, 0, MAX_RANKS + 1, ctypes.byref(made), handle, bus)
    if not torch.cuda.is_available():
        assert b"no NVIDIA driver" in found.exchange_make(0, 0, 2, ctypes.byref(made), handle, bus)


def _fields(source: str, name: str) -> list[str]:
    return _names(re.search(rf"struct {name} {{(.*?)}};", source, re.DOTALL).group(1))


def _names(body: str) -> list[str]:
    lines = [re.sub(r"//.*", "", line) for line in body.splitlines()]
    return [field for line in lines for field in re.findall(r"(\w+)(?=[,;])", line)]


def _aligned(size: int, offset: int) -> np.ndarray:
    memory = np.zeros(size + 32, np.uint8)
    first = -memory.ctypes.data % 16 + offset
    return memory[first : first + size]


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Returns the same values with tokens and samples further apart, by an odd number of elements."""
    batch, tokens, heads, channels = x.shape
    token_stride = heads * channels + 1
    batch_stride = tokens * token_stride + 2
    memory = x.new_zeros(batch * batch_stride + 1)
    spread = memory[1:].as_strided(x.shape, (batch_stride, token_stride, channels, 1), 1)
    spread.copy_(x)
    return spread


def _bytes(x: torch.Tensor) -> bytes:
    x = x.contiguous()
    return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
