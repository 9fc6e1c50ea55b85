"""Gaussian diffusion and sampling."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from moh.backbones.dit import DiT
from moh.evaluation.sampling import (
    ImageNoise,
    class_labels,
    guide,
    guided_model,
    image_generator,
    sample,
    to_uint8,
)
from moh.tasks.diffusion import GaussianDiffusion

BETAS = np.linspace(1e-4, 0.02, 1000)


def linear_model(x, timesteps, labels):
    """Noise and variance by element, so that no arithmetic depends on the batch."""
    scale = (1 + labels.view(-1, 1, 1, 1)) / 10
    eps = x * scale + timesteps.view(-1, 1, 1, 1) / 1000
    return torch.cat([eps, torch.tanh(x)], dim=1)


def naive_tables(timesteps):
    """(beta, cumulative alpha, the one before) of each kept step, in plain Python."""
    cumulative, product = [], 1.0
    for beta in BETAS:
        product *= 1 - beta
        cumulative.append(product)
    rows, before = [], 1.0
    for t in timesteps:
        rows.append((1 - cumulative[t] / before, cumulative[t], before))
        before = cumulative[t]
    return rows


def naive_posterior(rows, index, xstart, x):
    """Mean and log variance of q(x_{t-1} | x_t, x_0), the first variance replaced by the second."""
    beta, alpha, before = rows[index]
    mean = (beta * math.sqrt(before) * xstart + (1 - before) * math.sqrt(1 - beta) * x) / (
        1 - alpha
    )
    beta, alpha, before = rows[max(index, 1)]
    return mean, math.log(beta * (1 - before) / (1 - alpha))


def naive_cdf(x):
    return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def naive_losses(xstart, noise, index, eps, v, rows):
    """Squared error and variational term in bits of one sample, element by element."""
    _, alpha, _ = rows[index]
    errors, bits = [], []
    for x0, n, e, frac in zip(xstart, noise, eps, v, strict=True):
        x = math.sqrt(alpha) * x0 + math.sqrt(1 - alpha) * n
        errors.append((n - e) ** 2)
        guess = (x - math.sqrt(1 - alpha) * e) / math.sqrt(alpha)
        mean, _ = naive_posterior(rows, index, guess, x)
        true_mean, low = naive_posterior(rows, index, x0, x)
        share = (frac + 1) / 2
        log_variance = share * math.log(rows[index][0]) + (1 - share) * low
        if index:
            nats = 0.5 * (
                log_variance
                - low
                + math.exp(low - log_variance)
                + (true_mean - mean) ** 2 / math.exp(log_variance)
                - 1
            )
        else:
            std = math.exp(log_variance / 2)
            upper = 1.0 if x0 > 0.999 else naive_cdf((x0 + 1 / 255 - mean) / std)
            lower = 0.0 if x0 < -0.999 else naive_cdf((x0 - 1 / 255 - mean) / std)
            nats = -math.log(max(upper - lower, 1e-12))
        bits.append(nats / math.log(2))
    return np.mean(errors), np.mean(bits)


@pytest.mark.parametrize("channels", [1, 4])
def test_training_losses_match_a_naive_computation(channels):
    diffusion = GaussianDiffusion()
    shape = (5, channels, 3, 3)
    # Whole grey levels, both ends among them: the discretised likelihood has edge bins.
    xstart = torch.randint(0, 256, shape) / 127.5 - 1
    xstart[:, 0, 0, 0], xstart[:, 0, 0, 1] = -1, 1
    noise = torch.randn(shape)
    t = torch.tensor([0, 0, 1, 400, 999])
    # Close to the truth, as a trained model is.
    eps, v = noise + 0.1 * torch.randn(shape), torch.randn(shape)
    losses = diffusion.training_losses(
        lambda *_: torch.cat([eps, v], dim=1), xstart, t, torch.zeros(5).long(), noise
    )
    rows = naive_tables(range(1000))
    for i, index in enumerate(t.tolist()):
        x0, n, e, frac = (x[i].flatten().double().tolist() for x in (xstart, noise, eps, v))
        mse, vb = naive_losses(x0, n, index, e, frac, rows)
        assert losses.mse[i].item() == pytest.approx(mse, rel=1e-5)
        assert losses.vb[i].item() == pytest.approx(vb, rel=1e-4, abs=1e-6)
        assert losses.loss[i] == losses.mse[i] + losses.vb[i]


def test_the_variational_term_trains_the_variance_alone():
    diffusion = GaussianDiffusion()
    eps = torch.randn(2, 1, 2, 2, requires_grad=True)
    v = torch.zeros(2, 1, 2, 2, requires_grad=True)
    losses = diffusion.training_losses(
        lambda *_: torch.cat([eps, v], dim=1),
        torch.rand(2, 1, 2, 2),
        torch.tensor([0, 600]),
        torch.zeros(2).long(),
        torch.randn(2, 1, 2, 2),
    )
    losses.vb.sum().backward()
    assert not eps.grad.any()
    assert v.grad.flatten(1).any(1).all()


@pytest.mark.parametrize("steps", [2, 21, 25, 250, 1000])
def test_respacing_keeps_the_noise_levels_of_its_timesteps(steps):
    diffusion = GaussianDiffusion().respace(steps)
    strides = itertools.repeat(999 / (steps - 1), steps - 1)
    expected = [round(position) for position in itertools.accumulate(strides, initial=0.0)]
    assert diffusion.timesteps == expected
    assert diffusion.num_steps == steps
    assert (expected[0], expected[-1]) == (0, 999)
    kept = (1 - diffusion.betas).cumprod(0)
    full = torch.tensor(np.cumprod(1 - BETAS))[expected]
    torch.testing.assert_close(kept, full, rtol=1e-10, atol=0)


def test_the_respaced_sampler_asks_the_model_at_the_original_timesteps():
    seen = []

    def model(x, timesteps, labels):
        seen.append(timesteps.tolist())
        return torch.zeros(len(x), 2, 1, 1)

    diffusion = GaussianDiffusion().respace(5)
    labels = torch.zeros(1).long()
    sample(model, diffusion, [0], labels, (1, 1, 1))
    assert seen == [[999], [749], [500], [250], [0]]


def test_p_mean_variance_of_a_respaced_sampler_matches_a_naive_computation():
    timesteps = [round(i * 999 / 9) for i in range(10)]
    rows = naive_tables(timesteps)
    diffusion = GaussianDiffusion().respace(10)
    x = torch.randn(10, 1, 1, 1)
    index, labels = torch.arange(10), torch.arange(10) % 3
    ours = diffusion.p_mean_variance(linear_model, x, index, labels)
    for i in range(10):
        value = x[i].item()
        eps = value * (1 + i % 3) / 10 + timesteps[i] / 1000
        alpha = rows[i][1]
        guess = (value - math.sqrt(1 - alpha) * eps) / math.sqrt(alpha)
        mean, low = naive_posterior(rows, i, guess, value)
        share = (math.tanh(value) + 1) / 2
        log_variance = share * math.log(rows[i][0]) + (1 - share) * low
        assert ours.pred_xstart[i].item() == pytest.approx(guess, rel=1e-4, abs=1e-4)
        assert ours.mean[i].item() == pytest.approx(mean, rel=1e-4, abs=1e-4)
        assert ours.log_variance[i].item() == pytest.approx(log_variance, rel=1e-5)
        assert ours.variance[i].item() == pytest.approx(math.exp(log_variance), rel=1e-4)


def test_clipping_bounds_the_predicted_clean_input():
    diffusion = GaussianDiffusion()
    x, t, labels = 5 * torch.randn(4, 1, 2, 2), torch.tensor([999] * 4), torch.zeros(4).long()
    free = diffusion.p_mean_variance(linear_model, x, t, labels)
    clipped = diffusion.p_mean_variance(linear_model, x, t, labels, clip=1.0)
    assert free.pred_xstart.abs().max() > 1
    assert torch.equal(clipped.pred_xstart, free.pred_xstart.clamp(-1, 1))


def test_a_model_that_knows_the_noise_recovers_the_input():
    diffusion = GaussianDiffusion()
    xstart, noise = torch.rand(3, 2, 4, 4) * 2 - 1, torch.randn(3, 2, 4, 4)
    t, labels = torch.tensor([0, 300, 700]), torch.zeros(3).long()
    x = diffusion.q_sample(xstart, t, noise)
    prediction = diffusion.p_mean_variance(
        lambda *_: torch.cat([noise, noise], dim=1), x, t, labels
    )
    torch.testing.assert_close(prediction.pred_xstart, xstart, rtol=0, atol=1e-4)


def test_the_last_step_adds_no_noise():
    diffusion = GaussianDiffusion()
    x, labels, noise = torch.randn(2, 1, 2, 2), torch.zeros(2).long(), torch.randn(2, 1, 2, 2)
    t = torch.tensor([0, 5])
    prediction = diffusion.p_mean_variance(linear_model, x, t, labels)
    after = diffusion.step(prediction, t, noise)
    assert torch.equal(after[0], prediction.mean[0])
    torch.testing.assert_close(
        after[1], prediction.mean[1] + prediction.variance[1].sqrt() * noise[1]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianDiffusion(20), "num_steps 20 is below 21"),
        (lambda: GaussianDiffusion().respace(1), r"sampling steps 1 are not in 2\.\.1000"),
        (lambda: GaussianDiffusion(100).respace(101), r"are not in 2\.\.100"),
    ],
)
def test_impossible_schedules_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_samples_depend_on_the_image_number_and_the_seed_alone():
    diffusion = GaussianDiffusion().respace(6)
    numbers = [3, 0, 11, 7]
    labels = class_labels(numbers, 3)
    together = sample(linear_model, diffusion, numbers, labels, (2, 3, 3), seed=5)
    for position, number in enumerate(numbers):
        alone = sample(
            linear_model, diffusion, [number], labels[position : position + 1], (2, 3, 3), seed=5
        )
        assert torch.equal(alone[0], together[position])
    other = sample(linear_model, diffusion, numbers, labels, (2, 3, 3), seed=6)
    assert not torch.isclose(other, together).any()


def test_noise_of_different_images_seeds_steps_and_streams_differs():
    first = ImageNoise([0, 1], (64,), seed=0)
    start, step = first.draw(), first.draw()
    other = ImageNoise([0], (64,), seed=1).draw()
    rows = [*start, *step, *other]
    correlations = torch.corrcoef(torch.stack(rows)).fill_diagonal_(0)
    assert correlations.abs().max() < 0.6
    seeds = [image_generator(s, 0, stream).initial_seed() for s in (0, 1) for stream in "ab"]
    assert len(set(seeds)) == 4


def test_guidance_acts_on_the_first_noise_channels_alone():
    output = torch.randn(4, 8, 2, 2)
    guided = guide(output, 1.5)
    conditional, unconditional = output.chunk(2)
    expected = unconditional[:, :3] + 1.5 * (conditional[:, :3] - unconditional[:, :3])
    for half, own in zip(guided.chunk(2), (conditional, unconditional), strict=True):
        assert torch.equal(half[:, :3], expected)
        assert torch.equal(half[:, 3:], own[:, 3:])
    grey = torch.randn(4, 2, 2, 2)
    assert torch.equal(guide(grey, 2.0)[:, 1:], grey[:, 1:])


def test_guided_sampling_takes_the_null_class_and_pays_only_when_asked():
    batches = []

    def model(x, timesteps, labels):
        batches.append(labels.tolist())
        return linear_model(x, timesteps, labels)

    diffusion = GaussianDiffusion().respace(3)
    labels = torch.tensor([0, 1])
    plain = sample(model, diffusion, [0, 1], labels, (4, 2, 2))
    assert batches == [[0, 1]] * 3
    batches.clear()
    guided = sample(model, diffusion, [0, 1], labels, (4, 2, 2), guidance=2.0, null_label=9)
    assert batches == [[0, 1, 9, 9]] * 3
    assert not torch.equal(guided, plain)
    # Guidance of one through both halves is the conditional model.
    both = guided_model(linear_model, 1.0, null_label=9)
    through = sample(both, diffusion, [0, 1], labels, (4, 2, 2))
    torch.testing.assert_close(through, plain)
    with pytest.raises(ValueError, match="needs null_label"):
        sample(model, diffusion, [0, 1], labels, (4, 2, 2), guidance=2.0)


def test_dit_samples_reproducibly_with_its_own_null_class():
    model = DiT(
        input_size=4,
        patch_size=2,
        in_channels=1,
        hidden_size=16,
        depth=1,
        num_heads=2,
        num_classes=3,
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    diffusion = GaussianDiffusion().respace(4)
    steps = []

    def progress(iterable):
        for step in iterable:
            steps.append(step)
            yield step

    labels = class_labels([0, 1, 2], 3)
    runs = [
        sample(model, diffusion, [0, 1, 2], labels, (1, 4, 4), guidance=1.5, progress=progress)
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    assert runs[0].shape == (3, 1, 4, 4)
    assert steps == [3, 2, 1, 0] * 2


def test_class_labels_follow_the_image_number():
    assert class_labels(range(7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    drawn = class_labels(range(200), 10, balanced=False, seed=1)
    assert torch.equal(class_labels([150, 3], 10, balanced=False, seed=1), drawn[[150, 3]])
    assert set(drawn.tolist()) == set(range(10))


def test_bytes_cut_off_fractions():
    x = torch.tensor([-2.0, -1.0, 0.0, 0.0078, 1.0, 2.0])
    assert to_uint8(x).tolist() == [0, 0, 128, 128, 255, 255]
