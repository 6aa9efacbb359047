#!/usr/bin/env bash
# `vllm` of the environment whose Python SERVE_PYTHON names, as tools/serve.sh takes it; without that, the one on PATH.
#   tools/vllm.sh serve MODEL_FOLDER [options of vLLM]
set -euo pipefail
if [ -n "${SERVE_PYTHON:-}" ]; then
    PATH=$(dirname "$SERVE_PYTHON"):$PATH # a virtual environment keeps `vllm` beside its python
fi
command -v vllm >/dev/null || {
    echo "error: there is no vllm on PATH: set SERVE_PYTHON to a Python that has vLLM (environment of the site file)" >&2
    exit 1
}
exec vllm "$@"
