"""Prompts: filtered by what the model is really shown."""

import json

import pytest

from megatron_nb.data.formats import parse
from megatron_nb.data.prompts import PromptConfig, PromptSource, filter_prompts, open_prompts
from megatron_nb.data.split import held_out
from tests.data.data_tokenizers import tiny

ROWS = [{"messages": [{"role": "user", "content": "word " * count}], "tools": [{"name": "look_up"}]} for count in (1, 20, 40)]
PROMPTS = [parse(row, f"rows.jsonl:{number}", "source", answers=False) for number, row in enumerate(ROWS)]


def shown(item):
    return tiny().apply_chat_template(item.messages, tools=item.tools, add_generation_prompt=True)["input_ids"]


def test_a_prompt_at_the_limit_stays_and_one_token_more_goes():
    limit = len(shown(PROMPTS[1]))
    kept, counts = filter_prompts(PROMPTS, tiny(), limit)
    assert [prompt.ids for prompt in kept] == [shown(PROMPTS[0]), shown(PROMPTS[1])]
    assert counts == {"prompts": 3, "kept": 2, "too_long": 1}
    assert filter_prompts(PROMPTS, tiny(), limit - 1)[1]["kept"] == 1


def test_template_tools_and_header_are_counted():
    (prompt,), _ = filter_prompts(PROMPTS[:1], tiny(), 1000)
    text = tiny().decode(prompt.ids)
    assert "look_up" in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("told", ["", "Tools: search."])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_an_agents_tools_stand_in_every_prompt_by_the_template_or_in_the_system_message(tmp_path, told, system):
    row = {"question": "Who?", "answer": "she", "tools": [{"name": "look_up"}]} | ({"system": system} if system else {})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    config = PromptConfig({"a": PromptSource(str(tmp_path / "rows.jsonl"))})
    (prompt,) = open_prompts(config, tiny(), 0, tools, told).training
    text = tiny().decode(prompt.ids)
    assert "look_up" not in text and (system or "") in text and text.count("<|im_start|>system") == 1
    if told:
        assert told in text and "<tools>" not in text and prompt.data["tools"] == tools and prompt.conversation.tools is None
    else:
        assert '"name": "search"' in text and prompt.conversation.tools == tools


def test_no_prompt_left_is_an_error():
    with pytest.raises(ValueError, match="none of 3 prompts has at most max_tokens=5 tokens .*longest"):
        filter_prompts(PROMPTS, tiny(), 5)


def test_the_split_by_id_is_fixed_and_has_its_share():
    ids = [f"row_{number}" for number in range(10_000)]
    assert 900 < sum(map(held_out, ids)) < 1100
    assert [held_out(name) for name in ids[:12]] == SPLIT


SPLIT = [number in (3, 5) for number in range(12)]
