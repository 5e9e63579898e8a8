#!/bin/sh
# Installs what locks name, and nothing else: install.sh PYTHON LOCK...   (a LOCK is `frontend`, say)
# pip refuses a file whose hash is not in the lock.
set -eu
python=$1
shift
here=$(dirname "$0")

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --require-hashes "$@"
}

# A package without a wheel is built by the locked setuptools, because pip would take an unlocked one.
install -r "$here/build.txt"

files=
for lock; do
    files="$files -r $here/$lock.txt"
done

# As pip does without hashes, this prefers the CPU build of torch where pip's indexes have it.
# shellcheck disable=SC2086
if cat $(echo $files | sed 's/-r //g') | grep -q '^torch=='; then
    if ! install -r "$here/torch-cpu.txt" 2>/dev/null; then
        echo "pip finds no CPU build of torch, so the default build follows. On Linux it brings the CUDA libraries." >&2
        install -r "$here/torch-cuda.txt"
    fi
fi
# shellcheck disable=SC2086
install $files
