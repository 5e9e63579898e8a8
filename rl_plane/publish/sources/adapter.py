"""One LoRA adapter of a PEFT model."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME
from rl_plane.publish.sources.base import Taken
from rl_plane.publish.sources.fsdp1 import is_fsdp1
from rl_plane.publish.sources.module import is_sharded, unwrapped_model
from rl_plane.publish.sources.names import PEFT_PREFIX, without_wrappers
from rl_plane.publish.sources.torch_tensors import named_parameters, take_state

if TYPE_CHECKING:
    import torch


class AdapterSource:
    """One adapter of a PEFT model: tensors and config as `save_pretrained` would write them."""

    adapter = True

    def __init__(
        self,
        model: torch.nn.Module,
        adapter_name: str = "default",
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model: Any = unwrapped_model(model)
        configs = getattr(self._model, "peft_config", None)
        if not isinstance(configs, Mapping) or adapter_name not in configs:
            known = ", ".join(map(repr, configs)) if isinstance(configs, Mapping) else "it is no PEFT model"
            raise InvalidRequest(
                f"the model has no adapter {adapter_name!r}", field="adapter_name", fix=f"it has: {known}"
            )
        if is_fsdp1(self._model):
            for key in ("modules_to_save", "trainable_token_indices"):
                if getattr(configs[adapter_name], key, None):
                    raise InvalidRequest(
                        f"FSDP1 hides the tensors of this adapter's {key}",
                        field=f"adapter_config.{key}",
                        fix="shard by FSDP2 (fully_shard), or train without it",
                    )
        self._adapter_name = adapter_name
        self._dtype = dtype
        self.collective = is_sharded(self._model)

    def take(self) -> Taken:
        from peft import get_peft_model_state_dict

        if is_fsdp1(self._model):  # PEFT looks for its layers by names that FSDP1's modules don't have
            state = self._lora_of(named_parameters(self._model))
        else:
            state = get_peft_model_state_dict(
                self._model,
                state_dict=self._model.state_dict(keep_vars=True),
                adapter_name=self._adapter_name,
                save_embedding_layers=False,
            )
            state = {without_wrappers(name): tensor for name, tensor in state.items()}
        # If transformers has put the adapter into its own model (`add_adapter`), the names lack PEFT's prefix.
        state = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): tensor for name, tensor in state.items()}
        return take_state(state, self._dtype, None, self._config())

    def _lora_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Renames `….lora_A.<adapter>.weight` to `….lora_A.weight`, as PEFT saves it, and drops all other tensors."""
        pattern = re.compile(rf"(.*\.lora_\w+)\.{re.escape(self._adapter_name)}((?:\.weight|\.bias)?)")
        found = ((pattern.fullmatch(name), tensor) for name, tensor in state.items())
        return {match[1] + match[2]: tensor for match, tensor in found if match}

    def _config(self) -> bytes:
        config = copy.copy(self._model.peft_config[self._adapter_name])
        config.inference_mode = True
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            return (Path(directory) / ADAPTER_CONFIG_NAME).read_bytes()
