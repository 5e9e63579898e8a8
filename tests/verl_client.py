"""verl's own client of SGLang, from its public package and unchanged, told to bring versions to a fleet. For tests.

Its module alone is loaded: the package around it needs ray and a GPU's libraries. It is installed beside the
environment's own packages, since its wheel has a package `tests`, too. Run as
`python -m tests.verl_client URL MODEL ADAPTER WEIGHTS…`; it prints what came of each step, as lines of JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_plane.process import die_with_parent

ENDS_S = 240.0
"""It imports SGLang, on two cores, among other tests."""
MODULE = Path(sys.prefix) / "clients" / "verl/workers/rollout/sglang_rollout/http_server_engine.py"
"""Where `make engines` puts it."""
BUCKETS = 3
PROMPT = [5, 6, 7]
TOKENS = 12


async def told(url: str, model: Path, adapter: Path, weights: Sequence[Path]) -> list[Any]:
    """What it prints, in a process of its own: an error, the tokens after each version, the models."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        url,
        *(str(path) for path in (model, adapter, *weights)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        preexec_fn=die_with_parent(),
    )
    try:
        async with asyncio.timeout(ENDS_S):
            printed, _ = await client.communicate()
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert client.returncode == 0
    return [json.loads(line) for line in printed.decode().splitlines() if line.startswith(("[", '"'))]


def adapter_of(url: str, model: str) -> Any:
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


async def bring(adapter: Any, directory: Path) -> None:
    """As verl's rollout does after a step: bucket by bucket, then a flush."""
    from safetensors.torch import load_file, save
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    for start in range(BUCKETS):
        bucket = {name: tensors[name] for name in names[start::BUCKETS]}
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[save(bucket)], load_format="safetensors", flush_cache=False
        )
        assert (await adapter.update_weights_from_tensor(request))["success"] is True
    await adapter.flush_cache()


async def refused(adapter: Any) -> str:
    """What it sends without being told otherwise."""
    import pickle

    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[pickle.dumps([("w", 1)])])
    try:
        await adapter.update_weights_from_tensor(request)
    except Exception as error:
        return str(error)
    return ""


async def adapt(adapter: Any, directory: Path) -> list[str]:
    """An adapter, loaded twice as after two steps."""
    from safetensors.torch import load_file, save
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

    config = json.loads((directory / "adapter_config.json").read_text())
    data = save(load_file(directory / "adapter_model.safetensors"))
    for _ in range(2):
        names = [model["id"] for model in (await adapter.available_models())["data"]]
        if "verl" in names:
            await adapter.unload_lora_adapter("verl")
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name="verl", config_dict=config, serialized_named_tensors=[data]
        )
        await adapter.load_lora_adapter_from_tensor(request)
    return [model["id"] for model in (await adapter.available_models())["data"]]


async def main(url: str, model: str, lora: str, *weights: str) -> None:
    adapter = adapter_of(url, model)
    sampling = {"max_new_tokens": TOKENS, "temperature": 0}
    print(json.dumps(await refused(adapter)), flush=True)
    for directory in weights:
        await bring(adapter, Path(directory))
        reply = await adapter.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
        print(json.dumps([token for _, token, *_ in reply["meta_info"]["output_token_logprobs"]]), flush=True)
    print(json.dumps(await adapt(adapter, Path(lora))), flush=True)
    await adapter.abort_request(abort_all=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
