"""LoRA adapters in a transformers model, computed by PEFT itself, each in the dtype of its layer.

Each adapter has a model of its own: a copy of the base model's modules that shares its parameters, with PEFT's layers
around some of them. So adapters of any kinds do not meet, and the base model stays as it was loaded.

Only `spec` and `stage` import PEFT, on the worker's threads: a worker without adapters does not need it.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rl_plane.errors import EngineFailed, InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.adapter_patterns import check_patterns_end
from worker.engines.common.lora import check_numbers, refuse_key, refuse_other_keys
from worker.engines.common.torch_weights import NAME_OF_DTYPE, await_copies, host_copies
from worker.receive.weight_holder import TensorStream

NO_PEFT = "peft is not installed here: install rl-plane[hf]"

_NAME = "default"
"""PEFT's name for the adapter of a model. A model has one adapter."""

_PREFIX = "base_model.model."

_BY_PEFT = frozenset(
    {
        "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "target_parameters", "use_rslora",
        "rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "bias", "modules_to_save", "fan_in_fan_out",
        "layers_to_transform", "layers_pattern", "trainable_token_indices", "ensure_weight_tying", "init_lora_weights",
        "use_bdlora", "velora_config",
    }
)  # fmt: skip
"""Keys with which PEFT computes what the files alone determine. Other keys change the base weights, need more than
tokens in a request, or sample."""


def have_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


class ModelAdapters:
    """The adapters of one model. Any thread may call `spec` and `stage`; the rest runs between two steps."""

    def __init__(self, model: Any, checkpoint: Mapping[str, TensorSpec]) -> None:
        """`checkpoint`: the tensors of the model by the names that a checkpoint has for them."""
        self._model = model
        self._config = copy.deepcopy(model.config)
        self._checkpoint = checkpoint
        self._models: dict[str, Any] = {}

    def spec(self, config: Mapping[str, Any]) -> dict[str, TensorSpec]:
        self._check(config)
        skeleton = self._shared(_without_memory)
        given, injected = _inject(config, skeleton)
        import peft

        state = peft.get_peft_model_state_dict(
            skeleton, skeleton.state_dict(), adapter_name=_NAME, save_embedding_layers=False
        )
        turned = set(injected.target_parameters or ()) - set(given.get("target_parameters") or ())
        dtypes, spec = _lora_dtypes(skeleton), {}
        for name, tensor in state.items():
            plain = name.removeprefix(_PREFIX)
            dtype = next((dtype for layer, dtype in dtypes if plain.startswith(f"{layer}.lora_")), tensor.dtype)
            spec[_PREFIX + plain] = TensorSpec(NAME_OF_DTYPE[dtype], tuple(tensor.shape))
        if not turned:
            return spec
        joined = _joined_layers(skeleton, {name.rpartition(".")[2] for name in turned})
        others = {name: tensor for name, tensor in spec.items() if not name.startswith(joined)}
        return others | self._single_experts(given, set(injected.target_modules or ()))

    def _check(self, config: Mapping[str, Any]) -> None:
        """Raises InvalidWeights for settings that PEFT must not see."""
        check_numbers(config)
        refuse_other_keys(config, _BY_PEFT, "train the adapter without it")
        self._check_tokens(config)
        named = (self._model.named_modules(), self._model.named_parameters(remove_duplicate=False))
        # PEFT matches the patterns of ranks and alphas with the names of `target_parameters` too.
        check_patterns_end(config, (name for names in named for name, _ in names))

    def _check_tokens(self, config: Mapping[str, Any]) -> None:
        """Raises InvalidWeights for tokens that the model lacks: the generation thread would end at them."""
        asked, count = config.get("trainable_token_indices") or [], self._model.config.get_text_config().vocab_size
        for tokens in asked.values() if isinstance(asked, dict) else [asked]:
            if not isinstance(tokens, list) or not all(
                type(token) is int and 0 <= token < count for token in tokens
            ):
                raise refuse_key(
                    "trainable_token_indices", f"is {str(asked)[:100]}", f"name tokens from 0 to {count - 1}"
                )

    def _single_experts(self, config: Mapping[str, Any], left: set[str]) -> dict[str, TensorSpec]:
        """The tensors of an adapter of single experts. Transformers 4 had a linear layer for each expert. PEFT turns an
        adapter of those layers into one of the joined experts as it loads the files. `left`: the target modules that
        PEFT has not turned."""
        for key in ("use_rslora", "rank_pattern", "alpha_pattern"):
            if config.get(key):
                raise refuse_key(
                    key,
                    "has another meaning for the joined experts of transformers 5",
                    "train with transformers 5",
                )
        if isinstance(config["target_modules"], str):
            raise refuse_key("target_modules", "is a pattern that names experts", "list the names of the modules")
        experts = set(config["target_modules"]) - left
        linear = {name for name, module in self._model.named_modules() if type(module) is torch.nn.Linear}
        r, dtype, found = config["r"], NAME_OF_DTYPE[self._model.dtype], {}
        for name, tensor in self._checkpoint.items():
            module = name.removesuffix(".weight")
            if len(tensor.shape) != 2 or not any(f".{module}".endswith(f".{one}") for one in experts):
                continue
            if module in linear:
                raise refuse_key(
                    "target_modules",
                    f"names experts and {module!r} alike, of which PEFT would leave out the latter",
                    "train with transformers 5",
                )
            outputs, inputs = tensor.shape
            found[f"{_PREFIX}{module}.lora_A.weight"] = TensorSpec(dtype, (r, inputs))
            found[f"{_PREFIX}{module}.lora_B.weight"] = TensorSpec(dtype, (outputs, r))
        return found

    def stage(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Callable[[], bool]) -> Any:
        """Returns the base model with the adapter, ready to serve. It shares the base model's parameters."""
        spec = self.spec(config)
        copies = dict(host_copies(tensors, spec, frozenset(), cancelled))
        model = self._shared(lambda tensor: tensor)
        _inject(config, model)
        import peft

        on_device = {name.removeprefix(_PREFIX): tensor.to(self._model.device) for name, tensor in copies.items()}
        result = peft.set_peft_model_state_dict(model, on_device, _NAME, low_cpu_mem_usage=True)
        empty = [name for name, tensor in model.named_parameters() if tensor.is_meta]
        if empty or result.unexpected_keys:
            raise EngineFailed(
                f"PEFT did not take the adapter as a whole: {[*empty, *result.unexpected_keys][:3]}"
            )
        model.eval().requires_grad_(False)
        await_copies(self._model.device)
        return model

    def _shared(self, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Returns a copy for PEFT, which copies the config. The engine's steps may change the model's own config."""
        shared = _sharing(self._model, tensor_of)
        shared.config = copy.deepcopy(self._config)
        return shared

    def put(self, name: str, model: Any) -> None:
        """`model`: what `stage` has returned."""
        self._models[name] = model

    def remove(self, name: str) -> None:
        self._models.pop(name, None)

    def model_of(self, name: str | None) -> Any:
        """The model with this adapter. None: the base model."""
        return self._model if name is None else self._models[name]


def _inject(config: Mapping[str, Any], model: Any) -> tuple[Mapping[str, Any], Any]:
    """Puts PEFT's layers around the adapted ones, without memory for the adapter's tensors. `config`: is checked.
    Returns the settings that were given, and PEFT's config, in which PEFT may have changed some."""
    import peft

    given = {key: value for key, value in config.items() if key in _BY_PEFT - {"peft_type"} and value is not None}
    asked = copy.deepcopy(given) | {"init_lora_weights": False, "inference_mode": True}
    try:
        lora = peft.LoraConfig(**asked)
        with torch.device("meta"):
            peft.inject_adapter_in_model(lora, model, _NAME)
    except Exception as error:
        raise InvalidWeights(
            f"adapter_config.json: PEFT can't compute this adapter of this model: {str(error)[:300]}",
            field=_field_of(str(error), given),
            fix="publish an adapter that PEFT has made of this model",
        ) from error
    return given, lora


def _field_of(message: str, keys: Iterable[str]) -> str:
    """The setting that PEFT's message names, perhaps in words ("Target module ..."), or the whole config."""
    keys = [key for key in keys if len(key) > 1]  # a rank is checked before
    exact = next((key for key in keys if re.search(rf"\b{key}\b", message)), None)
    key = exact or next((key for key in keys if key.replace("_", " ").rstrip("s") in message.lower()), None)
    return "adapter_config" if key is None else f"adapter_config.{key}"


def _sharing(model: Any, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the model's modules, whose parameters and buffers are `tensor_of` the model's own ones."""
    made: dict[int, Any] = {}

    def parameter(one: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if one is not None and id(one) not in made:
            made[id(one)] = torch.nn.Parameter(tensor_of(one.detach()), requires_grad=False)
        return None if one is None else made[id(one)]

    def buffer(one: torch.Tensor | None) -> torch.Tensor | None:
        if one is not None and id(one) not in made:
            made[id(one)] = tensor_of(one)
        return None if one is None else made[id(one)]

    def module(one: torch.nn.Module) -> Any:
        if id(one) not in made:
            twin = made[id(one)] = object.__new__(type(one))
            # The tables of a module are its own, such as its hooks.
            twin.__dict__.update(
                {
                    key: copy.copy(value) if isinstance(value, dict | set) else value
                    for key, value in vars(one).copy().items()  # a step may add one meanwhile
                }
            )
            twin._parameters = {name: parameter(value) for name, value in one._parameters.items()}
            twin._buffers = {name: buffer(value) for name, value in one._buffers.items()}
            twin._modules = {
                name: None if value is None else module(value) for name, value in one._modules.items()
            }
        return made[id(one)]

    return module(model)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _lora_dtypes(model: Any) -> list[tuple[str, torch.dtype]]:
    """The names of PEFT's layers, inner ones first, and the dtypes of what they wrap: an adapter is computed in the
    dtype of its layer. PeftModel computes it in float32, unless `autocast_adapter_dtype=False`."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found = []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.get_param() if isinstance(module, ParamWrapper) else module.get_base_layer().weight
            found.append((name, weight.dtype))
    return sorted(found, key=lambda item: -len(item[0]))


def _joined_layers(model: Any, parameters: set[str]) -> tuple[str, ...]:
    """The prefixes of the names of tensors that adapt one of these parameters."""
    from peft.tuners.lora import ParamWrapper

    return tuple(
        f"{_PREFIX}{name}.lora_"
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper) and module.parameter_name in parameters
    )
