"""Prompts for sampling: what the model is shown, and which prompts are short enough."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def prompt_ids(conversation: Conversation, template: Template) -> list[int]:
    """Tokens of the conversation with its tools and the generation header. Raises BadRow when the template refuses it."""
    text = template.write(conversation, conversation.messages, header=True)
    return template.tokenizer(text, add_special_tokens=False).input_ids


def filter_prompts(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    keep_all_think: bool = False,
) -> tuple[list[Prompt], dict[str, int]]:
    """(prompts of at most max_tokens, counts). Raises ValueError when none is left."""
    template = Template(tokenizer, keep_all_think)
    prompts = [Prompt(conversation, prompt_ids(conversation, template)) for conversation in conversations]
    kept = [prompt for prompt in prompts if len(prompt.ids) <= max_tokens]
    counts = {"prompts": len(prompts), "kept": len(kept), "too_long": len(prompts) - len(kept)}
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    log.info("%(prompts)d prompts, %(kept)d kept, %(too_long)d too long", counts)
    if not kept:
        raise ValueError(
            f"none of {len(prompts)} prompts has at most max_tokens={max_tokens} tokens with template, tools and generation "
            f"header (longest {longest}): sampling needs prompts; raise the limit or check the data"
        )
    return kept, counts
