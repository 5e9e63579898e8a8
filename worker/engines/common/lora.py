"""Reads a PEFT LoRA config (`adapter_config.json`): what it asks for, and which tensors an adapter must hold. No torch.

It takes plain LoRA only. It refuses every setting that would change the tokens and is not supported here, even if PEFT
knows it. It ignores keys that only describe how the adapter was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec

MAX_RANK = 1 << 16
"""More than the width of any model: a bound on the sizes of shapes."""

MAX_ALPHA = 1e6
"""More than any use, and far from overflow."""

SWITCH_ON = "start it with --engine-arg max_lora_rank=16 (or the rank that your adapters have)"
NO_LORA = f"its LoRA is off: {SWITCH_ON}"
"""The reason of an engine that could take adapters and was started without."""

_PREFIX = "base_model.model."
_READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "bias"})
_IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "task_type",
    }
)  # fmt: skip
"""Keys about the training or the origin of the adapter, and keys that mean something only beside a key that is
refused."""

_NEUTRAL_INIT = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights alone. An adapter with any other one belongs to changed base weights."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of a plain LoRA adapter."""

    r: int
    alpha: float
    rslora: bool
    targets: frozenset[str]
    """Module names, or their last parts, as PEFT matches them."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


def parse_lora(config: Mapping[str, Any]) -> LoraConfig:
    """Reads the config. Raises InvalidWeights for a config that is not plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise _refuse(
            "peft_type", f"is {_shown(config.get('peft_type'))}", "publish a LoRA adapter (peft_type LORA)"
        )
    r, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(r) is not int or not 1 <= r <= MAX_RANK:
        raise _refuse("r", f"is {_shown(r)}", f"a whole number from 1 to {MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise _refuse("lora_alpha", f"is {_shown(alpha)}", f"a number above 0, at most {MAX_ALPHA:g}")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) and name for name in targets):
        raise _refuse("target_modules", f"is {_shown(targets)}", "list the names of the modules, without patterns")
    rslora = config.get("use_rslora", False)
    if type(rslora) is not bool:
        raise _refuse("use_rslora", f"is {_shown(rslora)}", "say true or false")
    if config.get("bias", "none") != "none":
        raise _refuse("bias", f"is {_shown(config['bias'])}", 'train with bias="none"')
    init = config.get("init_lora_weights", True)
    if not any(init is known or (isinstance(known, str) and init == known) for known in _NEUTRAL_INIT):
        raise _refuse(
            "init_lora_weights",
            f"is {_shown(init)}, which trains beside changed base weights",
            "save it as a LoRA of the original weights (PEFT: path_initial_model_for_weight_conversion)",
        )
    for key, value in config.items():
        # By identity: 0 is not False, but the first layer.
        neutral = value is None or value is False or value in ([], {}, "")
        if not neutral and key not in _READ and key not in _IGNORED:
            raise _refuse(key[:64], f"is {_shown(value)}, which is not supported", "train the adapter without it")
    return LoraConfig(r, float(alpha), rslora, frozenset(targets))


def target_modules(
    lora: LoraConfig, linear: Mapping[str, tuple[int, int]], others: frozenset[str] = frozenset()
) -> list[str]:
    """The modules that PEFT would adapt. `linear`: name → (inputs, outputs). `others`: modules of other kinds."""

    def matched(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[start:]) in lora.targets for start in range(len(parts)))

    unfit = sorted(name for name in others if matched(name))
    if unfit:
        raise _refuse(
            "target_modules", f"names {unfit[0]!r}, which is no linear layer", "target linear layers only"
        )
    found = [name for name in linear if matched(name)]
    if not found:
        raise _refuse(
            "target_modules",
            f"{_shown(sorted(lora.targets))} names no linear layer of this model",
            "use its names",
        )
    return found


def tensor_names(module: str) -> tuple[str, str]:
    """The names of a module's A and B in `adapter_model.safetensors`."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def lora_spec(
    lora: LoraConfig, modules: list[str], linear: Mapping[str, tuple[int, int]], dtypes: Mapping[str, str]
) -> dict[str, TensorSpec]:
    """The spec of every tensor of the adapter. `dtypes`: module → the dtype of its weight."""
    spec = {}
    for module in modules:
        inputs, outputs = linear[module]
        name_a, name_b = tensor_names(module)
        spec[name_a] = TensorSpec(dtypes[module], (lora.r, inputs))
        spec[name_b] = TensorSpec(dtypes[module], (outputs, lora.r))
    return spec


def _shown(value: Any) -> str:
    return repr(value)[:100]


def _refuse(key: str, what: str, fix: str) -> InvalidWeights:
    return InvalidWeights(f"adapter_config.json: {key} {what}", field=f"adapter_config.{key}", fix=fix)
