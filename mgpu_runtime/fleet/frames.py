"""Frames over a unix socket: a record, an opaque payload, and at most one descriptor of a memory block.

Linux keeps a descriptor with the first byte of the message it was sent with, so the descriptors arrive in the
order of the frames that announce them.
"""

import os
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass

from .descriptors import out_of_descriptors
from .records import Record, read_record, write_record

_PREFIX = struct.Struct("<4sIQB")  # mark, bytes of the record, bytes of the payload, number of descriptors (0 or 1)
_MARK = b"MGPU"
_CHUNK = 1 << 16
_MAX_FDS = 16


@dataclass
class Frame:
    """One message; whoever holds it owns `block`, a descriptor, until `close` or `take_block`."""

    record: Record
    payload: bytes = b""
    block: int | None = None

    def close(self) -> None:
        """Closes the block, if the frame still has one."""
        if self.block is not None:
            os.close(self.block)
            self.block = None

    def take_block(self) -> int | None:
        """Hands the block over to the caller, who closes it."""
        block, self.block = self.block, None
        return block

    def copy(self) -> "Frame":
        """Returns a frame with a block descriptor of its own."""
        return Frame(self.record, self.payload, None if self.block is None else os.dup(self.block))

    def to_bytes(self) -> bytes:
        """Returns the frame as it goes over the socket, without its descriptor."""
        text = write_record(self.record)
        return _PREFIX.pack(_MARK, len(text), len(self.payload), self.block is not None) + text + self.payload


class FrameReader:
    """Puts frames together from what a socket delivers."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed_from(self, sock: socket.socket, flags: int = 0) -> bool:
        """Takes what one recvmsg gives; False at the end of the stream.

        Raises BlockingIOError as recvmsg does, and FleetError when a descriptor came for which there was no room.
        """
        try:
            data, fds, ancillary, _ = socket.recv_fds(sock, _CHUNK, _MAX_FDS, flags | socket.MSG_CMSG_CLOEXEC)
        except (ConnectionResetError, BrokenPipeError):
            return False
        self._data += data
        self._fds.extend(fds)
        if ancillary & socket.MSG_CTRUNC:
            raise out_of_descriptors()
        return bool(data)

    def next_frame(self) -> Frame | None:
        """Returns the next whole frame, or None when more must be read first."""
        if len(self._data) < _PREFIX.size:
            return None
        mark, text_size, payload_size, num_fds = _PREFIX.unpack_from(self._data)
        assert mark == _MARK, f"not a frame of this fleet: {mark!r}"
        start, middle = _PREFIX.size, _PREFIX.size + text_size
        end = middle + payload_size
        if len(self._data) < end:
            return None
        record, payload = read_record(bytes(self._data[start:middle])), bytes(self._data[middle:end])
        del self._data[:end]
        return Frame(record, payload, self._fds.popleft() if num_fds else None)

    def close(self) -> None:
        """Closes the descriptors of frames that nobody will take."""
        while self._fds:
            os.close(self._fds.popleft())


class Channel:
    """The blocking end of a connection: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> bool:
        """Sends the frame and closes its block; False when the other end is gone."""
        data = memoryview(frame.to_bytes())
        fds = [] if frame.block is None else [frame.block]
        try:
            with self._sending:
                sent = socket.send_fds(self.sock, [data], fds)
                self.sock.sendall(data[sent:])
        except (ConnectionError, TimeoutError, BlockingIOError):
            return False
        finally:
            frame.close()
        return True

    def receive(self) -> Frame | None:
        """Waits for the next frame; None when the other end is gone. Raises FleetError as `feed_from` does."""
        while (frame := self._reader.next_frame()) is None:
            if not self._reader.feed_from(self.sock):
                return None
        return frame

    def close(self) -> None:
        """Closes the connection; nobody may be sending or receiving any more."""
        self.sock.close()
        self._reader.close()


class Port:
    """The end of a connection that never blocks, for the supervisor's loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.is_open = True
        self._reader = FrameReader()
        self._outbox: deque[tuple[Frame, memoryview]] = deque()

    @property
    def num_waiting(self) -> int:
        """How many frames wait for the other end to read."""
        return len(self._outbox)

    def post(self, frame: Frame) -> None:
        """Queues the frame, which the port now owns, and sends as much as fits."""
        self._outbox.append((frame, memoryview(frame.to_bytes())))
        self.flush()

    def flush(self) -> None:
        """Sends queued frames until the socket takes no more; after the end of the stream they are dropped."""
        try:
            while self._outbox and self.is_open:
                frame, rest = self._outbox[0]
                # A block goes with the first bytes; what is left of a frame after that has none.
                sent = socket.send_fds(self.sock, [rest], [] if frame.block is None else [frame.block])
                frame.close()
                self._outbox[0] = (frame, rest[sent:])
                if sent == len(rest):
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except ConnectionError:
            self.is_open = False
        if not self.is_open:
            self._drop_all()

    def pull(self) -> list[Frame]:
        """Returns the frames that are complete after one read; `is_open` turns False at the end of the stream.

        Raises FleetError as `feed_from` does.
        """
        try:
            self.is_open = self._reader.feed_from(self.sock) and self.is_open
        except BlockingIOError:
            return []
        frames = []
        while (frame := self._reader.next_frame()) is not None:
            frames.append(frame)
        return frames

    def _drop_all(self) -> None:
        while self._outbox:
            self._outbox.popleft()[0].close()
