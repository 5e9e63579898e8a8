"""TRL's own client, in a process of its own: it scores sequences at one worker after the other.

Standard input is JSON: `url`, `instance_ids`, `sequences` and `prompts` (their lengths). The last line of the output is
JSON: what `get_sequence_logprobs` returns, for each worker.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trl.generation.vllm_client import VLLMClient


def scored(url: str, instance_ids: list[str], sequences: list[list[int]], prompts: list[int]) -> dict[str, Any]:
    class Pinned(VLLMClient):  # type: ignore[misc]
        """Each request names a worker, and is TRL's otherwise."""

        instance_id = ""

        def _post(self, url: str, **more: Any) -> Any:
            return super()._post(url, json={**more["json"], "nvext": {"instance_id": self.instance_id}})

    client, found = Pinned(url), {}
    for client.instance_id in instance_ids:
        found[client.instance_id] = client.get_sequence_logprobs(sequences, prompts)
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(scored(**json.load(sys.stdin))))
