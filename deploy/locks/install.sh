#!/bin/sh
# Installs what locks name, and nothing else: install.sh PYTHON LOCK...   (a LOCK is `frontend`, say)
# pip refuses a file whose hash is not in the lock.
set -eu
python=$1
shift
here=$(dirname "$0")

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes "$@"
}

files=
for lock; do
    files="$files -r $here/$lock.txt"
done
# shellcheck disable=SC2086
install $files

# A torch that is not a CPU build needs the CUDA libraries, which are a lock of their own.
"$python" - <<'PYTHON' || install -r "$here/torch-cuda.txt"
import importlib.metadata
import sys

found = [each.version for each in importlib.metadata.distributions(name="torch")]
sys.exit(any("+cpu" not in version for version in found))
PYTHON
