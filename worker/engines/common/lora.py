"""What a PEFT LoRA config (`adapter_config.json`) asks for, and which tensors an adapter of it must hold. No torch.

Only plain LoRA is taken: anything that would change the tokens and is not supported here is refused, also where
another PEFT would know it. A key that only tells how the adapter was trained is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec

MAX_RANK = 1 << 16
"""More than any model is wide: a bound on what shapes are made of."""

MAX_ALPHA = 1e6
"""More than any use, and far from overflow."""

SWITCH_ON = "start it with --engine-arg max_lora_rank=16 (or the rank that your adapters have)"
NO_LORA = f"its LoRA is off: {SWITCH_ON}"
"""Why an engine takes no adapter that could."""

_PREFIX = "base_model.model."
_READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "bias"})
_IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "task_type",
    }
)  # fmt: skip
"""They tell of training or of where the adapter came from, or mean something only beside a key that is refused."""

_NEUTRAL_INIT = (None, True, False, "gaussian", "orthogonal", "eva")
"""Those that leave the base weights alone: with the others the adapter belongs to changed ones."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    r: int
    alpha: float
    rslora: bool
    targets: frozenset[str]
    """Module names, or their last parts, as PEFT matches them."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


def parse_lora(config: Mapping[str, Any]) -> LoraConfig:
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
    """The modules that PEFT would adapt. `linear`: name → (inputs, outputs); `others`: modules of other kinds."""

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
    """An adapted module's A and B in `adapter_model.safetensors`."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def lora_spec(
    lora: LoraConfig, modules: list[str], linear: Mapping[str, tuple[int, int]], dtypes: Mapping[str, str]
) -> dict[str, TensorSpec]:
    """Of every tensor. `dtypes`: of each module's weight."""
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
