"""verl's own client of SGLang, from its public package and unchanged, in a process that a test commands. For tests.

Its module alone is loaded: the package around it needs ray and a GPU's libraries. It is installed beside the
environment's own packages, since its wheel has a package `tests`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.support.commanded_process import CommandedProcess, serve

if TYPE_CHECKING:
    from tests.conftest import Plane

MODULE = Path(sys.prefix) / "clients" / "verl/workers/rollout/sglang_rollout/http_server_engine.py"
"""The path where `make engines` installs it."""
BUCKETS = 3
PROMPT = [5, 6, 7]
TOKENS = 12


class VerlClient(CommandedProcess):
    """The handle of a process that runs verl's client."""

    def __init__(self, plane: Plane, url: str, model: Path) -> None:
        super().__init__(plane, "tests.support.verl_client", [url, str(model)], imports="sglang")

    async def bring(self, directory: Path) -> None:
        """Updates like verl's rollout after a step: bucket by bucket, then a flush."""
        for number in range(BUCKETS):
            await self.bucket(directory, number)
        await self.do("flush")

    async def bucket(self, directory: Path, number: int) -> None:
        await self.do("bucket", [str(directory), number])


def _adapter_of(url: str, model: str) -> Any:
    server = types.ModuleType("sglang.srt.entrypoints.http_server")  # no server is launched
    server.launch_server = None  # type: ignore[attr-defined]
    sys.modules[server.__name__] = server
    spec = importlib.util.spec_from_file_location("verl_http_server_engine", MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    where = urlsplit(url)
    # It was written for a SGLang whose base class had two methods fewer; nothing here calls them.
    module.AsyncHttpServerAdapter.__abstractmethods__ = frozenset()
    return module.AsyncHttpServerAdapter(
        launch_server=False, model_path=model, host=where.hostname, port=where.port, device="cpu"
    )


class _Served:
    """Carries out the commands that arrive as lines."""

    def __init__(self, url: str, model: str) -> None:
        self._client = _adapter_of(url, model)

    async def bucket(self, argument: list[Any]) -> None:
        from safetensors.torch import load_file, save
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        directory, number = argument
        tensors = load_file(Path(directory) / "model.safetensors")
        bucket = {name: tensors[name] for name in sorted(tensors)[number::BUCKETS]}
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[save(bucket)], load_format="safetensors", flush_cache=False
        )
        assert (await self._client.update_weights_from_tensor(request))["success"] is True

    async def flush(self, argument: None) -> None:
        assert await self._client.flush_cache(), "it gave up"

    async def pickled(self, argument: None) -> None:
        """Sends a pickle of something else than tensors."""
        import pickle

        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[pickle.dumps([("w", 1)])])
        await self._client.update_weights_from_tensor(request)

    async def shared(self, argument: str) -> None:
        """Sends all tensors as verl does by default: in SGLang's own serialization, from memory that it shares."""
        import torch.multiprocessing
        from safetensors.torch import load_file
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        torch.multiprocessing.set_sharing_strategy("file_system")
        tensors = load_file(Path(argument) / "model.safetensors")
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(list(tensors.items()))],
            flush_cache=False,
        )
        assert (await self._client.update_weights_from_tensor(request))["success"] is True

    async def generate(self, argument: None) -> list[int]:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0}
        reply = await self._client.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
        return [token for _, token, *_ in reply["meta_info"]["output_token_logprobs"]]

    async def adapt(self, argument: str) -> list[str]:
        """An adapter, loaded twice as after two steps; the models then."""
        from safetensors.torch import load_file, save
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

        directory = Path(argument)
        config = json.loads((directory / "adapter_config.json").read_text())
        data = save(load_file(directory / "adapter_model.safetensors"))
        for _ in range(2):
            if "verl" in await self._models():
                await self._client.unload_lora_adapter("verl")
            request = LoadLoRAAdapterFromTensorsReqInput(
                lora_name="verl", config_dict=config, serialized_named_tensors=[data]
            )
            await self._client.load_lora_adapter_from_tensor(request)
        return await self._models()

    async def abort(self, argument: None) -> None:
        await self._client.abort_request(abort_all=True)

    async def _models(self) -> list[str]:
        return [model["id"] for model in (await self._client.available_models())["data"]]


def _serve() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # the answers' own pipe
        served = _Served(*json.loads(sys.argv[1]))
    with asyncio.Runner() as loop:

        def do(what: str, argument: Any) -> Any:
            with contextlib.redirect_stdout(sys.stderr):
                return loop.run(getattr(served, what)(argument))

        serve(do)


if __name__ == "__main__":
    _serve()
