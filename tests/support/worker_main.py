"""A worker as tests start it: `python -m tests.support.worker_main OPTIONS PATCH`. It prints its instance ids when it
is ready.

OPTIONS: those of WorkerOptions, as JSON. PATCH: code of the test's own, which runs before the worker does.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from tests.support import phase_hooks
from worker.nodes.node_settings import NodeSettings
from worker.process import run
from worker.worker_options import WorkerOptions

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[1])
    options["model"] = Path(options["model"])
    options["weight_roots"] = tuple(map(Path, options["weight_roots"]))
    if "nodes" in options:
        options["nodes"] = NodeSettings(**options["nodes"])
    options["weight_urls"] = tuple(options.get("weight_urls", ()))
    phase_hooks.install()
    exec(sys.argv[2])
    sys.exit(run(WorkerOptions(**options), lambda ids: print(*ids, flush=True)))
