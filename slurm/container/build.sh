#!/usr/bin/env bash
# Builds the image of Dockerfile, tests it, and writes what enroot and pyxis start: one .sqsh file.
#   slurm/container/build.sh [FILE.sqsh]        IMAGE=name:tag and MAX_JOBS=8 from the environment; an hour, about 40 GB of disk
# Wants docker or podman, for the last part enroot. Compilers take about 4 GB of memory for each of MAX_JOBS.
set -euo pipefail
cd "$(dirname "$0")/../.."
source slurm/container/versions.env

file=${1:-}
image=${IMAGE:-megatron_nb:torch$TORCH-te$TRANSFORMER_ENGINE}
engine=$(command -v docker || command -v podman) || {
    echo "error: neither docker nor podman is here: build on a machine that has one, then copy the .sqsh file" >&2
    exit 1
}
if [ -n "$file" ]; then
    [ -e "$file" ] && { echo "error: $file exists: jobs may be using it; give another name" >&2; exit 1; }
    command -v enroot >/dev/null || { echo "error: $file needs enroot, which is not here" >&2; exit 1; }
fi

arguments=()
for name in BASE_IMAGE TORCH TRANSFORMER_ENGINE FLASH_ATTN APEX; do
    arguments+=(--build-arg "$name=${!name}")
done
"$engine" build --file slurm/container/Dockerfile "${arguments[@]}" --build-arg "MAX_JOBS=${MAX_JOBS:-8}" --tag "$image" .

# with GPUs where this machine has them; without, versions and files only
gpus=()
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null; then
    case $engine in
        *podman) gpus=(--device nvidia.com/gpu=all) ;;
        *) gpus=(--gpus all) ;;
    esac
fi
"$engine" run --rm "${gpus[@]}" --ipc host --volume "$PWD:$PWD:ro" --workdir "$PWD" --env "PYTHONPATH=$PWD:$PWD/kernels" \
    "$image" python /opt/smoke_test.py

if [ -n "$file" ]; then
    case $engine in
        *podman) enroot import --output "$file" "podman://$image" ;;
        *) enroot import --output "$file" "dockerd://$image" ;;
    esac
    echo "$file: name it in slurm/site.yaml, container: {image: $file}"
    echo "on a node: srun --gpus-per-node=8 --container-image=$file python /opt/smoke_test.py"
else
    echo "$image is built; for Slurm: slurm/container/build.sh FILE.sqsh"
fi
