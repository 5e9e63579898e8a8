"""The models, adapters and tokens of the fake engine: any bytes, and tokens that follow from their digests."""

from __future__ import annotations

import json
import math
import os
import random
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.hashers import hex_digest
from rl_plane.protocol.versions import (
    ADAPTER_CONFIG_NAME,
    DEFAULT_ALGORITHM,
    DigestAlgorithm,
    TensorSpec,
    WeightVersion,
    algorithm_of,
    tensors_digest,
)
from rl_plane.weights.checkpoint import ADAPTER_NAME, open_checkpoint
from rl_plane.weights.safetensors_file import write_atomically, write_safetensors
from worker.engines.capabilities import CheckScope
from worker.engines.common.lora import lora_spec, parse_lora

FIRST_TOKEN = 3
"""The first token id that the engine makes. Most tokenizers have padding, begin and end at 0, 1 and 2."""


def hash_of(digest: str, prompt_hash: bytes, position: int) -> bytes:
    return blake2b(
        prompt_hash + position.to_bytes(8, "little"), key=blake2b(digest.encode()).digest(), digest_size=16
    ).digest()


def hash_of_prompt(prompt_token_ids: list[int]) -> bytes:
    return blake2b(array("Q", prompt_token_ids).tobytes(), digest_size=32).digest()


def token_of(made: bytes, vocab_size: int) -> int:
    return FIRST_TOKEN + int.from_bytes(made[:8], "little") % (vocab_size - FIRST_TOKEN)


def permitted(request: GenerateRequest, token: int, made: list[int], vocab_size: int) -> int:
    """Returns `token`. If the request bars it after the tokens of `made`, it returns another token that follows from
    it."""
    allowed, bias = request.allowed_token_ids, request.logit_bias
    if not (allowed or bias or request.bad_words_token_ids or request.min_tokens):
        return token
    barred = set(request.stop_token_ids) if len(made) < request.min_tokens else set()
    for *before, last in request.bad_words_token_ids:
        if made[max(0, len(made) - len(before)) :] == before:
            barred.add(last)
    left = set(allowed if allowed is not None else range(FIRST_TOKEN, vocab_size)) - barred
    left = left or set(range(FIRST_TOKEN)) - barred
    highest = max(bias.get(str(one), 0.0) for one in left)
    found = sorted(one for one in left if bias.get(str(one), 0.0) == highest)
    return token if token in found else found[token % len(found)]


def logprob_of(made: bytes) -> float:
    return -(1 + int.from_bytes(made[8:12], "little")) / (1 << 30)


def both_digests(digest: str, adapter_digest: str | None) -> str:
    return digest if adapter_digest is None else f"{digest}+{adapter_digest}"


def fake_token(
    digest: str,
    prompt_token_ids: list[int],
    position: int,
    vocab_size: int = 512,
    adapter_digest: str | None = None,
) -> int:
    """The token that the fake engine makes as number `position` (from 0) of a completion, under the weights of `digest`
    (a version's: "xxh3:<hex>") and, if the request names an adapter, of `adapter_digest`."""
    made = hash_of(both_digests(digest, adapter_digest), hash_of_prompt(prompt_token_ids), position)
    return token_of(made, vocab_size)


def fake_logprob(
    digest: str, prompt_token_ids: list[int], position: int, adapter_digest: str | None = None
) -> float:
    """The logprob of that token, in [-4, 0)."""
    return logprob_of(hash_of(both_digests(digest, adapter_digest), hash_of_prompt(prompt_token_ids), position))


def fake_prompt_logprobs(
    digest: str, prompt_token_ids: list[int], adapter_digest: str | None = None
) -> list[float | None]:
    """The logprob of each token of the prompt, from the weights and the tokens up to it. The first has none."""
    made = blake2b(key=blake2b(both_digests(digest, adapter_digest).encode()).digest(), digest_size=16)
    logprobs: list[float | None] = []
    for token in prompt_token_ids:
        made.update(token.to_bytes(8, "little"))
        logprobs.append(logprob_of(made.digest()) if logprobs else None)
    return logprobs


def make_fake_model(path: Path, seed: int, tensors: int = 4, nbytes: int = 1024) -> Path:
    """Writes a model directory of `tensors` float32 tensors of `nbytes` each. The bytes follow from the seed alone."""
    if tensors < 1 or nbytes < 4 or nbytes % 4:
        raise ValueError("a fake model has at least one tensor, of a positive multiple of 4 bytes")
    path.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)
    spec = TensorSpec("F32", (nbytes // 4,))
    weights = {f"layers.{number}.weight": (spec, _finite(source, spec)) for number in range(tensors)}
    write_atomically(path / "config.json", [json.dumps({"model_type": "fake"}).encode()])
    write_safetensors(path / "model.safetensors", weights)
    return path


def make_fake_adapter(path: Path, seed: int, model: Path, r: int = 2) -> Path:
    """Writes a LoRA adapter directory, in float32, for all modules of a model of `make_fake_model`. The bytes follow
    from the arguments alone."""
    checkpoint = open_checkpoint(model, field="model")
    checkpoint.close()
    linear = linear_modules(checkpoint.specs)
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "lora_alpha": r,
        "peft_type": "LORA",
        "r": r,
        "target_modules": sorted(linear),
        "task_type": "CAUSAL_LM",
    }
    specs = lora_spec(parse_lora(config), list(linear), linear, dict.fromkeys(linear, "F32"))
    source = random.Random(f"adapter {seed}")
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / ADAPTER_NAME, {name: (spec, _finite(source, spec)) for name, spec in specs.items()})
    write_atomically(path / ADAPTER_CONFIG_NAME, [config_bytes(config)])
    return path


def _finite(source: random.Random, spec: TensorSpec) -> bytes:
    """Random float32 numbers."""
    data = bytearray(source.randbytes(spec.nbytes))
    data[3::4] = b"\x3d" * (spec.nbytes // 4)  # the exponent: around 0.06
    return bytes(data)


def linear_modules(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
    """Module → (inputs, outputs). Every weight counts as a linear layer; a vector has one output."""
    return {
        name.removesuffix(".weight"): (spec.shape[-1], math.prod(spec.shape[:-1]))
        for name, spec in specs.items()
        if name.endswith(".weight") and spec.shape
    }


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """The config in PEFT's own format."""
    return json.dumps(config, indent=2, sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """One tensor of a fake model."""

    spec: TensorSpec
    digest: str  # hex, of the bytes
    data: bytes | bytearray | None  # None without hold_bytes

    @classmethod
    def of(cls, spec: TensorSpec, data: bytes, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> FakeTensor:
        """The tensor of these bytes."""
        return cls(spec, hex_digest(data, algorithm), data)

    def digest_now(self) -> str:
        """The digest of the bytes as they are now, if the engine holds them."""
        return self.digest if self.data is None else hex_digest(self.data, DEFAULT_ALGORITHM)


class FakeWeights:
    """A full set of weights, served or staged."""

    def __init__(self, tensors: dict[str, FakeTensor]) -> None:
        self.tensors = tensors
        digests = {name: tensor.digest for name, tensor in tensors.items()}
        if len({algorithm_of(digest) for digest in digests.values()}) > 1:
            # A half-written mixture of two versions, so this need not be a version's digest.
            digests = {name: hex_digest(digest.encode(), DEFAULT_ALGORITHM) for name, digest in digests.items()}
        self.digest = tensors_digest((name, tensor.spec, digests[name]) for name, tensor in tensors.items())

    def with_some(self, other: FakeWeights, names: Iterable[str]) -> FakeWeights:
        """These weights with some tensors of `other`."""
        return FakeWeights({**self.tensors, **{name: other.tensors[name] for name in names}})

    def checksum(self, scope: CheckScope) -> dict[str, Any]:
        """`checksum` for all tensors, and `checksums` by tensor, as `scope` says."""
        each = {name: tensor.digest_now() for name, tensor in sorted(self.tensors.items()) if scope.covers(name)}
        lines = [f"{name} {self.tensors[name].spec} {digest}" for name, digest in each.items()]
        whole = hex_digest("\n".join(["fake", *lines]).encode(), DEFAULT_ALGORITHM)
        return {"checksum": whole, **({"checksums": each} if scope.per_tensor else {})}

    def mismatches(self, other: FakeWeights) -> list[str]:
        return sorted(
            name
            for name in self.tensors.keys() | other.tensors.keys()
            if self._digest_now(name) != other._digest_now(name)
        )

    def _digest_now(self, name: str) -> str | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.digest_now()

    def noise(self) -> FakeWeights:
        """Other weights of the same shapes."""
        tensors = {}
        for name, tensor in self.tensors.items():
            if tensor.data is None:
                tensors[name] = FakeTensor(tensor.spec, os.urandom(16).hex(), None)
            else:
                tensors[name] = FakeTensor.of(tensor.spec, os.urandom(tensor.spec.nbytes))
        return FakeWeights(tensors)


class FakeAdapter:
    """A LoRA adapter, loaded or staged."""

    def __init__(self, tensors: dict[str, FakeTensor], config: Mapping[str, Any]) -> None:
        """Its digest is the version's if PEFT wrote the config file: only the parsed config is here."""
        lines = [(name, tensor.spec, tensor.digest) for name, tensor in tensors.items()]
        self.digest = tensors_digest(lines, config_bytes(config))
        self.tensors = tensors
        self.version: WeightVersion | None = None
