"""`bench sp`: one step of a small LTX transformer under sequence parallelism, against one worker and the usual code."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..models.streams import StreamInput
from ..models.transformer import LTXTransformer
from ..parallel.attention_manager import AttentionManager
from ..parallel.sequence_parallel import SequenceParallelModelWrapper
from ..sampling.positions import audio_positions, video_positions
from ..sampling.sizes import audio_latent_frames, pixel_frames
from .harness import Contestant, Times, measure, relative_difference
from .plan import SP_BLOCKS, SP_HEAD_DIM, SP_HEADS, BenchPlan, sp_tokens
from .usual_attention import UsualSequenceParallel

_CHANNELS = 128
_AUDIO_HEAD_DIM = 32
_TEXT_TOKENS = 128
_FPS = 24.0
_SIGMA = 0.7


def bench_sp(
    plan: BenchPlan, case: str, group: dist.ProcessGroup, on_round: Callable[[int], None]
) -> tuple[dict[str, Times], dict]:
    """Measures one case; returns the times of ours and its peers, and what the case is. Collective."""
    tokens = sp_tokens(case)
    grid = _grid(tokens)
    video, audio = _streams(grid)
    manager = AttentionManager(
        tokens, SP_HEADS, SP_HEAD_DIM, torch.float32, group, transport=plan.transport, timeout=plan.timeout
    )
    plain = _transformer()
    ours = SequenceParallelModelWrapper(_twin(plain), manager)
    usual = UsualSequenceParallel(_twin(plain), group)
    with torch.no_grad():
        difference = _largest_difference(plain, (ours, usual), video, audio, group)
        times = measure(
            {
                "ours": Contestant(lambda: ours.predict(video, audio)),
                "one_worker": Contestant(lambda: plain.predict(video, audio), solo=True),
                "usual": Contestant(lambda: usual.predict(video, audio)),
                "two_processes": Contestant(lambda: plain.predict(video, audio), pieces=manager.world_size),
            },
            runs=plan.num_runs(case),
            group=group,
            warm_ups=0,  # all have run once, to be compared
            on_round=on_round,
        )
    exchange = manager.exchange
    facts = {
        "transport": exchange.transport,
        "exchange": exchange.description,
        "dtype": "float32",
        "blocks": SP_BLOCKS,
        "heads": SP_HEADS,
        "head_dim": SP_HEAD_DIM,
        "video_tokens": tokens,
        "audio_tokens": audio.num_tokens,
        "text_tokens": _TEXT_TOKENS,
        "max_rel_diff": difference,
    }
    manager.close()
    return times, facts


def _transformer() -> LTXTransformer:
    """Makes a 2.3-style transformer with the layers' own random starts, the same on every rank."""
    width, audio_width = SP_HEADS * SP_HEAD_DIM, SP_HEADS * _AUDIO_HEAD_DIM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LTXTransformer(
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            num_attention_heads=SP_HEADS,
            attention_head_dim=SP_HEAD_DIM,
            cross_attention_dim=width,
            gated_attn=True,
            cross_attn_mod=True,
            audio_in_channels=_CHANNELS,
            audio_out_channels=_CHANNELS,
            audio_num_attention_heads=SP_HEADS,
            audio_attention_head_dim=_AUDIO_HEAD_DIM,
            audio_cross_attention_dim=audio_width,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
            num_layers=SP_BLOCKS,
            rope_type="split",
            use_prompt_embeddings=False,
        )
    return model.eval()


def _twin(model: LTXTransformer) -> LTXTransformer:
    """Returns another model over the same weights, with attention of its own choosing."""
    with torch.device("meta"):
        twin = _transformer()
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def _grid(tokens: int) -> tuple[int, int, int]:
    """Returns a latent size (F, H, W) of so many tokens: 8 frames (2.4 s) where they divide, as square as it goes."""
    frames = 8 if tokens % 8 == 0 else 1
    cells = tokens // frames
    height = next(side for side in range(math.isqrt(cells), 0, -1) if cells % side == 0)
    return frames, height, cells // height


def _streams(grid: tuple[int, int, int]) -> tuple[StreamInput, StreamInput]:
    """Makes the streams of a clip that is generated as a whole: one noise level for all tokens."""
    generator = torch.Generator().manual_seed(1)

    def stream(positions: torch.Tensor, width: int) -> StreamInput:
        return StreamInput(
            latent=torch.randn(1, positions.shape[2], _CHANNELS, generator=generator),
            timesteps=torch.full((1, 1), _SIGMA),
            sigma=torch.full((1,), _SIGMA),
            positions=positions,
            context=torch.randn(1, _TEXT_TOKENS, width, generator=generator),
        )

    num_audio = audio_latent_frames(pixel_frames(grid[0]), _FPS)
    video = stream(video_positions(grid, _FPS), SP_HEADS * SP_HEAD_DIM)
    return video, stream(audio_positions(num_audio), SP_HEADS * _AUDIO_HEAD_DIM)


def _largest_difference(
    plain: LTXTransformer,
    spread: tuple[SequenceParallelModelWrapper, UsualSequenceParallel],
    video: StreamInput,
    audio: StreamInput,
    group: dist.ProcessGroup,
) -> float:
    """Compares both velocities of every spread model with those of one process."""
    alone = plain.predict(video, audio)
    return max(
        relative_difference(mine, reference, group)
        for model in spread
        for mine, reference in zip(model.predict(video, audio), alone, strict=True)
    )
