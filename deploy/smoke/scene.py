"""Common ground of the smoke profiles: the fleet, the updates, and the steps that several profiles take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.smoke.checks import Sample, expect
from deploy.smoke.fleet import Fleet, Json
from deploy.smoke.generation import Completion, complete, sampling
from deploy.smoke.trainer import PROMPT, SENTENCE, Forward, Trainer, random_tokens
from deploy.smoke.updates import Kill, Updates, base_update

SAMPLES = 4
"""Completions that each worker samples for `mismatch_kl`."""
SAMPLE_TOKENS = 32


@dataclass(frozen=True)
class Scene:
    """One run of one profile."""

    profile: str
    fleet: Fleet
    kill: Kill
    updates: Updates
    folder: Path
    """A new directory below the workers' weight roots, for this run."""
    say: Callable[[str], None]
    backend: str
    """The kind of group of `sft-group`: gloo or nccl."""
    host: str
    """The address at which the workers reach this process."""

    def start(self, seed: int) -> tuple[Trainer, Forward, Json]:
        """Waits for the fleet, and gives it the weights with which the trainer begins: the model of a seed that has
        learnt a first sentence. Returns the trainer, these weights and their version."""
        self.fleet.wait_ready()
        self.say(f"ready: {', '.join(sorted(self.fleet.members()))}")
        trainer = Trainer.of_base(self.folder / "seed", seed)
        forward = trainer.learn(random_tokens(f"{self.profile} 0", SENTENCE))
        path, label = self.folder / "base_0", f"{self.profile}_0"
        version = self.updates.apply(base_update(path, label, trainer.save(path)))
        self.check_says(forward, version)
        self.say(f"the trainer and {self.fleet.workers} workers hold {label!r} (sequence {version['sequence']})")
        return trainer, forward, version

    def check_says(self, forward: Forward, version: Json, adapter: Json | None = None) -> list[int]:
        """Checks that each worker says what these weights say, labelled with their version. Returns the sentence."""
        self.fleet.check_version(version)
        wanted = forward.sentence()
        for one in self.fleet.members():
            (said,) = self._ask(one, adapter, PROMPT, SENTENCE, temperature=0.0)
            said.check(SENTENCE, version, adapter)
            expect(said.tokens == wanted, f"the tokens {wanted} from {one}", said.tokens)
        return wanted

    def check_survivors(self, forward: Forward, version: Json) -> None:
        """Checks that some worker is open, and that each open one still says what these weights say."""
        state = self.fleet.rl("state")
        expect(state["version"] == version, f"the committed version {version}", state["version"])
        survivors = [row["instance_id"] for row in state["workers"] if row["ready"]]
        expect(bool(survivors), "a worker that is open", state)
        for one in survivors:
            (said,) = self._ask(one, None, PROMPT, SENTENCE, temperature=0.0)
            said.check(SENTENCE, version)
            expect(said.tokens == forward.sentence(), "the tokens of the version before", said.tokens)

    def sampled(self, version: Json, adapter: Json | None = None) -> list[Completion]:
        """Returns completions at temperature 1 from each worker, all labelled with this version."""
        found: list[Completion] = []
        for number, one in enumerate(self.fleet.members()):
            prompt = random_tokens(f"{self.profile} sampled {number}", len(PROMPT))
            found += self._ask(one, adapter, prompt, SAMPLE_TOKENS, n=SAMPLES, seed=number * SAMPLES)
        for completion in found:
            completion.check(SAMPLE_TOKENS, version, adapter)
        return found

    def _ask(
        self, instance_id: str, adapter: Json | None, prompt: list[int], count: int, **more: Any
    ) -> list[Completion]:
        model: Json = {} if adapter is None else {"model": adapter["name"]}
        body = sampling(prompt, count, nvext={"instance_id": instance_id}, **model, **more)
        return complete(self.fleet, body)


def samples_of(forward: Forward, completions: list[Completion]) -> list[Sample]:
    return [forward.sample(completion) for completion in completions]
