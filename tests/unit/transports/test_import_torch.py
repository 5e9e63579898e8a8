"""torch is imported into a process that answers the fleet at the same time."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.support.started_command import READY_S

CODE = "from rl_plane.transports.group.torch_group import import_torch; import_torch()"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
async def test_the_libraries_are_read_before_the_import_that_holds_the_interpreter(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(imported)!r}, 'w').close()")
    (tmp_path / "torch" / "distributed.py").touch()
    library = tmp_path / "torch" / "lib" / "libtorch.so"
    os.mkfifo(library)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    )
    try:
        # The pipe opens once the process reads the library.
        written = await asyncio.wait_for(asyncio.to_thread(os.open, library, os.O_WRONLY), READY_S)
        assert not imported.exists()
        os.close(written)
        assert await asyncio.wait_for(process.wait(), READY_S) == 0
        assert imported.exists()
    finally:
        os.close(os.open(library, os.O_RDONLY | os.O_NONBLOCK))  # ends a wait for a reader that did not come
        if process.returncode is None:
            process.kill()
            await process.wait()
