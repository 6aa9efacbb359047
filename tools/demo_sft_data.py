"""Builds the data of demo_sft from the package bfcl-eval: tool calls and multi-turn tool use, split into train and held-out.

    python tools/demo_sft_data.py --out runs/demo-sft-data

Writes tools.{train,heldout}.jsonl (a question, tools, the first accepted calls) and agent.{train,heldout}.jsonl
(several questions, each solved by calls whose results come from running them against the package's own simulated
services). The split is a hash of the published id, so what evaluation uses never gets into training. Same files every time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nb.data.split import held_out

CALLS = ("simple_python", "multiple", "parallel", "parallel_multiple")
CALLS += ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tools", type=int, default=6, help="tools offered in a row, or as many as it needs (default 6)")
    arguments = parser.parse_args()
    for name, counts in build(arguments.out, arguments.tools).items():
        print(f"{name}: {counts['train']} train, {counts['heldout']} held out")


def build(out: Path, tools: int = 6) -> dict[str, dict[str, int]]:
    """Writes the files; rows by source and part."""
    out.mkdir(parents=True, exist_ok=True)
    data = package_data()
    counts = {}
    for name, rows in {"tools": tool_calls(data, tools), "agent": agent(data, tools)}.items():
        parts: dict[str, list[str]] = {"train": [], "heldout": []}
        for row in rows:
            parts["heldout" if held_out(row["id"]) else "train"].append(json.dumps(row, ensure_ascii=False))
        for part, lines in parts.items():
            temporary = out / f"{name}.{part}.jsonl.new"
            temporary.write_text("\n".join(lines) + "\n")
            temporary.rename(out / f"{name}.{part}.jsonl")
        counts[name] = {part: len(lines) for part, lines in parts.items()}
    return counts


def package_data() -> Path:
    """The data folder of bfcl-eval, found without importing it (its imports want more packages than its data)."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None:
        raise SystemExit("package bfcl-eval is missing: the data of demo_sft come from it; pip install --no-deps bfcl-eval")
    return Path(found.submodule_search_locations[0]) / "data"


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def tool_calls(data: Path, limit: int) -> Iterator[dict[str, Any]]:
    """One question, the tools, and the first accepted answer."""
    for category in CALLS:
        answers = {row["id"]: row["ground_truth"] for row in _rows(data / "possible_answer" / f"BFCL_v4_{category}.json")}
        for row in _rows(data / f"BFCL_v4_{category}.json"):
            calls = [(name, accepted(values)) for call in answers[row["id"]] for name, values in call.items()]
            messages = [message for turn in row["question"] for message in turn]
            messages.append({"role": "assistant", "content": "", "tool_calls": [_call(*call) for call in calls]})
            offered = choose_tools(row["function"], {name for name, _ in calls}, limit)
            yield {"id": row["id"], "messages": messages, "tools": offered}


def accepted(values: dict[str, list[Any]]) -> dict[str, Any]:
    """The first accepted value of each argument; one for which "" (leave it out) comes first is left out."""
    first = {name: options[0] if isinstance(options, list) and options else options for name, options in values.items()}
    return {name: _inner(value) for name, value in first.items() if value != ""}


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return accepted(value)
    if isinstance(value, list):
        return [_inner(item) for item in value]
    return value


def agent(data: Path, limit: int) -> Iterator[dict[str, Any]]:
    """Several questions in one conversation; every call is run, one after the other, and its result shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as DOCS
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call as execute

    services = f"demo_sft_{uuid.uuid4().hex}"  # the package keeps services by this name for the life of the process
    answers = {row["id"]: row["ground_truth"] for row in _rows(data / "possible_answer" / "BFCL_v4_multi_turn_base.json")}
    for row in _rows(data / "BFCL_v4_multi_turn_base.json"):
        docs = [doc for name in row["involved_classes"] for doc in _rows(data / "multi_turn_func_doc" / DOCS[name])]
        parameters = {doc["name"]: list(doc["parameters"]["properties"]) for doc in docs}
        messages: list[dict[str, Any]] = []
        for question, calls in zip(row["question"], answers[row["id"]], strict=True):
            messages += question
            results, _ = execute(calls, row["initial_config"], row["involved_classes"], services, row["id"])
            for call, result in zip(calls, results, strict=True):
                messages.append({"role": "assistant", "content": "", "tool_calls": [_call(*parse_call(call, parameters))]})
                messages.append({"role": "tool", "content": result})
        used = {call["function"]["name"] for message in messages for call in message.get("tool_calls", [])}
        yield {"id": row["id"], "messages": messages, "tools": choose_tools(docs, used, limit)}


def parse_call(text: str, parameters: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call written as python, positional arguments named by the function's parameters."""
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), f"not a call: {text}"
    values = [ast.literal_eval(value) for value in call.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return call.func.id, dict(zip(parameters[call.func.id], values)) | named


def choose_tools(tools: list[dict[str, Any]], needed: set[str], limit: int) -> list[dict[str, Any]]:
    """At most `limit` tools (more only if more are needed) in their published order, the needed ones among them."""
    others = [tool["name"] for tool in tools if tool["name"] not in needed]
    names = needed | set(others[: max(limit - len(needed), 0)])
    return [{key: tool[key] for key in ("name", "description", "parameters")} for tool in tools if tool["name"] in names]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


if __name__ == "__main__":
    main()
