"""Prompts of preference evaluations, and the baseline's answers to them, in the forms that are around.

    prompts    {"uid", "prompt", "category"}                                Arena-Hard 2.0
               {"question_id", "turns": [{"content"} or text], "cluster"}   Arena-Hard 0.1, MT-Bench: each turn is answered
               {"id", "messages": [...]} or "prompt"                        the last turn is answered
               {"prompt", "chosen", "rejected"}                             a preference pair: `chosen` is the baseline's answer
    answers    {"uid", "model", "messages": [..., {"content": {"answer"} or text}]}
               {"question_id", "choices": [{"turns": [{"content"} or text]}]}
               {"item", "answer", "messages"}                               another evaluation's outcomes/TASK.jsonl
               {"id", "answer": text or a list of texts}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_nb.data import formats, preferences
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.evals.task import Item

IDS = ("uid", "question_id", "id", "item")
CATEGORIES = ("adversarial", "category", "subcategory", "cluster")  # a row is counted under each that it has
REMEDY = "mend the row or leave it out"


def read_items(path: str, baseline: dict[str, list[str]]) -> Iterator[Item]:
    """Prompts with the baseline's answers, one for each turn; gold: {"turns", "baseline", "categories"}. Raises BadRow."""
    for file in data_files(path):
        for number, (where, raw) in enumerate(raw_rows(file)):
            row = decode(where, raw)
            name = _name(row) or f"{file.name}:{number}"
            before, turns, chosen = _asked(where, row)
            answers = baseline.get(name) or _texts(row.get("baseline")) or chosen
            if len(answers) != len(turns):
                raise BadRow.at(where, f"{len(turns)} turns and {len(answers)} baseline answers for {name!r}",
                                "each turn needs one", "add them to `baseline`, or as \"baseline\" to the row")  # fmt: skip
            categories = [str(row[key]) for key in CATEGORIES if row.get(key)]
            asked = [*before, {"role": "user", "content": turns[0]}]
            yield Item(name, asked, {"turns": turns, "baseline": answers, "categories": categories})


def read_answers(path: str) -> dict[str, list[str]]:
    """Item -> the answers to its turns, without thinking; the first attempt where there are several. Raises BadRow."""
    found: dict[str, list[str]] = {}
    for file in data_files(path):
        for where, raw in raw_rows(file):
            row = decode(where, raw)
            if row.get("status") == "invalid":  # an outcome for trouble outside: its empty answer is none
                continue
            name = _name(row)
            if name is None:
                raise BadRow.at(where, f"no id among {', '.join(row)}", f"an answer has one of {', '.join(IDS)}", REMEDY)
            answers = _answered(row)
            if not answers:
                raise BadRow.at(where, "no answer", "it stands in messages, choices or answer", REMEDY)
            found.setdefault(name, answers)
    return found


def _name(row: dict[str, Any]) -> str | None:
    return next((str(row[key]) for key in IDS if row.get(key) is not None), None)


def _asked(where: str, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """(messages before, the user's turns, the answers that the row itself brings)."""
    if turns := row.get("turns"):
        return [], _texts(turns), []
    if row.get("chosen") is not None:
        pair = preferences.parse(row, where, "")
        *before, last = pair.conversation.messages
        return before, [last["content"]], [pair.chosen]
    if isinstance(row.get("prompt"), str):
        return [], [row["prompt"]], []
    given = row.get("messages") or row.get("prompt")
    if not given:
        raise BadRow.at(where, f"found {', '.join(row)}", "a row asks by prompt, turns or messages", REMEDY)
    messages = formats.parse({"messages": given}, where, "", answers=False).messages
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] != "user":
        raise BadRow.at(where, "the conversation does not end with the user's turn", "it is the one that is answered", REMEDY)
    return messages[:-1], [messages[-1]["content"]], []


def _answered(row: dict[str, Any]) -> list[str]:
    if row.get("choices"):
        return _texts(row["choices"][0]["turns"])
    said = [message for message in row.get("messages") or [] if message["role"] == "assistant"]
    return _texts([message["content"] for message in said]) if said else _texts(row.get("answer"))


def _texts(value: Any) -> list[str]:
    """Texts in any of the forms: one or a list, bare or as {"content"} or {"answer"}."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    if isinstance(value, dict):
        return _texts(value.get("content", value.get("answer")))
    return [final_answer(str(value))]
