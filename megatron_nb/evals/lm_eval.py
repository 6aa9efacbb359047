"""The bridge to lm-evaluation-harness, for every task that is not here: its command over an endpoint, its results among ours.

    python -m megatron_nb.evals.lm_eval --url http://host:8000 --model NAME --tasks mmlu,hellaswag --run RUN [--run-it]
    python -m megatron_nb.evals.lm_eval --run RUN --read RUN/lm_eval/.../results_*.json

The package (`pip install "lm-eval[api]"`, the extra `lm_eval`) lives in any environment: it talks to the served model over
HTTP. With likelihoods (multiple choice as the leaderboards do it) it needs the model's tokenizer: --tokenizer FOLDER.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from megatron_nb.run import write_atomic

ERROR = "_stderr"


def command(
    url: str, model: str, tasks: list[str], out: Path, tokenizer: str | None = None, concurrency: int = 32,
    limit: int | None = None,
) -> list[str]:  # fmt: skip
    """What runs lm-evaluation-harness. tokenizer: score likelihoods of texts; None: chat, for tasks that generate alone."""
    kind, path = ("local-completions", "/v1/completions") if tokenizer else ("local-chat-completions", "/v1/chat/completions")
    settings = {"base_url": url.rstrip("/") + path, "model": model, "num_concurrent": concurrency, "max_retries": 5}
    settings |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"} if tokenizer else {}
    told = ",".join(f"{key}={value}" for key, value in settings.items())
    words = ["lm_eval", "--model", kind, "--model_args", told, "--tasks", ",".join(tasks), "--output_path", str(out),
             "--log_samples"]  # fmt: skip
    words += [] if tokenizer else ["--apply_chat_template"]
    return words + (["--limit", str(limit)] if limit else [])


def read_results(path: Path) -> dict[str, dict[str, float]]:
    """{task: {metric: value, metric_low, metric_high}} of its results file; ValueError for another file.

    Its metrics are named METRIC,FILTER with METRIC_stderr,FILTER beside them; bounds are 1.96 of these.
    """
    try:
        rows = json.loads(path.read_text())["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no results file of lm-evaluation-harness ({error!r}): give its results_*.json") from error
    return {f"lm_eval_{name}": _metrics(row) for name, row in rows.items()}


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    told: dict[str, float] = {}
    for key, value in row.items():
        name, _, how = key.partition(",")
        if name.endswith(ERROR) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        short = name if how in ("none", "") else f"{name}_{how}"
        told[short] = float(value)
        error = row.get(f"{name}{ERROR},{how}")
        if isinstance(error, (int, float)):
            told |= {f"{short}_low": value - 1.96 * error, f"{short}_high": value + 1.96 * error}
    return told


def add(run: Path, results: dict[str, dict[str, float]]) -> None:
    """Put them into RUN/results.json, beside what is there."""
    file = run / "results.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(before | results, indent=2) + "\n")


def main(words: list[str] | None = None) -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder whose results.json takes the figures")
    parser.add_argument("--url", help="of the OpenAI-compatible server, without /v1")
    parser.add_argument("--model", help="its name on the server")
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="names that lm_eval knows")
    parser.add_argument("--tokenizer", help="folder; for tasks scored by likelihood")
    parser.add_argument("--limit", type=int, help="items per task")
    parser.add_argument("--run-it", action="store_true", help="run the command here instead of printing it")
    parser.add_argument("--read", type=Path, help="a results_*.json to take in")
    given = parser.parse_args(words)
    if given.read:
        return add(given.run, read_results(given.read))
    if not (given.url and given.model and given.tasks):
        parser.error("--url, --model and --tasks say what is evaluated; or --read FILE")
    out = given.run / "lm_eval"
    line = command(given.url, given.model, given.tasks, out, given.tokenizer, limit=given.limit)
    if not given.run_it:
        print(shlex.join(line))
        return None
    subprocess.run(line, check=True)
    for file in sorted(out.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)[-1:]:
        add(given.run, read_results(file))
    return None


if __name__ == "__main__":
    main()
