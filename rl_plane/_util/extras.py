"""Errors of a missing Python module, which name the extra of rl-plane to install."""

from __future__ import annotations

from rl_plane.errors import PlaneError

EXTRA_OF_MODULE = {
    "blake3": "worker",
    "xxhash": "worker",
    "yaml": "worker",
    "torch": "hf",
    "transformers": "hf",
    "tokenizers": "hf",
    "safetensors": "hf",
    "numpy": "hf",
    "psutil": "worker",
    "jinja2": "hf",
    "peft": "hf",
    "numba": "publish",
    "nixl": "nixl",
    "prometheus_client": "metrics",
    "opentelemetry": "otel",
    "starlette": "frontend",
    "uvicorn": "frontend",
    "orjson": "frontend",
    "ijson": "frontend",
    "matplotlib": "demo",
    "click": "cli",
    "rich": "cli",
    "nkeys": "keys",
    "nacl": "keys",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""A third party's module → the extra that installs it."""

OURS = ("rl_plane", "worker", "frontend")


def missing_module(error: ModuleNotFoundError, extra: str = "") -> PlaneError:
    """The error in one line. `extra`: the extra that brings all that the caller needs; empty: the module's own."""
    top = (error.name or "").partition(".")[0]
    if top in OURS:
        return PlaneError(f"this installation lacks {error.name}", fix="install rl-plane again, of one version")
    extra = extra or EXTRA_OF_MODULE.get(top, "")
    fix = f"pip install 'rl-plane[{extra}]'" if extra else f"pip install {top}"
    return PlaneError(f"the Python module {top} is not installed", fix=fix)


def import_error(error: ModuleNotFoundError, needs: str, extra: str) -> ModuleNotFoundError:
    """The error that `import` raises in place of `error`: one line that names the extra.

    Args:
        needs: What needs the extra, such as `rl_plane.publish`.
        extra: The extra's name.
    """
    found = missing_module(error, extra)
    return ModuleNotFoundError(f"{needs}: {found.message}; fix: {found.facts['fix']}", name=error.name)
