"""Writes the locks in this folder: `make lock`, or `make lock UPGRADE=1` for the newest versions that are allowed.

Each lock names the exact version of each package of one install path, and the hashes of its files. A version stays
until it must change, unless an upgrade is asked for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
UV = Path(sys.executable).with_name("uv")
GPU_ENGINES = ("vllm", "sglang")
"""These extras pin a torch of their own, so each is an environment of its own, with the CUDA libraries."""
CUDA = re.compile(r"^((?:nvidia|cuda)-[\w-]+|triton)==", re.MULTILINE)
"""The packages that only the CUDA build of torch needs. They have the lock `torch-cuda`."""


def main(upgrade: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    shared = [name for name in extras if name not in GPU_ENGINES]
    options = ["--upgrade"] if upgrade else []
    with tempfile.TemporaryDirectory() as folder:
        build, torch, excludes, versions = (Path(folder) / name for name in ("build.in", "torch.in", "no", "all"))
        build.write_text("\n".join(project["build-system"]["requires"]))
        torch.write_text(next(line for line in extras["hf"] if line.startswith("torch==")))
        cuda = HERE / "torch-cuda.txt"
        compile_lock(cuda, torch, *options)
        cuda.write_text(only_cuda(cuda.read_text()))
        excludes.write_text("\n".join(CUDA.findall(cuda.read_text())))
        options += ["--excludes", str(excludes), "--constraints", str(HERE / "engines.in")]

        # All that share an environment are solved together first, so that their locks agree.
        versions.write_text(pins(["base", "build", *shared]))
        compile_lock(versions, ROOT / "pyproject.toml", build, *each(shared), *options)
        agreed = [*options[-4:], "--constraints", str(versions)]
        compile_lock(HERE / "base.txt", ROOT / "pyproject.toml", *agreed)
        compile_lock(HERE / "build.txt", build, *agreed)
        for extra in shared:
            compile_lock(HERE / f"{extra}.txt", ROOT / "pyproject.toml", *each([extra]), *agreed)
    options = ["--upgrade"] if upgrade else []
    for extra in GPU_ENGINES:
        compile_lock(HERE / f"{extra}.txt", ROOT / "pyproject.toml", *each([extra]), *options)
    for name in ("engines", "deepspeed", "clients"):
        compile_lock(HERE / f"{name}.txt", HERE / f"{name}.in", "--no-deps")
    compile_lock(HERE / "tools.txt", HERE / "tools.in", *options)


def each(extras: list[str]) -> list[str]:
    return [argument for extra in extras for argument in ("--extra", extra)]


def compile_lock(lock: Path, *arguments: str | Path) -> None:
    """Writes one lock for every platform and every Python that the project supports."""
    command = ["pip", "compile", "--quiet", "--no-config", "--system-certs", "--universal", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--python-version", "3.11"]
    called: list[str | Path] = [UV, *command, "--output-file", lock, *arguments]
    subprocess.run(called, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def pins(names: list[str]) -> str:
    """Returns what existing locks pin: the versions that stay."""
    found: set[str] = set()
    for lock in (HERE / f"{name}.txt" for name in names):
        if lock.exists():
            found.update(re.findall(r"^[\w.-]+==[^\s;\\]+", lock.read_text(), re.MULTILINE))
    return "\n".join(sorted(found))


def only_cuda(text: str) -> str:
    """Returns the entries of torch and of what only its CUDA build needs. The other locks have the rest."""
    entries = re.findall(r"^\S.*\n(?:    .*\n)*", text, re.MULTILINE)
    return "".join(entry for entry in entries if CUDA.match(entry) or entry.startswith("torch=="))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are allowed")
    main(parser.parse_args().upgrade)
