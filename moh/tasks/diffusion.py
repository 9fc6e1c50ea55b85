"""Gaussian diffusion with learned variance (arXiv 2006.11239, 2102.09672), as DiT trains it.

Step indices ``t_B`` count the steps of a :class:`GaussianDiffusion`, 0 the least noisy. A model is
any callable (x, timesteps, labels) -> (B, 2C, ...): the noise, then where the log variance lies
between its two bounds, -1 the lower and 1 the upper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor, Tensor], Tensor]

_BIN = 1 / 255  # half the distance of two grey levels on [-1, 1]


class TrainingLosses(NamedTuple):
    """Losses of each sample (B,), means over its values.

    Attributes:
        loss: ``mse + vb``.
        mse: squared error of the noise.
        vb: the variational bound's term of this step, in bits.
    """

    loss: Tensor
    mse: Tensor
    vb: Tensor


class Prediction(NamedTuple):
    """What a model says of the step before, each of the shape of x.

    Attributes:
        mean: of the Gaussian p(x_{t-1} | x_t).
        variance: of it.
        log_variance: of it.
        pred_xstart: the clean input.
    """

    mean: Tensor
    variance: Tensor
    log_variance: Tensor
    pred_xstart: Tensor


class _Tables(NamedTuple):
    """One value a step."""

    sqrt_cumprod: Tensor
    sqrt_one_minus_cumprod: Tensor
    sqrt_recip_cumprod: Tensor
    sqrt_recip_cumprod_minus_one: Tensor
    posterior_xstart: Tensor
    posterior_x: Tensor
    posterior_log_variance: Tensor
    log_betas: Tensor
    timesteps: Tensor


class GaussianDiffusion:
    """Linear noise schedule, its losses and its reverse steps.

    Tables are computed in float64 and applied in float32.

    Args:
        num_steps: T. The betas run from 1e-4 to 0.02 for T = 1000 and scale with 1000 / T.
        keep: timesteps of the full schedule to keep, ascending; None for all. See :meth:`respace`.

    Raises:
        ValueError: so few steps that the last beta would reach 1.
    """

    def __init__(self, num_steps: int = 1000, keep: list[int] | None = None) -> None:
        if num_steps < 21:
            raise ValueError(f"num_steps {num_steps} is below 21: the last beta would reach 1")
        scale = 1000 / num_steps
        betas = torch.linspace(scale * 1e-4, scale * 0.02, num_steps, dtype=torch.float64)
        self.num_train_steps = num_steps
        self.timesteps = list(range(num_steps)) if keep is None else keep
        cumprod = (1 - betas).cumprod(0)[self.timesteps]
        before = torch.cat([cumprod.new_ones(1), cumprod[:-1]])
        self.betas = 1 - cumprod / before
        posterior_variance = self.betas * (1 - before) / (1 - cumprod)
        # The first step's posterior variance is zero: the second's stands in for its logarithm.
        posterior_variance[0] = posterior_variance[1]
        self._float64 = _Tables(
            sqrt_cumprod=cumprod.sqrt(),
            sqrt_one_minus_cumprod=(1 - cumprod).sqrt(),
            sqrt_recip_cumprod=cumprod.rsqrt(),
            sqrt_recip_cumprod_minus_one=(1 / cumprod - 1).sqrt(),
            posterior_xstart=self.betas * before.sqrt() / (1 - cumprod),
            posterior_x=(1 - before) * (1 - self.betas).sqrt() / (1 - cumprod),
            posterior_log_variance=posterior_variance.log(),
            log_betas=self.betas.log(),
            timesteps=torch.tensor(self.timesteps),
        )
        self._on_device: dict[torch.device, _Tables] = {}

    @property
    def num_steps(self) -> int:
        """Steps of this schedule: T, or those kept of it."""
        return len(self.timesteps)

    def respace(self, num_steps: int) -> GaussianDiffusion:
        """The sampler of fewer steps: evenly spaced timesteps, betas from their cumulative alphas.

        Raises:
            ValueError: not between 2 and the steps of the full schedule.
        """
        if not 2 <= num_steps <= self.num_train_steps:
            raise ValueError(f"sampling steps {num_steps} are not in 2..{self.num_train_steps}")
        # The reference adds the stride up; where a timestep falls on a half, i * stride rounds to
        # another one for about a quarter of all step numbers (21, 61, 105 of 1000).
        stride = (self.num_train_steps - 1) / (num_steps - 1)
        position, keep = 0.0, []
        for _ in range(num_steps):
            keep.append(round(position))
            position += stride
        return GaussianDiffusion(self.num_train_steps, keep)

    def q_sample(self, xstart: Tensor, t_B: Tensor, noise: Tensor) -> Tensor:
        """Noised inputs x_t from clean inputs (B, ...), step indices (B,) and noise (B, ...)."""
        tables = self._tables(xstart.device)
        return (
            _at(tables.sqrt_cumprod, t_B, xstart) * xstart
            + _at(tables.sqrt_one_minus_cumprod, t_B, xstart) * noise
        )

    def training_losses(
        self, model: Model, xstart: Tensor, t_B: Tensor, labels_B: Tensor, noise: Tensor
    ) -> TrainingLosses:
        """Losses for given steps and noise, one a sample.

        The variational term trains the variance alone: the noise prediction enters it detached.

        Args:
            model: see the module.
            xstart: clean inputs (B, C, ...), pixels scaled to [-1, 1] or latents.
            t_B: step indices (B,), int64.
            labels_B: what the model takes as labels.
            noise: standard normal, like ``xstart``.
        """
        x = self.q_sample(xstart, t_B, noise)
        output = self._call(model, x, t_B, labels_B)
        eps, v = output.chunk(2, dim=1)
        mse_B = _mean(torch.square(noise - eps))
        prediction = self._predict(torch.cat([eps.detach(), v], dim=1), x, t_B)
        vb_B = self._variational_term(prediction, xstart, x, t_B)
        return TrainingLosses(mse_B + vb_B, mse_B, vb_B)

    def p_mean_variance(
        self,
        model: Model,
        x: Tensor,
        t_B: Tensor,
        labels_B: Tensor,
        clip: float | None = None,
    ) -> Prediction:
        """The model's distribution of x_{t-1} given x_t.

        Args:
            clip: bound of the predicted clean input, None for none. DiT has none; it makes
                sense for pixels only.
        """
        return self._predict(self._call(model, x, t_B, labels_B), x, t_B, clip)

    def step(self, prediction: Prediction, t_B: Tensor, noise: Tensor) -> Tensor:
        """Draw x_{t-1} with the given noise; the last step, t = 0, gives the mean."""
        noisy = (t_B > 0).view(-1, *[1] * (noise.ndim - 1))
        return prediction.mean + noisy * (0.5 * prediction.log_variance).exp() * noise

    def _call(self, model: Model, x: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
        output = model(x, self._tables(x.device).timesteps[t_B], labels_B).float()
        if output.shape[1] != 2 * x.shape[1]:
            raise ValueError(
                f"the model returned {output.shape[1]} channels for {x.shape[1]}: "
                "noise and variance need twice as many"
            )
        return output

    def _predict(
        self, output: Tensor, x: Tensor, t_B: Tensor, clip: float | None = None
    ) -> Prediction:
        tables = self._tables(x.device)
        eps, v = output.chunk(2, dim=1)
        upper = _at(tables.log_betas, t_B, x)
        lower = _at(tables.posterior_log_variance, t_B, x)
        share = (v + 1) / 2
        log_variance = share * upper + (1 - share) * lower
        pred_xstart = (
            _at(tables.sqrt_recip_cumprod, t_B, x) * x
            - _at(tables.sqrt_recip_cumprod_minus_one, t_B, x) * eps
        )
        if clip is not None:
            pred_xstart = pred_xstart.clamp(-clip, clip)
        mean = self._posterior_mean(pred_xstart, x, t_B)
        return Prediction(mean, log_variance.exp(), log_variance, pred_xstart)

    def _posterior_mean(self, xstart: Tensor, x: Tensor, t_B: Tensor) -> Tensor:
        tables = self._tables(x.device)
        return _at(tables.posterior_xstart, t_B, x) * xstart + _at(tables.posterior_x, t_B, x) * x

    def _variational_term(
        self, prediction: Prediction, xstart: Tensor, x: Tensor, t_B: Tensor
    ) -> Tensor:
        """KL to the true posterior, at t = 0 the likelihood of the 256-level input; bits (B,)."""
        log_variance = _at(self._tables(x.device).posterior_log_variance, t_B, x)
        mean = self._posterior_mean(xstart, x, t_B)
        kl_B = _mean(_gaussian_kl(mean, log_variance, prediction.mean, prediction.log_variance))
        nll_B = -_mean(_discrete_log_likelihood(xstart, prediction.mean, prediction.log_variance))
        return torch.where(t_B == 0, nll_B, kl_B) / math.log(2)

    def _tables(self, device: torch.device) -> _Tables:
        if device not in self._on_device:
            self._on_device[device] = _Tables(
                *(
                    (table.float() if table.is_floating_point() else table).to(device)
                    for table in self._float64
                )
            )
        return self._on_device[device]


def _at(table: Tensor, t_B: Tensor, like: Tensor) -> Tensor:
    """Entries of a table at the steps of a batch, ready to multiply a tensor of its shape."""
    return table[t_B].view(-1, *[1] * (like.ndim - 1))


def _mean(x: Tensor) -> Tensor:
    """Mean over all but the first dimension."""
    return x.flatten(1).mean(1)


def _gaussian_kl(mean1: Tensor, log_var1: Tensor, mean2: Tensor, log_var2: Tensor) -> Tensor:
    """KL(N1 || N2) of each element, in nats."""
    return 0.5 * (
        log_var2
        - log_var1
        + (log_var1 - log_var2).exp()
        + torch.square(mean1 - mean2) * (-log_var2).exp()
        - 1
    )


def _discrete_log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log probability that a Gaussian puts into the 1/255-wide bin around each element of x.

    The outermost of the 256 bins on [-1, 1] reach to infinity.
    """
    inverse_std = (-0.5 * log_variance).exp()
    upper = _normal_cdf((x - mean + _BIN) * inverse_std)
    lower = _normal_cdf((x - mean - _BIN) * inverse_std)
    mass = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return mass.clamp_min(1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """The tanh approximation of the normal distribution function that IDDPM's losses are made of.

    Its error, up to 2e-4, is part of the published models' loss.
    """
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
