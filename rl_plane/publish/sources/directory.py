"""The weights of a directory, without torch."""

from __future__ import annotations

from pathlib import Path

from rl_plane.publish.sources.base import Taken
from rl_plane.weights.checkpoint import is_adapter, open_checkpoint


class DirectorySource:
    """A safetensors checkpoint (a file, or a directory with `model.safetensors` or an index), or a PEFT directory."""

    collective = False

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self.adapter = is_adapter(self._path)

    def take(self) -> Taken:
        checkpoint = open_checkpoint(self._path, field="path", kind="lora" if self.adapter else "base")
        return Taken(list(checkpoint.specs.items()), checkpoint.tensors(), checkpoint.config, checkpoint.close)
