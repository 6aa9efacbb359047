"""Time and weigh every kernel beside its peers: python kernels/bench.py [--out FOLDER] [--short] [--threads N].

On a GPU: TFLOP/s or GB/s against this run's own matrix-product and copy ceilings, beside torch and Liger (bench_gpu.py).
Without one: peak memory and time of whole losses beside whole logits, Liger's chunks and torch's own, and what the Triton path
would allocate (bench_cpu.py). Liger is optional (pip install --no-deps liger-kernel); where absent its rows say so.
Writes bench-cpu.md and .json, or bench-gpu.*, with hardware and versions, into --out (default runs/bench-kernels).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def versions():
    """Hardware and versions that a number must be read with."""
    import torch

    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "liger-kernel"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    else:
        model = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        found |= {"cpu": f"{model[0] if model else platform.machine()}, {os.cpu_count()} cores"}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "bench-kernels")
    parser.add_argument("--short", action="store_true", help="fewer sizes (GPU), one repeat (CPU)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU part")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    import torch

    found = versions()
    if torch.cuda.is_available():
        import bench_gpu

        kind, results = "gpu", bench_gpu.run(arguments.short)
        text = bench_gpu.markdown(results)
    else:
        import bench_cpu

        kind, results = "cpu", bench_cpu.run(arguments.threads, 1 if arguments.short else 3)
        text = bench_cpu.markdown(results)
        found["threads"] = arguments.threads
    text = ", ".join(f"{k} {v}" for k, v in found.items()) + "\n" + text
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"bench-{kind}.md").write_text(text + "\n")
    (arguments.out / f"bench-{kind}.json").write_text(json.dumps({"versions": found, "results": results}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
