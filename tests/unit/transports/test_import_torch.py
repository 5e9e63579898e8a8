"""torch is imported into a process that answers the fleet at the same time."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rl_plane.transports.torch_calls import TORCH_LIBRARY
from tests.support.started_command import READY_S

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

AT_ONCE = """
import sys, threading, time
from rl_plane.transports.torch_calls import import_torch
threading.Thread(target=__import__, args=("torch",)).start()
while "torch" not in sys.modules:
    time.sleep(0.001)
import_torch()
"""
CODE = """
import threading
from rl_plane.transports.torch_calls import import_torch
threading.Thread(target=import_torch).start()
print(input(), flush=True)
"""


async def test_two_threads_may_import_it_at_once() -> None:
    """A worker imports nixl, which imports torch, while its trainer forms a group."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", AT_ONCE)
    try:
        assert await asyncio.wait_for(process.wait(), READY_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
async def test_the_process_works_while_it_loads_the_largest_library(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(imported)!r}, 'w').close()")
    (tmp_path / "torch" / "distributed.py").touch()
    library = tmp_path / "torch" / "lib" / TORCH_LIBRARY
    os.mkfifo(library)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CODE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # The pipe opens once the process loads the library, which then waits for its first byte.
        written = await asyncio.wait_for(asyncio.to_thread(os.open, library, os.O_WRONLY), READY_S)
        process.stdin.write(b"there?\n")
        assert await asyncio.wait_for(process.stdout.readline(), READY_S) == b"there?\n"
        assert not imported.exists()
        os.close(written)
        assert await asyncio.wait_for(process.wait(), READY_S) == 0
        assert imported.exists()
    finally:
        os.close(os.open(library, os.O_RDONLY | os.O_NONBLOCK))  # ends a wait for a reader that did not come
        if process.returncode is None:
            process.kill()
            await process.wait()
