"""The part that both `hf` engines have in common: a model of transformers in this process, and one thread that computes
with it and changes its weights, one after the other."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.versions import TensorSpec, WeightVersion
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.capabilities import WHOLE, CanCheckWeights, CheckAction, CheckScope
from worker.engines.common.checkpoint_spec import refuse_lacking
from worker.engines.common.generating import Generating
from worker.engines.common.torch_weights import ModelWeights
from worker.receive.weight_receiver import Receiver, load_transports

NO_SLEEP = "the hf engine has no sleep mode: its memory stays where it is"

T = TypeVar("T")
W = TypeVar("W", bound=ModelWeights)


class HfModelEngine(Generating, CanCheckWeights, Generic[W]):
    receiver: Receiver

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        options.refuse_modes("the hf engine does not have this", "use vllm or sglang")
        self._model: Any = None
        self._holder: W | None = None

    def _load_weights(
        self, model_class: Any, holder_class: Callable[..., W], saved: Mapping[str, TensorSpec]
    ) -> W:
        """Blocks. `saved`: the tensors of the checkpoint."""
        self._load_tokenizer()
        self._model = model = _load_model(model_class, self._options)
        self._holder = holder = holder_class(model, saved, lambda: self._submit(self._before_overwrite).result())
        self.receiver = Receiver(holder, load_transports(self._options.places, str(model.device)))
        return holder

    def _info_of(self, max_model_len: int, lacks: Mapping[str, str], **more: Any) -> EngineInfo:
        return EngineInfo(
            engine="hf",
            engine_version=transformers.__version__,
            model=self._options.model.absolute().name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            world_size=1,
            vocab_size=self.model.config.get_text_config().vocab_size,
            max_model_len=max_model_len,
            lacks=lacks,
            transports=self.receiver.backends,
            tied=self.holder.tied_tensors(),
            **more,
        )

    def _drop_model(self) -> None:
        self._model = self._holder = self._tokenizer = None
        vars(self).pop("receiver", None)  # it refers to the model

    @property
    def model(self) -> Any:
        """The transformers model, with the live weights. Only the engine's thread may touch it while the engine
        computes."""
        if self._model is None:
            raise EngineFailed("the engine is not running")
        return self._model

    @property
    def holder(self) -> W:
        if self._holder is None:
            raise EngineFailed("the engine is not running")
        return self._holder

    @abstractmethod
    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs `work` on the engine's thread, between two steps, in the order of the calls."""

    async def _on_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(work))
        except PlaneError:
            raise
        except Exception as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error

    async def liveness(self) -> None:
        device = self._model.device if self._model is not None else "cpu"
        # The answer proves the thread, its tensor the device.
        await self._on_thread(lambda: torch.ones((), device=device).item())

    async def flush_cache(self) -> bool:
        """Returns True: there is no prefix cache, and no request uses another one's KV."""
        await self.liveness()
        return True

    # weights

    def _before_change(self, keep_kv: bool) -> None:
        """Runs on the thread before the weights change."""

    def _before_overwrite(self) -> None:
        """Runs on the thread before tensors overwrite the weights, which are of no version from here on."""
        self.holder.version = None

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        weights = self.holder
        served = weights.version
        names = self.receiver.changed_since(staging, served.digest if served is not None else None)
        staged = self.receiver.take(staging)

        def between_two_steps() -> None:
            self._before_change(keep_kv)
            still = weights.version == served
            weights.version = None  # half-way, the weights are of no version
            weights.load(staged, names if still else None)
            weights.version = version

        await self._on_thread(between_two_steps)
        return await self.flush_cache()

    def set_version(self, version: WeightVersion) -> None:
        self.holder.version = version

    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        weights = self.holder
        if action != "reset_tensors":
            return [{"rank": 0, **await asyncio.to_thread(weights.checks.row, action, scope)}]

        def between_two_steps() -> None:
            self._before_change(keep_kv=True)
            weights.version = None  # running requests continue with weights of no version
            weights.reset()

        await self._on_thread(between_two_steps)
        return [{"rank": 0}]


def _load_model(model_class: Any, options: EngineOptions) -> Any:
    """Loads the options' model onto their device, for inference only. Blocks. Raises InvalidRequest if the model's
    files lack tensors, which transformers would fill with random numbers."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    disable_progress_bar()  # a worker's standard error is its log
    model, report = model_class.from_pretrained(
        options.model,
        dtype="auto" if options.dtype is None else getattr(torch, options.dtype),
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    refuse_lacking(report["missing_keys"], options.task)
    model.to(device).eval().requires_grad_(False)
    if model.device.type == "cpu":
        # Loading maps the file: a trainer that overwrites the file would change the weights, or end the process.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model
