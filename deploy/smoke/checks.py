"""Expectations of the smoke test, and the distance of the engines' logprobs from the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rl_plane.commit.canary_rules import mismatch_kl as mean_k3

AIM = 0.0007
"""The largest `mismatch_kl` with float32 weights. Engines that compute as the trainer does have less than 1e-9."""


class SmokeFailed(Exception):
    """A check does not hold. The message says what was expected and what was seen."""


def expect(holds: bool, what: str, seen: object) -> None:
    if not holds:
        raise SmokeFailed(f"expected {what}; it was: {seen}")


@dataclass(frozen=True)
class Sample:
    """The log probabilities of the sampled tokens of one completion, or of one conversation of several turns."""

    trainer: list[float]
    """By the trainer's own forward, with the weights that the tokens are labelled with."""
    inference: list[float]
    """Values that the engine reported with the tokens."""


def mismatch_kl(samples: Sequence[Sample]) -> float:
    """Returns the mean over the samples of mean(exp(d) - d - 1), the mean over one sample's tokens, where
    d = trainer logprob - inference logprob.

    This is prime-rl's definition: `compute_loss` in src/prime_rl/trainer/rl/loss.py of PrimeIntellect-ai/prime-rl takes
    the mean of `exp(log_importance_ratio) - log_importance_ratio - 1` over the loss mask of each sequence.
    """
    return fmean(mean_k3((tuple(one.trainer),), (tuple(one.inference),)) for one in samples)


@dataclass(frozen=True)
class Measured:
    """Logprobs that a profile has collected."""

    samples: list[Sample]
    control: list[Sample]
    """Samples of the same tokens, scored with other weights than their label's. Their `mismatch_kl` must be over the
    aim, because otherwise the number could not tell right weights from wrong ones."""

    def check(self) -> str:
        """Returns the line to print. SmokeFailed if a number is on the wrong side of the aim."""
        right, wrong = mismatch_kl(self.samples), mismatch_kl(self.control)
        tokens = sum(len(one.inference) for one in self.samples)
        told = f"mismatch_kl {right:.2g} over {tokens} tokens (aim {AIM:g}), {wrong:.2g} with other weights"
        expect(right <= AIM, f"a mismatch_kl of at most {AIM:g}", told)
        expect(wrong > AIM, f"a mismatch_kl above {AIM:g} with other weights", told)
        return told
