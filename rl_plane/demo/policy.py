"""The trainer's copy of the model, and its optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plane.demo.grpo import completion_logprobs, padded, padded_mask, policy_loss
from rl_plane.errors import PlaneError

LEARNING_RATE = 2e-3
"""For the tiny model's width; the reward goes from 0.5 to above 0.9 within 40 steps, over every seed tried."""
WIDTH_OF_RATE = 128
"""The rate falls with the model's width, because the outputs of a wider model move further in one step."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """The outcome of one optimiser step."""

    loss: float
    max_logprob_diff: float
    """The largest difference between this copy's logprobs and the engines', over all tokens, in nats."""


class Policy:
    """The model and its optimiser."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)  # the engines need the other cores
        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        self.model.eval()  # without dropout, as the engines
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        rate = LEARNING_RATE * WIDTH_OF_RATE / config.hidden_size
        self._adam = torch.optim.Adam(self.model.parameters(), lr=rate)

    def learn(
        self,
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        logprobs: Sequence[list[float]],
        advantages: Sequence[float],
    ) -> Lesson:
        """Takes one optimiser step. `logprobs` are the engines', with the weights that this copy has now."""
        mask = padded_mask(completions)
        old = padded(logprobs)
        new = completion_logprobs(self.model, prompts, completions)
        diff = float(((new.detach() - old).abs() * mask).max())
        loss = policy_loss(new, old, self._torch.tensor(advantages), mask)
        self._adam.zero_grad()
        loss.backward()
        norm = self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        if not bool(norm.isfinite()) or diff != diff:
            raise PlaneError("the model has diverged: its gradient or logprobs are not finite")
        self._adam.step()
        return Lesson(float(loss.detach()), diff)
