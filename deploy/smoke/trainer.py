"""The trainer of the smoke test: a tiny float32 model that learns sentences, and its own forward over any tokens."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from deploy.smoke.checks import Sample, SmokeFailed
from deploy.smoke.generation import Completion
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model

PROMPT = [72, 101, 108, 108, 111]
SENTENCE = 16
"""The tokens of a sentence."""
MAX_STEPS = 200
"""A sentence takes some 15 steps of the optimiser."""
BASE_RATE = 3e-3
ADAPTER_RATE = 1e-2
LEARNT = 0.3
"""The sentence is learnt when no token of it has a loss above this, in nats. So each leads by far."""
OTHERS = 7
"""Random sequences in each batch. Without them the model would say little but its sentence, and its other tokens would
have no entropy that a comparison of logprobs could use."""


def random_tokens(name: str, count: int) -> list[int]:
    """Returns tokens that follow from the name. None of them is special."""
    chance = random.Random(name)
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(count)]


class Forward:
    """The weights of one version, as the trainer keeps them, in plain transformers (an adapter: in PEFT)."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Returns the log probability of each of `tokens` after `prompt`, by one forward over all of them."""
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            rows = logits.float().log_softmax(-1)
        found: list[float] = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return found

    def sentence(self) -> list[int]:
        """Returns the greedy tokens after the prompt."""
        import torch

        tokens = list(PROMPT)
        for _ in range(SENTENCE):
            with torch.no_grad():
                tokens.append(int(self.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(PROMPT) :]

    def sample(self, completion: Completion) -> Sample:
        return Sample(self.logprobs(completion.prompt, completion.tokens), completion.logprobs)


class Trainer:
    """Trains a tiny model, or an adapter on top of it."""

    def __init__(self, model: Any, rate: float) -> None:
        self.model = model
        self._rate = rate

    @classmethod
    def of_base(cls, folder: Path, seed: int) -> Trainer:
        """Makes a model from a seed. `folder` gets its first checkpoint."""
        return cls(load(make_tiny_model(folder, seed)), BASE_RATE)

    @classmethod
    def of_adapter(cls, base: Forward) -> Trainer:
        """Puts a new LoRA adapter of PEFT onto a copy of the base."""
        import torch
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        config = LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(get_peft_model(copy.deepcopy(base.model), config), ADAPTER_RATE)

    def learn(self, sentence: list[int]) -> Forward:
        """Trains until the model says this sentence after the prompt, and returns the weights after it."""
        import torch

        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        adam = torch.optim.Adam(weights, lr=self._rate)
        chance = torch.Generator().manual_seed(0)
        lesson, first = torch.tensor([PROMPT + sentence]), len(PROMPT)
        for _ in range(MAX_STEPS):
            others = torch.randint(3, VOCAB_SIZE, (OTHERS, lesson.shape[1]), generator=chance)
            batch = torch.cat([lesson, others])
            rows = self.model(input_ids=batch).logits[:, :-1].log_softmax(-1)
            losses = -rows.gather(2, batch[:, 1:, None])[..., 0]
            if float(losses[0, first - 1 :].detach().max()) < LEARNT:
                return self.forward()
            adam.zero_grad()
            (losses[0, first - 1 :].mean() + losses[1:].mean()).backward()
            adam.step()
        raise SmokeFailed(f"the trainer did not learn its sentence in {MAX_STEPS} steps")

    def forward(self) -> Forward:
        """Returns a copy of the weights as they are now."""
        return Forward(copy.deepcopy(self.model).eval())

    def save(self, path: Path) -> str:
        """Writes a checkpoint, or a PEFT directory, and returns its digest."""
        from worker.receive.staging import adapter_digest, model_digest

        if hasattr(self.model, "peft_config"):
            self.model.save_pretrained(path, save_embedding_layers=False)
            return adapter_digest(path)
        self.model.save_pretrained(path)
        return model_digest(path)


def load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def adapted(base: Forward, path: Path) -> Forward:
    """Returns the base with the adapter of a PEFT directory, in PEFT's own model."""
    from peft import PeftModel

    return Forward(PeftModel.from_pretrained(copy.deepcopy(base.model), str(path)).eval())
