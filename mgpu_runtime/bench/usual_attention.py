"""A transformer under context parallelism as it is usually written: the peer of our sequence parallelism.

Letters: B batch, T tokens.
"""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from ..models.attention import Attend, attend_locally
from ..models.streams import StreamInput
from ..models.transformer import LTXTransformer
from .usual import UsualExchange


class UsualSequenceParallel:
    """A transformer whose video tokens are spread in the usual way; takes over the model's attention."""

    def __init__(self, model: LTXTransformer, group: dist.ProcessGroup) -> None:
        self.model = model
        self.exchange = UsualExchange(group)
        model.use_attention(video_self=_VideoSelf(self.exchange), video_to_audio=_VideoToAudio(self.exchange))

    def predict(self, video: StreamInput, audio: StreamInput) -> tuple[Tensor, Tensor]:
        """Returns the velocities of the whole streams, (B, T, channels); the video tokens divide over the ranks."""
        velocity, audio_velocity = self.model.predict(self._share(video), audio)
        return self.exchange.join(velocity, dim=1), audio_velocity

    def _share(self, video: StreamInput) -> StreamInput:
        def own(x: Tensor, dim: int) -> Tensor:
            return x.chunk(self.exchange.world_size, dim=dim)[self.exchange.rank]

        shared_timestep = video.timesteps.shape[1] == 1
        return replace(
            video,
            latent=own(video.latent, 1),
            timesteps=video.timesteps if shared_timestep else own(video.timesteps, 1),
            positions=own(video.positions, 2),
        )


class _VideoSelf(Attend):
    """Exchanges queries, keys and values one after the other, then the output."""

    def __init__(self, exchange: UsualExchange) -> None:
        self.exchange = exchange

    def __call__(self, q: Tensor, sent_k: Tensor, sent_v: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (self.exchange.send_recv_heads(x) for x in (q, sent_k, sent_v))
        return self.exchange.gather_heads(attend_locally(q, k, v, bias))


class _VideoToAudio(_VideoSelf):
    """Exchanges keys and values; audio is on every rank, which serves its heads and gathers the others'."""

    def __call__(self, q: Tensor, sent_k: Tensor, sent_v: Tensor, bias: Tensor | None) -> Tensor:
        k, v = (self.exchange.send_recv_heads(x) for x in (sent_k, sent_v))
        own = q.chunk(self.exchange.world_size, dim=2)[self.exchange.rank]
        return self.exchange.join(attend_locally(own, k, v, bias), dim=2)
