#!/usr/bin/env bash
# Starts a vLLM server that `engine=server` can sample from and give weights to.
#   tools/serve.sh MODEL [--port 8000, --tensor-parallel-size 2, any other option of vLLM]
# MODEL: a Hugging Face folder; or a run or one of its step folders, whose shape and tokenizer are taken, not the weights.
# SERVE_PYTHON names the Python that has vLLM; the default is that of tools/serve_venv.sh (CPU).
# Whoever reaches the port can change the weights: open it to the trainer alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${SERVE_PYTHON:-$root/.venv-serve/bin/python}
model=${1:?usage: tools/serve.sh MODEL_FOLDER [options of vLLM]}
shift
newest=$(ls -d "$model"/checkpoints/step-*/ 2>/dev/null | sort -V | tail -n 1 || true)
if [ ! -f "$model/config.json" ]; then # a step folder keeps config.json and tokenizer in hf/
    model=${newest:-$model}
    model=${model%/}/hf
    set -- --load-format dummy "$@"
fi
if [ ! -f "$model/config.json" ]; then
    echo "error: there is no $model/config.json: name a Hugging Face folder, a run, or a step folder that began from one" >&2
    exit 1
fi
if [ ! -x "$python" ]; then
    echo "error: $python is missing: run tools/serve_venv.sh, or set SERVE_PYTHON to a Python that has vLLM" >&2
    exit 1
fi

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # for megatron_nb.rollout.vllm_worker
export VLLM_SERVER_DEV_MODE=1                      # the routes that pause and take weights
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# the model's own generation_config.json would change how tokens are drawn; log-probs must be those of sampling
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name policy \
    --worker-extension-cls megatron_nb.rollout.vllm_worker.Extension \
    --weight-transfer-config '{"backend": "megatron_nb"}' \
    --logprobs-mode processed_logprobs --generation-config vllm --enable-prefix-caching "$@"
