"""Stands in for torchvision where there is no build of it that fits: a CPU build of torch, from the public index.

SGLang and transformers import names from torchvision when they load, for models with images. Here every submodule
exists and every name resolves; what is called raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    RGB = 3


_READ_AT_IMPORT = {"InterpolationMode": InterpolationMode, "ImageReadMode": ImageReadMode}


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _READ_AT_IMPORT:
            return _READ_AT_IMPORT[name]

        def refuse(*args: Any, **options: Any) -> NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} is not available: this is a stub of torchvision")

        return type(name, (), {"__init__": refuse}) if name[:1].isupper() else refuse


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _Submodules())
from . import io, transforms  # noqa: E402, F401
