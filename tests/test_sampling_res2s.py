"""The res_2s sampler: its order on a flow with a known answer, its noise, and the loop around it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgpu_runtime.sampling.conditioning import append_keyframe, place_latent
from mgpu_runtime.sampling.loop import denoise_loop
from mgpu_runtime.sampling.noise import item_generators
from mgpu_runtime.sampling.res2s import FreshNoise, Span, renoise, res2s_loop
from mgpu_runtime.sampling.state import StreamState, audio_state, video_state

MEAN, SPREAD = 0.3, 0.7  # of the Gaussian data below
LAST = 0.0011


def gaussian_clean(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """The best clean prediction for data N(MEAN, SPREAD^2): E[data | x] with x = (1-s) data + s noise."""
    gain = SPREAD**2 * (1 - sigma) / ((1 - sigma) ** 2 * SPREAD**2 + sigma**2)
    return MEAN + gain * (x - (1 - sigma) * MEAN)


def gaussian_flow(noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """Where the exact flow takes noise (level 1) by level sigma: the standard score is kept."""
    return (1 - sigma) * MEAN + noise * math.sqrt((1 - sigma) ** 2 * SPREAD**2 + sigma**2)


class Recorder:
    """A model that predicts as `gaussian_clean` and keeps the levels, steps and tokens it was asked about."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def __call__(self, video, audio, sigma, step):
        self.calls.append(SimpleNamespace(video=video, audio=audio, sigma=sigma, step=step))
        return tuple(None if s is None else gaussian_clean(s.latent, sigma).float() for s in (video, audio))


def start(batch: int = 1) -> tuple[StreamState, StreamState]:
    generator = torch.Generator().manual_seed(1)
    video = video_state(torch.zeros(batch, 4, 2, 2, 3), 24.0)
    audio = audio_state(torch.zeros(batch, 2, 5, 4))
    return tuple(s.with_noise(torch.randn(s.latent.shape, generator=generator), 1.0) for s in (video, audio))


def none_fresh(batch: int = 1) -> FreshNoise:
    return FreshNoise(0, batch, eta=0.0)


def test_the_error_falls_with_the_square_of_the_steps_and_eulers_with_the_steps():
    def res2s(*arguments):
        return res2s_loop(*arguments, noise=none_fresh())

    # level 1 to 0.3 in ever smaller steps, where the logarithm of the level is tame
    for loop, order in ((res2s, 2), (denoise_loop, 1)):
        errors = [error_on_the_way(loop, num_steps) for num_steps in (8, 16, 32)]
        measured = [math.log2(errors[i] / errors[i + 1]) for i in (0, 1)]
        assert measured == pytest.approx([order] * 2, abs=0.25), errors
    assert error_on_the_way(res2s, 8) < error_on_the_way(denoise_loop, 32) / 4


def error_on_the_way(loop, num_steps: int) -> float:
    """Takes even steps from level 1 to 0.3 and compares the tokens there with the exact flow."""
    end = 0.3
    sigmas = torch.linspace(1.0, end, num_steps + 1, dtype=torch.float64).tolist()
    video, model = start()[0], Recorder()
    loop(video, None, [*sigmas, 0.0], model)
    asked = next(call for call in model.calls if call.sigma == end)
    return float((asked.video.latent.double() - gaussian_flow(video.latent.double(), end)).abs().max())


def test_the_whole_loop_ends_at_the_exact_flow():
    """In many small steps, that is: the published 15 leave the last one a factor of 100 in the level."""
    video, audio = start()
    sigmas = [1.0, *torch.logspace(-0.02, -2.9, 80).tolist(), 0.0]
    made = res2s_loop(video, audio, sigmas, Recorder(), noise=none_fresh())
    for state, before in zip(made, (video, audio), strict=True):
        exact = gaussian_flow(before.latent, 0.0)
        assert (state.latent - exact).abs().max() < 2e-3


def phi(order: int, z: float) -> float:
    """phi_1 and phi_2 by their series."""
    return sum(z**k / math.factorial(k + order) for k in range(30))


@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.99), (0.9, 0.2), (0.4, 0.0011)])
def test_the_weights_are_those_of_the_exponential_integrator(sigma, sigma_next):
    """Node 1/2: a21 = phi_1(-h/2)/2, b2 = 2 phi_2(-h), b1 = phi_1(-h) - b2, each times h."""
    h, span = math.log(sigma / sigma_next), Span.of(sigma, sigma_next)
    assert span.middle == pytest.approx(sigma * math.exp(-h / 2))
    assert span.to_middle == pytest.approx(h * phi(1, -h / 2) / 2)
    assert span.second == pytest.approx(h * 2 * phi(2, -h))
    assert span.first == pytest.approx(h * (phi(1, -h) - 2 * phi(2, -h)))


def plain_step(x, sigma, sigma_next, first_noise, second_noise, eta):
    """One noisy step as the official loop writes it, in numpy, its start refined by 100 iterations."""
    h = math.log(sigma / sigma_next)
    a21, b2 = phi(1, -h / 2) / 2, 2 * phi(2, -h)
    b1, middle_level = phi(1, -h) - b2, math.sqrt(sigma * sigma_next)
    d1 = gaussian_clean(x, sigma)
    eps = d1 - x
    middle = plain_renoise(x, x + h * a21 * eps, sigma, middle_level, first_noise, 0.5)
    anchor = x
    if h < 0.5 and sigma > 0.03:
        for _ in range(100):
            anchor = middle - h * a21 * eps
            eps = d1 - anchor
    d2 = gaussian_clean(middle, middle_level)
    end = anchor + h * (b1 * eps + b2 * (d2 - anchor))
    return plain_renoise(anchor, end, sigma, sigma_next, second_noise, eta)


def plain_renoise(x, y, sigma, sigma_next, noise, eta):
    up = min(sigma_next * eta, sigma_next * 0.9999)
    residual = math.sqrt(sigma_next**2 - up**2)
    ratio = (1 - sigma_next) + residual
    eps = (x - y) / (sigma - sigma_next)
    return ratio * ((x - sigma * eps) + residual / ratio * eps) + up * noise


def standardised(seed: int, shape: tuple[int, ...]):
    """The draws of a generator, one after the other, each of mean 0 and deviation 1."""
    (generator,) = item_generators(seed, 1)
    while True:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield ((noise - noise.mean()) / noise.std())[None]


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_noisy_steps_equal_the_official_form(eta):
    sigmas, video, model = [1.0, 0.9, 0.75, 0.3, 0.0], start()[0], Recorder()
    made, _ = res2s_loop(video, None, sigmas, model, noise=FreshNoise(7, 1, eta=eta))
    steps, middles = standardised(7 + 10000, (12, 4)), standardised(7 + 20000, (12, 4))
    x = video.latent.double()
    for sigma, sigma_next in zip(sigmas, [*sigmas[1:-1], LAST], strict=False):
        x = plain_step(x, sigma, sigma_next, next(middles), next(steps), eta).float().double()
    torch.testing.assert_close(made.latent, gaussian_clean(x, LAST).float(), atol=2e-6, rtol=0)


def test_fresh_noise_keeps_the_amount_of_noise():
    """Tokens keep the deviation that their level says, whatever the share of fresh noise."""
    generator = torch.Generator().manual_seed(3)
    clean, old, fresh = (torch.randn(200_000, generator=generator, dtype=torch.float64) for _ in range(3))
    sigma, sigma_next = 0.8, 0.5
    start_at = (1 - sigma) * clean + sigma * old
    for eta in (0.1, 0.5, 0.9):
        end = start_at + (1 - sigma_next / sigma) * (clean - start_at)
        made = renoise(start_at, end, sigma, sigma_next, fresh, eta)
        noise = made - made.mul(clean).mean() * clean
        assert float(noise.std()) == pytest.approx(sigma_next * math.sqrt(eta**2 + (1 - eta**2)), rel=0.01)
    assert renoise(start_at, clean, sigma, sigma_next, None, 0.0) is clean


def test_a_step_evaluates_twice_and_reports_once():
    video, audio = start()
    model, reports = Recorder(), []
    res2s_loop(
        video, audio, [1.0, 0.7, 0.3, 0.0], model, noise=FreshNoise(1, 1), on_step=lambda *step: reports.append(step)
    )
    assert [round(call.sigma, 4) for call in model.calls] == [
        *(1.0, round(math.sqrt(0.7), 4), 0.7, round(math.sqrt(0.21), 4), 0.3, round(math.sqrt(0.3 * LAST), 4)),
        LAST,
    ]
    assert [call.step for call in model.calls] == [0, 0, 1, 0, 2, 0, 3]  # the middles are always due
    assert [report[:3] for report in reports] == [(1, 3, 1.0), (2, 3, 0.7), (3, 3, 0.3)]
    assert reports[-1][3].shape == video.latent.shape and reports[-1][4].shape == audio.latent.shape


def test_kept_and_appended_tokens_are_kept_in_the_middle_too():
    picture = torch.randn(1, 4, 1, 2, 3)
    video = place_latent(video_state(torch.zeros(1, 4, 2, 2, 3), 24.0), picture, 1.0)
    video = append_keyframe(video, picture, 8, 1.0, 24.0).with_noise(torch.randn(1, 18, 4), 1.0)
    model = Recorder()
    made, _ = res2s_loop(video, None, [1.0, 0.8, 0.4, 0.0], model, noise=FreshNoise(2, 1))
    for latent in [call.video.latent for call in model.calls] + [made.latent]:
        assert torch.equal(latent[:, :6], video.clean[:, :6]) and torch.equal(latent[:, 12:], video.clean[:, 12:])


def test_frozen_and_absent_streams_are_left_alone_and_draw_nothing():
    video, _ = start()
    frozen = audio_state(torch.randn(1, 2, 5, 4), frozen=True)
    made, sound = res2s_loop(video, frozen, [1.0, 0.5, 0.0], Recorder(), noise=FreshNoise(3, 1))
    alone, absent = res2s_loop(video, None, [1.0, 0.5, 0.0], Recorder(), noise=FreshNoise(3, 1))
    assert sound is frozen and absent is None and torch.equal(made.latent, alone.latent)


def test_b37_a_clip_of_a_batch_equals_the_clip_alone():
    video, audio = start(batch=2)
    both = res2s_loop(video, audio, [1.0, 0.6, 0.0], Recorder(), noise=FreshNoise(4, 2))
    for item in (0, 1):
        one_video, one_audio = (
            one.with_latent(two.latent[item : item + 1]) for one, two in zip(start(), (video, audio), strict=True)
        )
        single = res2s_loop(one_video, one_audio, [1.0, 0.6, 0.0], Recorder(), noise=FreshNoise(4 + item, 1))
        for whole, part in zip(both, single, strict=True):
            torch.testing.assert_close(whole.latent[item : item + 1], part.latent, atol=1e-6, rtol=0)


def test_fresh_noise_does_not_depend_on_the_number_of_threads():
    state = video_state(torch.zeros(1, 64, 8, 16, 16), 24.0)  # 2^17 values: torch would share them out
    before = torch.get_num_threads()
    made = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            made.append(FreshNoise(5, 1).for_step(state))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)
    assert made[0].numpy().mean() == pytest.approx(0, abs=1e-12) and np.std(made[0].numpy(), ddof=1) == pytest.approx(1)


def test_a_schedule_that_ends_below_the_last_level_still_falls():
    video, model = start()[0], Recorder()
    res2s_loop(video, None, [0.5, 0.001, 0.0], model, noise=FreshNoise(6, 1))
    levels = [call.sigma for call in model.calls]
    assert levels == sorted(levels, reverse=True) and levels[-1] == 0.0005
