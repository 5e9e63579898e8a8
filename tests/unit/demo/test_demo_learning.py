"""The demo's trainer computes GRPO's losses correctly, and its policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_plane.demo.grpo import completion_logprobs, group_advantages, padded, padded_mask, policy_loss
from rl_plane.demo.policy import Policy
from rl_plane.demo.reward import reward


def load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("demo") / "model", seed=3)


def test_the_reward_is_the_share_of_even_ids() -> None:
    assert reward([2, 4, 0, 8]) == 1.0
    assert reward([1, 3]) == 0.0
    assert reward([1, 2, 3, 4]) == 0.5


def test_advantages_are_normalised_within_a_group() -> None:
    gains = group_advantages([0.0, 0.5, 1.0])
    assert sum(gains) == pytest.approx(0.0)
    assert sum(gain**2 for gain in gains) / 3 == pytest.approx(1.0, abs=1e-4)
    assert gains[0] < gains[1] < gains[2]


def test_a_group_of_equals_teaches_nothing() -> None:
    assert group_advantages([0.25] * 4) == [0.0] * 4


def loss(ratio: float, advantage: float) -> float:
    import torch

    new, old = torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1)
    return float(policy_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1).bool(), clip=0.2))


def test_the_loss_is_clipped_on_the_side_that_would_go_too_far() -> None:
    assert loss(1.0, 2.0) == pytest.approx(-2.0)
    assert loss(1.1, 1.0) == pytest.approx(-1.1)
    assert loss(1.5, 1.0) == pytest.approx(-1.2)  # enough of a good thing
    assert loss(0.5, 1.0) == pytest.approx(-0.5)  # the way back is open
    assert loss(0.5, -1.0) == pytest.approx(0.8)
    assert loss(1.5, -1.0) == pytest.approx(1.5)


def test_a_clipped_token_has_no_gradient_and_padding_has_none_either() -> None:
    import torch

    new = torch.log(torch.tensor([[1.5, 1.0, 1.0]])).requires_grad_()
    policy_loss(new, torch.zeros(1, 3), torch.ones(1), torch.tensor([[True, True, False]])).backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, -0.5, 0.0]]


def test_padding_keeps_values_on_the_left() -> None:
    assert padded([[1.0, 2.0], [3.0]]).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert padded_mask([[7, 7], [7]]).tolist() == [[True, True], [True, False]]


def test_logprobs_of_a_ragged_batch_are_those_of_each_row_alone(tiny: Path) -> None:
    import torch

    model = load(tiny)
    prompts, completions = [[5, 6, 7], [9], [1, 2]], [[10, 11], [12, 13, 14], [15]]
    with torch.no_grad():
        together = completion_logprobs(model, prompts, completions)
        for prompt, completion, got in zip(prompts, completions, together, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            want = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]
            assert got.tolist() == pytest.approx([*want, *[0.0] * (3 - len(want))], abs=1e-5)


def sample(model: Any, prompts: Sequence[list[int]], length: int) -> tuple[list[list[int]], list[list[float]]]:
    """Samples completions with a plain loop, as the fleet would."""
    import torch

    tokens, logprobs = torch.tensor(prompts), []
    with torch.no_grad():
        for _ in range(length):
            scores = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(scores.exp(), 1)
            logprobs.append(scores.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
    return tokens[:, len(prompts[0]) :].tolist(), torch.cat(logprobs, 1).tolist()


@pytest.mark.slow
@pytest.mark.parallel
def test_the_policy_learns_and_its_logprobs_are_the_samplers(tiny: Path) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy, rewards = Policy(tiny), []
        for step in range(16):
            prompts = [[3 + step, 40 + group, 300] for group in range(8) for _ in range(8)]
            tokens, logprobs = sample(policy.model, prompts, 12)
            rewards.append([reward(row) for row in tokens])
            gains = [gain for at in range(0, 64, 8) for gain in group_advantages(rewards[-1][at : at + 8])]
            lesson = policy.learn(prompts, tokens, logprobs, gains)
            assert lesson.max_logprob_diff < 1e-4
    assert sum(rewards[-1]) / 64 > sum(rewards[0]) / 64 + 0.1


def test_wrong_logprobs_show(tiny: Path) -> None:
    policy = Policy(tiny)
    tokens, logprobs = sample(policy.model, [[5, 6]], 4)
    logprobs[0][2] += 0.25
    assert policy.learn([[5, 6]], tokens, logprobs, [0.0]).max_logprob_diff == pytest.approx(0.25, abs=1e-4)
