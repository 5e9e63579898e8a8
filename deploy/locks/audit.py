"""Asks PyPI's advisories about each version in the locks: `make audit`. The exit code is 1 if one is vulnerable.

Where the advisories cannot be reached, one line says so and the exit code is 0. A package index may answer without
having advisories. So each run also asks about a version that is known to be vulnerable, and trusts no answer that
does not name it.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PIP_AUDIT = Path(sys.executable).with_name("pip-audit")
KNOWN = ("requests", "2.20.0")
"""This version has advisories since 2023."""
REQUEST_TIMEOUT_S = 10
TIMEOUT_S = 300.0
"""Some 400 versions are asked for one by one, in a second or less each where the advisories can be reached."""

Report = list[dict[str, Any]]


def main(locks: Path = HERE, pip_audit: Path = PIP_AUDIT, timeout_s: float = TIMEOUT_S) -> int:
    asked = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    try:
        deadline = time.monotonic() + timeout_s
        control = ask(pip_audit, [KNOWN], deadline)
        if not vulnerable(control):
            raise ValueError(f"there are no advisories of {'=='.join(KNOWN)}, which has some")
        reports = [ask(pip_audit, batch, deadline) for batch in batches(locks)]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = f"no answer within {timeout_s:g} s" if isinstance(error, subprocess.TimeoutExpired) else error
        print(f"audit: not done, because PyPI's advisories cannot be reached from here at {asked}: {reason}")
        return 0
    answered = [each for report in reports for each in report]
    unknown = [each["name"] for each in answered if "skip_reason" in each]
    found = [line for report in reports for line in vulnerable(report)]
    for line in found:
        print(line)
    skipped = f"; without data: {', '.join(unknown)}" if unknown else ""
    print(f"audit: {len(answered)} versions, {len(found)} advisories; PyPI's data of {asked}{skipped}")
    return 1 if found else 0


def batches(locks: Path) -> list[list[tuple[str, str]]]:
    """Returns the pins of all locks in lists that name each package once, because pip-audit takes no other list."""
    versions: dict[str, list[str]] = {}
    for lock in sorted(locks.glob("*.txt")):
        for name, version in re.findall(r"^([\w.-]+)==([^\s;\\+]+)", lock.read_text(), re.MULTILINE):
            known = versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), [])
            if version not in known:
                known.append(version)
    rounds = max((len(each) for each in versions.values()), default=0)
    return [
        [(name, each[index]) for name, each in sorted(versions.items()) if index < len(each)]
        for index in range(rounds)
    ]


def ask(pip_audit: Path, pins: list[tuple[str, str]], deadline: float) -> Report:
    """Returns what the advisories say of each pin. Raises where pip-audit has no report."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in pins))
        file.flush()
        command = [str(pip_audit), "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        command += ["--progress-spinner", "off", "--timeout", str(REQUEST_TIMEOUT_S)]
        left_s = max(0.0, deadline - time.monotonic())
        ran = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
    if not ran.stdout.strip():
        lines = ran.stderr.strip().splitlines() or [f"pip-audit ended with {ran.returncode}"]
        raise ValueError(lines[-1][:200])
    report: Report = json.loads(ran.stdout)["dependencies"]
    return report


def vulnerable(report: Report) -> list[str]:
    return [
        f"{each['name']} {each['version']}: {', '.join([bug['id'], *bug.get('aliases', [])])},"
        f" mended in {', '.join(bug.get('fix_versions', [])) or 'no version'}"
        for each in report
        for bug in each.get("vulns", [])
    ]


if __name__ == "__main__":
    sys.exit(main())
