"""Values and tensors to bytes and back, frames through a socket, lines out of pieces; no process is started."""

import os
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_runtime.fleet.codec import pack, unpack
from mgpu_runtime.fleet.frames import Channel, Frame, FrameReader, Port
from mgpu_runtime.fleet.lines import LineSplitter
from mgpu_runtime.fleet.records import Answer, Cancel, Go, Job, JobDone, read_record, write_record

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def round_trip(value):
    return unpack(pack(JobDone("job-1"), value))


def num_fds():
    return len(os.listdir("/proc/self/fd"))


@given(values)
@settings(max_examples=100, deadline=None)
def test_nested_values_come_back_equal_and_of_the_same_types(value):
    back = round_trip(value)
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_equal(dtype):
    tensor = torch.arange(24).remainder(2).reshape(2, 3, 4).to(dtype)
    back = round_trip(tensor)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.float16),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.zeros(1).expand(5, 7),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=["0-dim", "empty", "empty-3d", "transposed", "strided", "expanded", "parameter", "nan"],
)
def test_odd_tensors_come_back_as_ordinary_ones(tensor):
    back = round_trip({"x": [tensor]})["x"][0]
    assert back.shape == tensor.shape and back.is_contiguous() and not back.requires_grad
    assert torch.equal(back.nan_to_num(7.0), tensor.detach().nan_to_num(7.0))


def test_b123_received_tensors_are_writable_and_outside_inference_mode():
    with torch.inference_mode():
        sent = torch.arange(6.0)
        first, second = round_trip((sent, sent))
    assert not first.is_inference() and not first.is_shared()
    first.add_(1)
    assert torch.equal(second, torch.arange(6.0))
    assert torch.equal(sent, torch.arange(6.0))
    first.requires_grad_().sum().backward()
    assert first.untyped_storage().nbytes() == 24  # holds its own bytes only


def test_what_cannot_be_sent_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"value\['a'\]\[1\] is a builtins.object"):
        round_trip({"a": [1, object()]})
    with pytest.raises(ValueError, match="has the key"):
        round_trip({(1, 2): 3})
    with pytest.raises(ValueError, match="dense"):
        round_trip(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="holds values"):
        round_trip(torch.empty(3, device="meta"))


def test_records_come_back_equal():
    for record in (
        Answer(1, "job-2", "run", "error", "ValueError", "na\u00efve \n text", "trace"),
        Job("job-1", None, 30.0),
    ):
        assert read_record(write_record(record)) == record


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_frames_come_whole_and_in_order_whatever_the_pieces(sizes, with_block):
    mine, theirs = socket.socketpair()
    frames = [pack(Cancel(f"job-{i}"), torch.arange(n) if i % 2 == with_block % 2 else n) for i, n in enumerate(sizes)]
    channel, reader, got = Channel(mine), FrameReader(), []
    for frame in frames:
        assert channel.send(frame)
    mine.close()
    while reader.feed_from(theirs):
        while (frame := reader.next_frame()) is not None:
            got.append(frame)
    theirs.close()
    assert [frame.record for frame in got] == [Cancel(f"job-{i}") for i in range(len(sizes))]
    for i, (frame, n) in enumerate(zip(got, sizes, strict=True)):
        value = unpack(frame)
        assert torch.equal(value, torch.arange(n)) if i % 2 == with_block % 2 else value == n


def test_large_tensors_and_payloads_pass_and_no_descriptor_stays():
    before = num_fds()
    mine, theirs = socket.socketpair()
    sender, receiver = Channel(mine), Channel(theirs)
    big, text = torch.arange(16 << 20, dtype=torch.float32), "x" * 3_000_000
    frames = [pack(JobDone("j"), {"big": big, "text": text}) for _ in range(3)]
    thread = threading.Thread(target=lambda: [sender.send(frame) for frame in frames])
    thread.start()
    for _ in range(3):
        value = unpack(receiver.receive())
        assert torch.equal(value["big"], big) and value["text"] == text
    thread.join()
    mine.close()
    assert receiver.receive() is None
    theirs.close()
    assert num_fds() == before


def test_port_never_blocks_and_drops_blocks_when_the_peer_is_gone():
    before = num_fds()
    mine, theirs = socket.socketpair()
    port = Port(mine)
    for _ in range(300):
        port.post(pack(JobDone("j"), ["x" * 5000, torch.ones(3)]))
    assert port.num_waiting > 0
    receiver = Channel(theirs)
    assert torch.equal(unpack(receiver.receive())[1], torch.ones(3))
    receiver.close()
    port.flush()
    assert port.num_waiting == 0 and not port.is_open
    port.post(pack(JobDone("j"), torch.ones(3)))
    port.flush()
    assert port.num_waiting == 0
    mine.close()
    assert num_fds() == before


def test_frame_copy_has_a_block_of_its_own():
    frame = pack(Go("j"), torch.ones(2))
    copy = frame.copy()
    frame.close()
    assert torch.equal(unpack(copy), torch.ones(2))
    assert Frame(Go("j")).copy().block is None


@given(st.lists(st.sampled_from(["one", "two words", "\u00e9", "a" * 700, ""]), max_size=10), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_lines_are_whole_whatever_the_pieces(lines, size):
    data = "".join(line + "\n" for line in lines).encode() + b"no end"
    splitter, got = LineSplitter(), []
    for i in range(0, len(data), size):
        got += splitter.feed(data[i : i + size])
    got += splitter.feed(b"", is_end=True)
    assert got == [line[:500] for line in lines if line] + ["no end"]
