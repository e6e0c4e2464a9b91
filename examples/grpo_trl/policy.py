"""The policy: a Qwen3 of 0.2 M parameters with random weights, and a tokenizer of single words.

It may sample every token that there is, as TRL computes its probabilities over all of them.
Whatever it samples is text that encodes back to the same ids: a run of two turns is one trajectory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.grpo_cpu.game import RULES

END = "<|im_end|>"
UNKNOWN = "?"
WORDS = [END, UNKNOWN, "<|im_start|>", "user", "assistant", "write", "now", "digits"]
WORDS += [*RULES, *"0123456789"]
CHAT_TEMPLATE = f"""\
{{%- for message in messages -%}}
  {{{{- ' <|im_start|> ' + message.role + ' ' + message.content + ' {END}' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- ' <|im_start|> assistant ' -}}}}{{%- endif -%}}
"""


def new_policy(seed: int) -> Any:
    """Random weights, in float32 as the engine computes them here."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=WORDS.index(END),
    )
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.generation_config = GenerationConfig(eos_token_id=WORDS.index(END))
    return policy


def new_tokenizer() -> Any:
    """A word is a token, and so is a digit."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def save(policy: Any, folder: Path) -> None:
    """All that the engine starts from."""
    policy.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
