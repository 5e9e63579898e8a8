"""`python -m tests.lint`: prints each offence as `file:line: what is wrong`. The exit code is 1 if there is one."""

from __future__ import annotations

import gc
import sys

from tests.lint.house import offences
from tests.lint.locks import unlocked
from tests.lint.patches import too_many_patches
from tests.lint.phrases import too_many_phrases
from tests.lint.private_names import too_many_private_names
from tests.support.paths import ROOT


def main() -> int:
    gc.disable()  # the collector would search the trees of all files again and again
    found = [
        *offences(ROOT),
        *too_many_phrases(ROOT),
        *unlocked(ROOT),
        *too_many_private_names(ROOT),
        *too_many_patches(ROOT),
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
