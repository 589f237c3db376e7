#!/usr/bin/env bash
# Builds or completes the virtual environment: make_venv.sh FOLDER EXTRAS [PYTHON [PINS]]. Called by `make env`.
# PINS ("torch==2.11.0 …") take the place of those of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extras=$2 wanted=${3:-} others=${4:-} pins=constraints.txt

fail() { printf 'make env: %s\n' "$*" >&2; exit 1; }

# A name on PATH is not enough: pyenv's stand-ins exist for versions that are not installed.
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if ! recent "$venv/bin/python"; then
    python=
    for candidate in ${wanted:-python3.11 python3.12 python3.13 python3}; do
        if recent "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || fail "no Python 3.11 or newer found (tried: ${wanted:-python3.11 python3.12 python3.13 python3});" \
        "install one, or name it: make env PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
    echo "make env: $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

if [ -n "$others" ]; then
    pins=$(mktemp)
    trap 'rm -f "$pins"' EXIT
    cp constraints.txt "$pins"
    for pin in $others; do sed -i "s/^${pin%%==*}==.*/$pin/" "$pins"; done
fi

start=$SECONDS
echo "make env: installing the pinned versions (about 90 s on a fast connection)"
# Errors only: pip would also warn of every index that lacks a package. Modules are compiled when they are first imported:
# most of the 15,000 that come never are.
pip=("$venv/bin/python" -m pip --quiet --quiet --no-input)
# Our own pip and setuptools first: older ones build packages from source more slowly, or refuse to.
"${pip[@]}" install --no-compile --constraint "$pins" pip setuptools
# Then what the emulated vendor's library is built with, so that it is built while pip installs the rest.
"${pip[@]}" install --no-compile --constraint "$pins" torch numpy ninja
PYTHONPATH=plugins/emulated_vendor "$venv/bin/python" -m hetero_emulated_vendor.build &
build=$!
PIP_BUILD_CONSTRAINT="$pins" "${pip[@]}" install --no-compile --constraint "$pins" --editable ".[$extras]"
wait "$build" || echo "make env: the emulated vendor's library was not built; tests that need it are skipped" >&2
echo "make env: done in $((SECONDS - start)) s"
