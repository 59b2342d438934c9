"""Bias and noise of the gradient from stale and replayed trajectories, by enumeration: no sampling, no model.

::

    python -m benchmarks.replay_bias                              # the tables of docs/REPLAY_STUDY.md, 30 s of CPU
    python -m benchmarks.replay_bias --json bias.json --chains 20

A chain emits one of two tokens at each position, and its probability depends on the position and the token before. A
quarter of all sequences are successes. μ and π are random; μ sampled the trajectories, π is trained with advantages
``reward - E_π[reward]``. Every sequence goes through the learner's own loss, weighted by its probability under what
sampled it, so the gradient is the expectation. It is compared with the true policy gradient of π.

*cosine* and *error* (distance over the length of the true gradient) are the bias; of successes alone the length is not
that of the true gradient, only the direction says something. *noise* is the standard deviation of
one trajectory's gradient over that of a trajectory from π itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.losses.base import LossRules
from learner.losses.loss import LossTokens, policy_loss
from learner.losses.policy_losses import loss_rules
from pipeline.config.losses import ImportanceConfig, LossConfig
from pipeline.config.replay import ReplayConfig

FloatArray = npt.NDArray[np.float64]
LENGTHS = (2, 8)
"""Tokens of a trajectory."""
SPREADS = {"small": 0.25, "large": 1.0}
"""Standard deviation of the difference of the logits of μ and π."""
UNCLIPPED = {"policy": {"name": "ppo", "clip_low": 1, "clip_high": 1e9, "dual_clip": None}, "off_clip_high": 1e9}


@dataclass(frozen=True)
class Choice:
    """One way to train trajectories of μ."""

    name: str
    replayed: bool
    """False: stale fresh trajectories."""
    replay: dict[str, Any] | str = "token"
    """``replay.correction``."""
    importance: tuple[tuple[str, Any], ...] = ()
    clipped: bool = True
    """With the clips that are the default."""
    fresh_share: float = 0.0
    """Share of the trajectories that π sampled."""
    successes: bool = False
    """Only the successes of μ, as in the pool of experience replay."""

    @property
    def rules(self) -> LossRules:
        return loss_rules(
            LossConfig.model_validate({} if self.clipped else UNCLIPPED),
            ImportanceConfig.model_validate(dict(self.importance)),
            ReplayConfig.model_validate({"correction": self.replay}),
        )


WHOLE = {"name": "sequence", "max": None}
CHOICES = (
    Choice("stale: token, default clip", False),
    Choice("stale: token, no clip", False, clipped=False),
    Choice("stale: sequence, no bound", False, importance=(
        ("anchor", "proximal"), ("weight", "sequence"), ("weight_max", 1e9))),
    Choice("replayed: token, default clip", True),
    Choice("replayed: token, no clip", True, clipped=False),
    Choice("replayed: geometric, max 2", True, {"name": "geometric"}),
    Choice("replayed: sequence, max 2", True, "sequence"),
    Choice("replayed: sequence, max 8", True, {"name": "sequence", "max": 8.0}),
    Choice("replayed: sequence, no bound", True, WHOLE),
    Choice("replayed: soft", True, "soft"),
    Choice("successes: token, default clip", True, successes=True),
    Choice("successes: sequence, max 2", True, "sequence", successes=True),
    Choice("successes: sequence, no bound", True, WHOLE, successes=True),
    Choice("successes: soft", True, "soft", successes=True),
    Choice("half fresh, half token, default clip", True, fresh_share=0.5),
    Choice("half fresh, half sequence, max 2", True, "sequence", fresh_share=0.5),
    Choice("half fresh, half sequence, no bound", True, WHOLE, fresh_share=0.5),
    Choice("half fresh, half soft", True, "soft", fresh_share=0.5),
)  # fmt: skip


class Chain:
    """All sequences of a chain of ``length`` tokens under π and μ.

    Arrays: N sequences, T their length, P parameters (logits of π). ``jacobian_NTP`` is that of log π.
    """

    def __init__(self, logits: FloatArray, mu_logits: FloatArray, rewarded: Sequence[int]) -> None:
        """Logits ``[T, 2]`` of token 1 by position and the token before (0 at the first position). ``rewarded``:
        numbers of the successes, the tokens of a sequence being its binary digits."""
        length = len(logits)
        self.theta = torch.tensor(logits, requires_grad=True)
        sequences = torch.tensor(list(product((0, 1), repeat=length)))
        rewards = torch.zeros(len(sequences), dtype=torch.float64)
        rewards[list(rewarded)] = 1.0
        before = torch.nn.functional.pad(sequences[:, :-1], (1, 0))
        self.sequences_NT, self.rewards_N = sequences, rewards
        n, at = len(sequences), np.arange(length)
        self._signs_NT = torch.where(self.sequences_NT == 1, 1.0, -1.0).double()
        self._at = (torch.from_numpy(at).expand_as(before), before)
        self.log_pi_NT = self._logprobs(self.theta)
        self.log_mu_NT = self._logprobs(torch.tensor(mu_logits))
        slopes_NT = (self._signs_NT * (1 - self.log_pi_NT.detach().exp())).numpy()
        self.jacobian_NTP = np.zeros((n, length, 2 * length))
        self.jacobian_NTP[np.arange(n)[:, None], at, 2 * self._at[0] + before] = slopes_NT
        self.p_pi_N = self.log_pi_NT.detach().sum(1).exp().numpy()
        self.p_mu_N = self.log_mu_NT.sum(1).exp().numpy()
        self.advantages_N = self.rewards_N.numpy() - float(self.p_pi_N @ self.rewards_N.numpy())

    @classmethod
    def random(cls, length: int, spread: float, seed: int) -> Chain:
        rng = np.random.default_rng([length, seed])
        logits = rng.normal(size=(length, 2))
        rewarded = rng.permutation(2**length)[: 2**length // 4]
        return cls(logits, logits + spread * rng.normal(size=logits.shape), rewarded.tolist())

    def _logprobs(self, theta: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(self._signs_NT * theta[self._at])

    @property
    def largest_ratio(self) -> float:
        """Largest π/μ of a token."""
        return float((self.log_pi_NT.detach() - self.log_mu_NT).exp().max())

    def true_gradient(self) -> FloatArray:
        """``∇ E_π[reward]``, ``[P]``."""
        value = (self.log_pi_NT.sum(1).exp() * self.rewards_N).sum()
        (gradient,) = torch.autograd.grad(value, self.theta, retain_graph=True)
        return gradient.flatten().numpy()  # type: ignore[no-any-return]

    def gradients(self, rules: LossRules, *, replayed: bool, of_pi: bool) -> FloatArray:
        """Ascent direction of each sequence by the learner's loss, ``[N, P]``, sampled from π or from μ."""
        n, length = self.log_pi_NT.shape
        mu = (self.log_pi_NT.detach() if of_pi else self.log_mu_NT).flatten()
        logprobs = self.log_pi_NT.detach().flatten().requires_grad_()
        flags = torch.full((n * length,), replayed)
        advantages = torch.from_numpy(np.repeat(self.advantages_N, n * length // self.advantages_N.size))
        tokens = LossTokens(
            logprobs, torch.zeros_like(mu), mu, None, advantages, torch.ones_like(mu), torch.ones_like(flags), flags,
            flags, rows=torch.arange(n).repeat_interleave(length),
        )  # fmt: skip
        (slopes,) = torch.autograd.grad(policy_loss(tokens, rules).loss, logprobs)
        return -np.einsum("nt,ntp->np", slopes.reshape(n, length).numpy(), self.jacobian_NTP)

    def sampled(self, choice: Choice) -> tuple[FloatArray, FloatArray]:
        """Gradient of each sequence and its probability, fresh ones after those of μ."""
        rules, share = choice.rules, choice.fresh_share
        p_mu_N = self.p_mu_N * self.rewards_N.numpy() if choice.successes else self.p_mu_N
        stale = self.gradients(rules, replayed=choice.replayed, of_pi=False)
        fresh = self.gradients(rules, replayed=False, of_pi=True)
        p = np.concatenate([(1 - share) * p_mu_N / p_mu_N.sum(), share * self.p_pi_N])
        return np.concatenate([stale, fresh]), p


@dataclass(frozen=True)
class Measured:
    """One choice on one chain."""

    cosine: float
    error: float
    noise: float


def measure(chain: Chain, choice: Choice) -> Measured:
    """Expectation and spread of the gradient of ``choice`` against the true one."""
    true = chain.true_gradient()
    gradients, p = chain.sampled(choice)
    on_policy = chain.gradients(choice.rules, replayed=False, of_pi=True)
    mean = p @ gradients
    length = float(np.linalg.norm(true))
    return Measured(
        float(mean @ true) / (float(np.linalg.norm(mean)) * length),
        float(np.linalg.norm(mean - true)) / length,
        _spread(gradients, p) / _spread(on_policy, chain.p_pi_N),
    )


def _spread(gradients: FloatArray, p: FloatArray) -> float:
    mean = p @ gradients
    return float(np.sqrt(p @ np.square(gradients - mean).sum(1)))


def table(chains: Sequence[Chain]) -> dict[str, dict[str, float]]:
    """Medians over chains by choice; ``cosine_min`` is that of the worst chain."""
    found = {}
    for choice in CHOICES:
        each = [measure(chain, choice) for chain in chains]
        found[choice.name] = {
            "cosine": float(np.median([m.cosine for m in each])),
            "cosine_min": min(m.cosine for m in each),
            "error": float(np.median([m.error for m in each])),
            "noise": float(np.median([m.noise for m in each])),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chains", type=int, default=100, help="random chains of each length and spread")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args()
    results = []
    for length in LENGTHS:
        for size, spread in SPREADS.items():
            chains = [Chain.random(length, spread, seed) for seed in range(given.chains)]
            largest = float(np.median([chain.largest_ratio for chain in chains]))
            rows = table(chains)
            results.append({"tokens": length, "ratios": size, "spread": spread, "chains": given.chains,
                            "largest_token_ratio": largest, "choices": rows})  # fmt: skip
            print(
                f"\n{length} tokens, {size} ratios: median of {given.chains} chains, largest of a token {largest:.1f}"
            )
            print(f"{'':38}{'cosine':>8}{'worst':>8}{'error':>8}{'noise':>8}")
            for name, row in rows.items():
                print(f"{name:38}{row['cosine']:8.3f}{row['cosine_min']:8.3f}{row['error']:8.3f}{row['noise']:8.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
