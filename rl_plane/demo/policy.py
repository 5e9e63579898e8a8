"""The trainer's copy of the model: its optimiser step, and its checkpoints for the fleet."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plane.demo.grpo import completion_logprobs, padded, padded_mask, policy_loss
from rl_plane.errors import PlaneError
from rl_plane.protocol.canary import default_canary
from rl_plane.protocol.versions import TensorSpec, tensors_digest

LEARNING_RATE = 2e-3
"""For the tiny model's width; the reward goes from 0.5 to above 0.9 within 40 steps, over every seed tried."""
WIDTH_OF_RATE = 128
"""The rate falls with the model's width, because the outputs of a wider model move further in one step."""
MAX_GRAD_NORM = 1.0
KEPT_CHECKPOINTS = 3
"""The committed checkpoint, the one before, which a joining worker may still read, and a spare."""

PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Lesson:
    """The outcome of one optimiser step."""

    loss: float
    max_logprob_diff: float
    """The largest difference between this copy's logprobs and the engines', over all tokens, in nats."""


class Policy:
    """The model and its optimiser."""

    def __init__(self, model: Path, threads: int = 1) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        self._model.eval()  # without dropout, as the engines
        config = self._model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        rate = LEARNING_RATE * WIDTH_OF_RATE / config.hidden_size
        self._adam = torch.optim.Adam(self._model.parameters(), lr=rate)

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
        new = completion_logprobs(self._model, prompts, completions)
        diff = float(((new.detach() - old).abs() * mask).max())
        loss = policy_loss(new, old, self._torch.tensor(advantages), mask)
        self._adam.zero_grad()
        loss.backward()
        norm = self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        if not bool(norm.isfinite()) or diff != diff:
            raise PlaneError("the model has diverged: its gradient or logprobs are not finite")
        self._adam.step()
        return Lesson(float(loss.detach()), diff)

    def canary(self) -> dict[str, Any]:
        """The numeric canary of the present weights: the values that an engine with them must compute."""
        sequences = default_canary(self.vocab_size).sequences
        with self._torch.no_grad():
            starts, rests = [tokens[:1] for tokens in sequences], [tokens[1:] for tokens in sequences]
            expected = completion_logprobs(self._model, starts, rests)
        return {"sequences": sequences, "expected": expected.tolist()}

    def save(self, path: Path) -> str:
        """Writes a checkpoint directory at once, by a rename, and returns its digest."""
        unfinished = path.with_name(f".{path.name}.writing")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._model.save_pretrained(unfinished)
        digest = checkpoint_digest(unfinished)
        unfinished.rename(path)
        return digest


def checkpoint_digest(path: Path) -> str:
    """The digest of a float32 checkpoint, as rl_plane.protocol.versions defines it."""
    from blake3 import blake3
    from safetensors import safe_open

    rows = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                value = tensors.get_tensor(name)
                if value.dtype.str != "<f4":
                    raise PlaneError(f"{file}: {name} is {value.dtype}, not float32")
                rows.append((name, TensorSpec("F32", value.shape), blake3(value.tobytes()).hexdigest()))
    return tensors_digest(rows)


def prune_checkpoints(root: Path, committed: Path | None, keep: int = KEPT_CHECKPOINTS) -> None:
    """Removes all but the newest checkpoints and the committed one, which a joining worker loads."""
    found = sorted(root.glob(f"{PREFIX}*"), key=lambda path: int(path.name.removeprefix(PREFIX)))
    for path in found[:-keep]:
        if path != committed:
            shutil.rmtree(path)
