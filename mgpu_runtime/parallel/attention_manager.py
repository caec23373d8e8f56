"""Attention over a sequence that is spread over ranks, by trading tokens for heads around it.

Letters: B batch, T real video tokens, R rows of one rank (its real tokens, then padding), t real tokens of one rank, W
world size, H heads, h heads of one rank, D channels of a head, A audio tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import DEFAULT_TIMEOUT, ExchangeError, Pending, exchange_for, ops
from ..exchange.layout import deal, starts
from ..models.attention import Attend, attend_locally
from .limits import check_heads, check_tokens
from .shares import Shares

# How far apart ranks may come to a forward, in seconds: the first rank may be decoding a preview, or loading what it
# decodes with. In the first forward of a shape, where ranks may compile or choose kernels, it holds all the way.
MEETING_TIMEOUT = 600.0


class AttentionManager:
    """Holds the exchange of one transformer and what it needs to know of the sequence in flight.

    Making one is collective, as is `close`. `transport`, `timeout` (seconds) and `wait_while_busy` are the exchange's,
    see `exchange_for`; `device` is where the tensors are. With `copy_out_` the exchange copies its results out of its
    buffers, which the attentions here do not need.

    Raises ValueError for more ranks than heads, and ExchangeError where `transport` cannot work.

    Attributes:
        video_self: attends video to video; rows of one rank in and out, (B, R, H, D).
        video_to_audio: attends replicated audio queries, (B, A, H, D), to spread video.
        is_whole: whether every forward came to its end; else the exchange is of no more use.
    """

    def __init__(
        self,
        max_tokens: int,
        num_heads: int,
        head_dim: int,
        tensor_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        copy_out_: bool = False,
        *,
        transport: str = "auto",
        device: torch.device | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        wait_while_busy: bool = False,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"sp_max_tokens must be at least 1, got {max_tokens}")
        check_heads(num_heads, 1 if group is None else dist.get_world_size(group))
        self.max_tokens = max_tokens
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.tensor_dtype = tensor_dtype
        self.exchange = exchange_for(
            group,
            transport=transport,
            device=device,
            timeout=timeout,
            copy_out=copy_out_,
            wait_while_busy=wait_while_busy,
        )
        ops.enlist(self.exchange)  # a compiled block knows it by number
        self.video_self: Attend = _VideoSelf(self)
        self.video_to_audio: Attend = _VideoToAudio(self)
        self.is_whole = True
        self._shares: Shares | None = None
        self._rulers: tuple[Tensor, ...] = ()  # the numbers of _shares that a compiled graph needs, as it can read them
        self._shapes: set[tuple[int, ...]] = set()
        self._patience: ExitStack | None = None

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    def check(self) -> None:
        """Raises ExchangeTimeout where a GPU waited in vain, which it cannot say itself: once the GPU is done."""
        whole, self.is_whole = self.is_whole, False
        self.exchange.check()
        self.is_whole = whole

    def close(self) -> None:
        """Gives back what the exchange holds."""
        self.exchange.close()

    @contextmanager
    def sequence(self, num_tokens: int, device: torch.device, shape: tuple[int, ...] = ()) -> Iterator[Shares]:
        """Announces the forward inside: its real tokens, where its tensors are, what else tells its shape from others.

        Yields how the tokens are dealt. Raises ValueError for more tokens than `max_tokens`, ExchangeError after a
        forward that did not come to its end.
        """
        check_tokens(num_tokens, self.max_tokens)
        if not self.is_whole:
            raise ExchangeError("a forward was broken off in the middle of an exchange: make a new AttentionManager")
        shape = (num_tokens, *shape)
        shares = self._shares = Shares.of(num_tokens, self.world_size, device)
        self._rulers = ops.rulers((*shares.tokens, shares.rows[self.exchange.rank]))
        self.is_whole = self.world_size == 1  # alone there is nothing to break
        try:
            with ExitStack() as patience:
                patience.enter_context(self.exchange.patience(MEETING_TIMEOUT))
                self._patience = patience if shape in self._shapes else None
                yield shares
        finally:
            self._shares = self._patience = None
        self._shapes.add(shape)
        self.is_whole = True

    def start(self, x: Tensor) -> Pending | Tensor:
        """Starts to trade tokens for heads; in a compiled graph, where nothing overlaps, it only passes x on."""
        x = self.without_padding(x)
        if torch.compiler.is_compiling():
            return x
        return self.exchange.start_send_recv_heads(x, self._tokens())

    def finish(self, *started: Pending | Tensor) -> tuple[Tensor, ...]:
        """Ends what `start` began, in the same order, with one synchronisation: (B, T, h, D) each.

        Results are good until this rank starts another exchange.
        """
        if isinstance(started[0], Tensor):  # begun in a compiled graph, though that may have ended since
            return ops.send_recv_heads_many(self.exchange, started, self._tokens())
        # The last first: where it has arrived all have, which some transports know, while the join of the block before,
        # which was started earlier, is waited for by itself.
        results = tuple(pending.wait() for pending in reversed(started))[::-1]
        if self._patience is not None:  # the ranks have met in this forward
            self._patience.close()
            self._patience = None
        return results

    def start_gather(self, make: Callable[[int, int], Tensor]) -> Pending | Tensor:
        """Starts to trade heads for tokens, of (B, T, h, D) that `make(first, count)` makes some tokens of at a time.

        Those that other ranks wait for are made first. In a compiled graph, where nothing overlaps, it is done at once.
        """
        tokens = self._tokens()
        if torch.compiler.is_compiling():
            return ops.gather_heads(self.exchange, make(0, sum(tokens)), tokens, self.num_heads)
        return self.exchange.start_gather_heads_of(make, tokens, self.num_heads)

    def finish_gather(self, started: Pending | Tensor) -> Tensor:
        """Ends what `start_gather` began: (B, R, H, D), zeros in the padding."""
        x = started if isinstance(started, Tensor) else started.wait()
        real = self._tokens()[self.exchange.rank]
        if torch.compiler.is_compiling():  # one graph for shares with and without padding
            padding = self._rulers[-1].shape[0] - real
        else:
            padding = self._shares.rows[self.exchange.rank] - real
            if not padding:
                return x
        return torch.cat([x, x.new_zeros(x.shape[0], padding, *x.shape[2:])], 1)

    def start_join(self, x: Tensor, heads: tuple[int, ...]) -> Pending | Tensor:
        """Starts to join the ranks' heads of tokens that all of them have, (B, A, h, D)."""
        x = x.transpose(1, 2)
        if torch.compiler.is_compiling():
            return ops.allgather(self.exchange, x, heads)
        return self.exchange.start_allgather(x, heads)

    def finish_join(self, started: Pending | Tensor) -> Tensor:
        """Ends what `start_join` began: (B, A, H, D)."""
        return (started if isinstance(started, Tensor) else started.wait()).transpose(1, 2)

    def join_tokens(self, x: Tensor) -> Tensor:
        """Joins the ranks' rows to the whole sequence, (B, R, C) to (B, T, C), in memory of its own."""
        return self.exchange.allgather(self.without_padding(x), self._tokens()).clone()

    def without_padding(self, x: Tensor) -> Tensor:
        """Cuts this rank's rows down to its real tokens."""
        return x[:, : self._tokens()[self.exchange.rank]]

    def _tokens(self) -> tuple[int, ...]:
        """Returns the real tokens of each rank."""
        assert self._shares is not None, "attention outside of AttentionManager.sequence()"
        return ops.lengths(self._rulers[:-1]) if torch.compiler.is_compiling() else self._shares.tokens


class _VideoSelf(Attend):
    """Serves a share of the heads over the real tokens of the whole video, then trades back.

    Exact for every attention backend: padding never comes here, so there is nothing to mask.
    """

    def __init__(self, manager: AttentionManager) -> None:
        self._manager = manager

    def send(self, x: Tensor) -> Pending | Tensor:
        return self._manager.start(x)

    def send_queries(self, q: Tensor) -> Pending | Tensor:
        return self._manager.start(q)

    def __call__(self, sent_q: Any, sent_k: Any, sent_v: Any, bias: Tensor | None) -> Pending | Tensor:
        v, k, q = self._manager.finish(sent_v, sent_k, sent_q)

        def attend(first: int, count: int) -> Tensor:
            part = bias if bias is None or bias.shape[2] == 1 else bias.narrow(2, first, count)
            return attend_locally(q.narrow(1, first, count), k, v, part)

        return self._manager.start_gather(attend)

    def receive(self, attended: Pending | Tensor) -> Tensor:
        return self._manager.finish_gather(attended)


class _VideoToAudio(_VideoSelf):
    """Serves a share of the heads, then joins the heads: the same sums as in one process.

    Merging partial softmaxes instead would only be close, and its rounding would depend on the number of ranks.
    """

    def send_queries(self, q: Tensor) -> Tensor:
        return q  # every rank has them

    def __call__(self, q: Tensor, sent_k: Any, sent_v: Any, bias: Tensor | None) -> Pending | Tensor:
        exchange = self._manager.exchange
        heads = deal(q.shape[2], exchange.world_size)
        own = q.narrow(2, starts(heads)[exchange.rank], heads[exchange.rank])
        v, k = self._manager.finish(sent_v, sent_k)
        return self._manager.start_join(attend_locally(own, k, v, bias), heads)

    def receive(self, attended: Pending | Tensor) -> Tensor:
        return self._manager.finish_join(attended)
