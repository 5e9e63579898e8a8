"""Reads a PEFT LoRA config (`adapter_config.json`): what it asks for, and which tensors an adapter must hold. No torch.

`parse_lora` takes plain LoRA of linear layers, which every engine computes. It refuses every other setting that would
change the tokens. `check_numbers` has the checks that an engine makes which computes adapters by PEFT itself. Both
ignore keys that only describe how the adapter was trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
_READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "bias", "rank_pattern",
        "alpha_pattern",
    }
)  # fmt: skip
IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Keys about the training or the origin of the adapter, and keys that mean something only beside a key that is
refused."""

_NEUTRAL_INIT = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations that leave the base weights alone. An adapter with any other one belongs to changed base weights."""

_EXPERT_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The names that the linear layers of one expert have in checkpoints."""

_BY_HF = "train the adapter without it, or serve it by the hf engine"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of a plain LoRA adapter."""

    r: int
    alpha: float
    rslora: bool
    targets: frozenset[str]
    """Module names, or their last parts, as PEFT matches them."""
    ranks: Mapping[re.Pattern[str], int] = field(default_factory=dict)
    """PEFT's `rank_pattern`: a regular expression of module names → their rank, if it is not `r`."""
    alphas: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    """PEFT's `alpha_pattern`."""

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.ranks, module, self.r)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _of_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


_Number = TypeVar("_Number", int, float)


def _of_pattern(patterns: Mapping[re.Pattern[str], _Number], module: str, otherwise: _Number) -> _Number:
    """The value of the first pattern that is the name of the module or its ending, as PEFT finds it."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), otherwise)


def _compiled(pattern: str) -> re.Pattern[str]:
    """An adapter may have a pattern for each module: more than the cache of `re` holds."""
    return re.compile(rf"(.*\.)?({pattern})$")


def parse_lora(config: Mapping[str, Any]) -> LoraConfig:
    """Reads the config. Raises InvalidWeights for a config that is not plain LoRA of linear layers."""
    check_numbers(config)
    targets = config.get("target_modules")
    if config.get("target_parameters"):
        raise refuse_key(
            "target_parameters",
            f"is {_shown(config['target_parameters'])}, and this engine has LoRA for linear layers only",
            "target linear layers, or serve the adapter by the hf engine",
        )
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) and name for name in targets):
        raise refuse_key(
            "target_modules", f"is {_shown(targets)}", "list the names of the modules, without patterns"
        )
    if config.get("bias", "none") != "none":
        raise refuse_key("bias", f"is {_shown(config['bias'])}", f'train with bias="none": {_BY_HF}')
    refuse_other_keys(config, _READ, _BY_HF)
    return LoraConfig(
        config["r"],
        float(config["lora_alpha"]),
        config.get("use_rslora", False),
        frozenset(targets),
        {_compiled(key): rank for key, rank in (config.get("rank_pattern") or {}).items()},
        {_compiled(key): float(alpha) for key, alpha in (config.get("alpha_pattern") or {}).items()},
    )


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raises InvalidWeights unless this is a LoRA of the base weights as they are, with ranks and alphas that make
    sense."""
    if config.get("peft_type") != "LORA":
        raise refuse_key(
            "peft_type", f"is {_shown(config.get('peft_type'))}", "publish a LoRA adapter (peft_type LORA)"
        )
    _check_number("r", config.get("r"), _is_rank, _RANK_FIX)
    _check_number("lora_alpha", config.get("lora_alpha"), _is_alpha, _ALPHA_FIX)
    _check_patterns("rank_pattern", config, _is_rank, _RANK_FIX)
    _check_patterns("alpha_pattern", config, _is_alpha, _ALPHA_FIX)
    rslora = config.get("use_rslora", False)
    if type(rslora) is not bool:
        raise refuse_key("use_rslora", f"is {_shown(rslora)}", "say true or false")
    init = config.get("init_lora_weights", True)
    if not any(init is known or (isinstance(known, str) and init == known) for known in _NEUTRAL_INIT):
        raise refuse_key(
            "init_lora_weights",
            f"is {_shown(init)}, which trains beside changed base weights",
            "save it as a LoRA of the original weights (PEFT: path_initial_model_for_weight_conversion)",
        )


def refuse_other_keys(config: Mapping[str, Any], read: frozenset[str], fix: str) -> None:
    """Raises InvalidWeights for a key that is not in `read` and has a value that may change the tokens."""
    for key, value in config.items():
        # By identity: 0 is not False, but the first layer.
        neutral = value is None or value is False or value in ([], {}, "")
        if not neutral and key not in read and key not in IGNORED:
            raise refuse_key(key[:64], f"is {_shown(value)}, which is not supported", fix)


_RANK_FIX = f"a whole number from 1 to {MAX_RANK}"
_ALPHA_FIX = f"a number above 0, at most {MAX_ALPHA:g}"


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= MAX_ALPHA


def _check_number(key: str, value: Any, fits: Callable[[Any], bool], fix: str) -> None:
    if not fits(value):
        raise refuse_key(key, f"is {_shown(value)}", fix)


def _check_patterns(key: str, config: Mapping[str, Any], fits: Callable[[Any], bool], fix: str) -> None:
    patterns = config.get(key)
    if patterns is None:
        return
    if not isinstance(patterns, dict):
        raise refuse_key(key, f"is {_shown(patterns)}", "an object: module name → number")
    for pattern, value in patterns.items():
        _check_number(key, value, fits, fix)
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise refuse_key(
                key, f"has {_shown(pattern)}: {error}", "module names, or regular expressions of them"
            ) from error


def target_modules(
    lora: LoraConfig, linear: Mapping[str, tuple[int, int]], others: frozenset[str] = frozenset()
) -> list[str]:
    """The modules that PEFT would adapt. `linear`: name → (inputs, outputs). `others`: modules of other kinds."""

    def matched(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[start:]) in lora.targets for start in range(len(parts)))

    if any(name.endswith(".experts") for name in others):
        for target in sorted(lora.targets):
            if target.rpartition(".")[2] in _EXPERT_PARTS and not any(
                f".{name}".endswith(f".{target}") for name in linear
            ):
                raise refuse_key(
                    "target_modules",
                    f"names {_shown(target)}, which is a part of this model's experts, and this engine has LoRA for "
                    "linear layers only",
                    "target other layers, or serve the adapter by the hf engine",
                )
    unfit = sorted(name for name in others if matched(name))
    if unfit:
        raise refuse_key(
            "target_modules", f"names {unfit[0]!r}, which is no linear layer", "target linear layers only"
        )
    found = [name for name in linear if matched(name)]
    if not found:
        raise refuse_key(
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
        rank = lora.rank_of(module)
        spec[name_a] = TensorSpec(dtypes[module], (rank, inputs))
        spec[name_b] = TensorSpec(dtypes[module], (outputs, rank))
    return spec


def _shown(value: Any) -> str:
    return repr(value)[:100]


def refuse_key(key: str, what: str, fix: str) -> InvalidWeights:
    return InvalidWeights(f"adapter_config.json: {key} {what}", field=f"adapter_config.{key}", fix=fix)
