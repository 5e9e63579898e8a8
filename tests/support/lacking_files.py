"""Makes a model directory whose files lack tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def without(names: set[str], model: Path, path: Path, **config: Any) -> Path:
    """Writes a copy of `model`, which has one file, to `path`, without the tensors `names`. Returns `path`. `config`:
    fields of its config that differ."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, path)
    file, described = path / "model.safetensors", path / "config.json"
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(kept, file, {"format": "pt"})
    described.write_text(json.dumps(json.loads(described.read_text()) | config))
    return path
