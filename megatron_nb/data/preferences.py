"""Preference and graded rows, and the text of what a reward model reads: one format for training and for scoring.

Point-wise, `answer_text`: the chat template's text of the conversation x followed by the answer as an assistant turn.
Pair-wise, `pair_text`: the same with one assistant turn that holds both answers:

    [Answer A]
    FIRST ANSWER

    [Answer B]
    SECOND ANSWER

Only what was said is judged: thinking is cut from the answers and from earlier turns, and neither special tokens nor the
two markers can be written by an answer itself. The score is that of the last token of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_nb.data import formats
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.data.turns import conversation_name
from megatron_nb.records import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST, SECOND = "[Answer A]", "[Answer B]"
DIALOGUE = re.compile(r"\n\n(Human|Assistant):")  # of hh-rlhf


@dataclass
class Preference:
    """Two answers to one conversation, the better one first unless it is a tie."""

    conversation: Conversation  # x: all messages before the answers
    chosen: str
    rejected: str
    tie: bool


@dataclass
class Grade:
    """One answer with its score."""

    conversation: Conversation
    answer: str
    score: float


# ------------------------------------------------------------------ the text
def final_answer(text: str) -> str:
    """What follows the thinking; "" when the thinking never ends."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def answer_text(conversation: Conversation, answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of (x, answer). Raises BadRow when the chat template refuses it."""
    return _written(conversation, _plain(answer, tokenizer), tokenizer)


def pair_text(conversation: Conversation, a: str, b: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of (x, a, b). Raises BadRow when the chat template refuses it."""
    a, b = (_plain(answer, tokenizer).replace(FIRST, "(Answer A)").replace(SECOND, "(Answer B)") for answer in (a, b))
    return _written(conversation, f"{FIRST}\n{a}\n\n{SECOND}\n{b}", tokenizer)


def answer_ids(conversation: Conversation, answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of `answer_text`."""
    return tokenizer(answer_text(conversation, answer, tokenizer), add_special_tokens=False, verbose=False).input_ids


def pair_ids(conversation: Conversation, a: str, b: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of `pair_text`."""
    return tokenizer(pair_text(conversation, a, b, tokenizer), add_special_tokens=False, verbose=False).input_ids


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All of them, those without a role (eos, pad, ...) too."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({str(token) for token in added if token.special} | set(tokenizer.all_special_tokens))


def _plain(answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The answer without thinking and special tokens: one that wrote an end of turn could go on as somebody else."""
    answer, special = final_answer(answer), "|".join(map(re.escape, special_tokens(tokenizer)))
    while special and (shorter := re.sub(special, "", answer)) != answer:  # until none is left: cutting one may form another
        answer = shorter
    return answer.strip()


def _written(conversation: Conversation, answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: a reward model reads conversations; set data.chat_template")
    messages = [_without_thinking(message) for message in conversation.messages]
    messages.append({"role": "assistant", "content": answer})
    try:
        return tokenizer.apply_chat_template(messages, tools=conversation.tools, tokenize=False)
    except Exception as error:  # templates raise jinja2's errors, and TypeError where a message lacks what they expect
        raise BadRow.at(
            conversation_name(conversation), f"the chat template refuses it ({error})", "the template must render the row"
        ) from error


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return kept | {"content": final_answer(message["content"])}


# ------------------------------------------------------------------ the rows
def read(path: str, source: str) -> Iterator[tuple[str, Preference | Grade | BadRow]]:
    """(where, row) of every row that `path` names; a row that breaks a rule comes as its BadRow. ValueError for bad files."""
    for file in data_files(path):
        for where, raw in raw_rows(file):
            try:
                yield where, parse(decode(where, raw), where, source)
            except BadRow as error:
                yield where, error


def parse(row: dict[str, Any], where: str, source: str) -> Preference | Grade:
    """A row of {"prompt"?, "chosen", "rejected", "tie"? or "label"?} or {"messages" or "prompt" and "response", "score"}.

    Prompts and answers are strings or lists of messages; strings may be dialogues of hh-rlhf. Without "prompt" the prefix
    that both sides share is it. label: 1 (chosen is better, as without label) or 0.5 (tie). Raises BadRow.
    """
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _preference(row, where, source)
    if row.get("score") is not None:
        return _grade(row, where, source)
    raise BadRow.at(
        where,
        f"keys are {', '.join(map(str, row)) or 'none'}",
        "a row has chosen and rejected, or an answer and its score",
        "rename the keys",
    )


def _preference(row: dict[str, Any], where: str, source: str) -> Preference:
    sides = [_messages(row[key], key, where, "assistant") for key in ("chosen", "rejected")]
    if row.get("prompt") is not None:
        prompt = _messages(row["prompt"], "prompt", where, "user")
        sides = [side if side[: len(prompt)] == prompt else prompt + side for side in sides]
    chosen, rejected = (_conversation(row, side, where, source) for side in sides)
    shared = 0
    for left, right in zip(chosen.messages, rejected.messages):
        if left != right:
            break
        shared += 1
    for key, side in (("chosen", chosen), ("rejected", rejected)):
        rest = [message["role"] for message in side.messages[shared:]]
        if not rest:
            raise BadRow.at(where, f"{key} is the beginning of the other side or equal to it", "two answers must differ")
        if rest != ["assistant"]:
            raise BadRow.at(
                where,
                f"after the {shared} messages that both sides share, {key} goes on with {', '.join(rest)}",
                "the sides differ in their last assistant turn only",
            )
    answers = [_answer(side.messages.pop(), key, where) for key, side in (("chosen", chosen), ("rejected", rejected))]
    return Preference(_asked(chosen, where), *answers, _is_tie(row, where))


def _grade(row: dict[str, Any], where: str, source: str) -> Grade:
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise BadRow.at(where, f"score is {score!r}", "a score is a finite number")
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages", where, "user")
    elif row.get("prompt") is not None and row.get("response") is not None:
        messages = _messages(row["prompt"], "prompt", where, "user")
        messages += _messages(row["response"], "response", where, "assistant")
    else:
        raise BadRow.at(
            where, f"keys are {', '.join(row)}", "a graded row has messages, or prompt and response", "rename the keys"
        )
    conversation = _conversation(row, messages, where, source)
    if conversation.messages[-1]["role"] != "assistant":
        raise BadRow.at(where, f"the last message is of {conversation.messages[-1]['role']}", "the last turn is graded")
    answer = _answer(conversation.messages.pop(), "the last turn", where)
    return Grade(_asked(conversation, where), answer, float(score))


def _messages(value: Any, key: str, where: str, role: str) -> list[dict[str, Any]]:
    """A list of raw messages from a list, a dialogue, or a string that `role` said."""
    if isinstance(value, list) and value:
        return list(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRow.at(where, f"{key} is {str(value)[:40]!r}", "it is text, or a list of messages, that is not empty")
    if not DIALOGUE.match(value):
        return [{"role": role, "content": value}]
    _, *parts = DIALOGUE.split(value)
    roles = {"Human": "user", "Assistant": "assistant"}
    said = [{"role": roles[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2])]
    return said[:-1] if key == "prompt" and said[-1] == {"role": "assistant", "content": ""} else said


def _conversation(row: dict[str, Any], messages: list[Any], where: str, source: str) -> Conversation:
    """The messages checked and mended as those of any other row."""
    fields = {key: row[key] for key in ("id", "tools", "system") if row.get(key) is not None}
    return formats.parse({**fields, "messages": messages}, where, source, "messages", answers=False)


def _asked(conversation: Conversation, where: str) -> Conversation:
    if not conversation.messages or conversation.messages[-1]["role"] not in ("user", "tool"):
        last = conversation.messages[-1]["role"] if conversation.messages else "nothing"
        raise BadRow.at(where, f"the answer follows {last}", "an answer follows a user or tool message")
    return conversation


def _answer(message: dict[str, Any], key: str, where: str) -> str:
    if message.get("tool_calls"):
        raise BadRow.at(where, f"{key} calls a tool", "an answer to be judged is text")
    if not (text := final_answer(message["content"])):
        raise BadRow.at(where, f"{key} is empty once its thinking is cut", "an answer to be judged is text")
    return text


def _is_tie(row: dict[str, Any], where: str) -> bool:
    tie, label = row.get("tie"), row.get("label")
    if tie not in (None, True, False) or isinstance(label, bool) or label not in (None, 1, 0.5):
        raise BadRow.at(
            where, f"tie is {tie!r}, label is {label!r}", "tie is true or false, label is 1 (chosen is better) or 0.5 (tie)"
        )
    return bool(tie) or label == 0.5
