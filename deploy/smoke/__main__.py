"""Runs one smoke profile on a fleet: exit code 0, or 1 with the reason. It may run again on the same fleet."""

from __future__ import annotations

import argparse
import http.client
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from deploy.smoke import lora_file, sft_file, sft_group, tito_multiturn
from deploy.smoke.checks import Measured, SmokeFailed
from deploy.smoke.fleet import Fleet
from deploy.smoke.scene import Scene
from deploy.smoke.updates import Kill, Updates
from rl_plane._util.own_address import own_address
from rl_plane.errors import PlaneError

TOTAL_S = 300.0
"""The bound of a run. Most of it is the import of torch by each process, on as few as two cores."""
KILL_TOTAL_S = 600.0
"""The bound of a run with a kill: it also waits for the kill, and for one more start of a worker."""

KEYS = ("RL_PLANE_ADMIN_KEY", "RL_PLANE_API_KEY")

PROFILES: dict[str, Callable[[Scene], Measured]] = {
    "sft-file": sft_file.run,
    "sft-file-2w": sft_file.run,
    "lora-file": lora_file.run,
    "tito-multiturn": tito_multiturn.run,
    "sft-group": sft_group.run,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deploy.smoke", description=__doc__)
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("--workers", type=int, default=2, help="how many the fleet must have [%(default)s]")
    parser.add_argument("--rl-url", default="http://frontend:8002", help="[%(default)s]")
    parser.add_argument("--http-url", default="http://frontend:8000", help="[%(default)s]")
    parser.add_argument(
        "--weights", type=Path, default=Path("/weights"), help="below the workers' weight roots [%(default)s]"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"smoke: {time.monotonic() - start:6.1f} s  {what}", flush=True)

    wants_kill = os.environ.get("RL_PLANE_SMOKE_KILL", "") not in ("", "0")
    give_up = start + (KILL_TOTAL_S if wants_kill else TOTAL_S)
    admin_key, api_key = (os.environ.get(name, "") for name in KEYS)
    if not admin_key or not api_key:
        parser.error(f"set {' and '.join(KEYS)} to the keys of the frontend")
    fleet = Fleet(args.rl_url, args.http_url, admin_key, api_key, args.workers, give_up)
    kill = Kill(fleet, say, wants_kill)
    try:
        fleet.wait_members()
        rl = urlsplit(args.rl_url)
        folder = args.weights / f"{args.profile}-{secrets.token_hex(4)}"
        folder.mkdir()
        scene = Scene(
            args.profile,
            fleet,
            kill,
            Updates(fleet, kill, say),
            folder,
            say,
            backend=os.environ.get("RL_PLANE_SMOKE_BACKEND") or "gloo",
            host=own_address(str(rl.hostname), rl.port or 80),
        )
        say(PROFILES[args.profile](scene).check())
        if kill.pending:
            raise SmokeFailed("no update waited for the kill of a worker")
    except (SmokeFailed, PlaneError, OSError, http.client.HTTPException) as error:
        print(f"smoke: FAILED: {error or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    print("smoke: passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
