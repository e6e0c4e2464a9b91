"""The policy: a Qwen3 of 0.2 M parameters with random weights, and a tokenizer of single words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.grpo_cpu.game import RULES

DIGITS = "0123456789"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, "user", "assistant", "write", "digits", "now", *RULES, *DIGITS]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' -}}{%- endif -%}
"""


def digit_ids() -> list[int]:
    """The ids that the policy may sample: text made of them encodes back to the same ids."""
    return [WORDS.index(digit) for digit in DIGITS]


def new_policy(seed: int) -> Any:
    """Random weights, in float32 as the engine computes them here."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    stop = WORDS.index("<|im_end|>")
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=stop,
    )
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=0)
    return policy


def save_tokenizer(folder: Path) -> None:
    """A word is a token, and so is a digit."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
