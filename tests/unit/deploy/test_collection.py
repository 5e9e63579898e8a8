"""The tests of a clone without the engines' packages, which `make test-fast` runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

COLLECT_S = 120.0
"""Half a minute on an idle machine: all test modules are imported."""

COLLECT = """
import sys
from tests.support.hidden_packages import hide_all_but
hide_all_but("build", "demo", "dev")
import pytest
sys.exit(pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
@pytest.mark.parallel
def test_every_test_module_is_collected_without_the_packages_of_the_engines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, timeout=COLLECT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
