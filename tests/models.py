"""Tiny random models that run on a real engine, made in a second on first use.

    python -m tests.models tiny_qwen3  # prints the folder

Their tokenizer is byte-level BPE like Qwen's. Text sampled from random weights rarely encodes back
to the sampled ids; digits do (see `round_trip_ids`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.smollm2 import make_once, models_folder, smollm2

VOCABULARY = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Special tokens of Qwen3 besides, where a model has them."""

# ChatML with Hermes-style tools, as Qwen3: <think> blocks of earlier turns are left out.
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='', first=0) -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- set ns.system = messages[0].content -%}
  {%- set ns.first = 1 -%}
{%- endif -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' + (ns.system + '\\n\\n' if ns.system else '') -}}
  {{- '# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>\\nCall one so: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' -}}
  {{- '<|im_end|>\\n' -}}
{%- elif ns.system -%}
  {{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' + content.split('</think>')[-1] -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\\n' if content or not loop.first -}}
      {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Shared by both tiny models; layers and experts differ.
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    # Larger than usual: the next token's distribution is then far from flat.
    "initializer_range": 0.08,
}


def tiny_qwen3() -> Path:
    """The folder of a random Qwen3 of 3.4 M parameters."""
    return make_once(models_folder() / "tiny_qwen3", _make_qwen3)


def tiny_qwen3_float32() -> Path:
    """The folder of a random Qwen3 of 0.2 M parameters, in float32 and with Qwen3's tool tokens."""
    return make_once(models_folder() / "tiny_qwen3_float32", _make_qwen3_float32)


def tiny_qwen3_moe() -> Path:
    """The folder of a random Qwen3-MoE: 4 layers of 8 experts, 2 per token."""
    return make_once(models_folder() / "tiny_qwen3_moe", _make_qwen3_moe)


def tiny_qwen3_moe_wide() -> Path:
    """The folder of a random Qwen3-MoE with more experts than a byte counts: 300, 2 per token."""
    return make_once(models_folder() / "tiny_qwen3_moe_wide", _make_qwen3_moe_wide)


def tiny_lora() -> Path:
    """The folder of a rank-4 LoRA adapter for `tiny_qwen3`, in PEFT's format."""
    return make_once(models_folder() / "tiny_lora", _make_lora)


def round_trip_ids(model: Path) -> list[int]:
    """The ids of the ten digits, which never merge: any sequence of them encodes back to itself.

    As `allowed_token_ids`, they make a random model's replies usable in a later prompt.
    """
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[digit] for digit in "0123456789"]


def _make_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config

    _save(folder, Qwen3Config(**CONFIG, intermediate_size=768))


def _make_qwen3_float32(folder: Path) -> None:
    from transformers import Qwen3Config

    small = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "initializer_range": 0.3}
    config = Qwen3Config(**{**CONFIG, **small}, intermediate_size=128)
    _save(folder, config, "float32", [*SPECIAL, *TOOLS])


def _make_qwen3_moe(folder: Path) -> None:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    _save(folder, Qwen3MoeConfig(**CONFIG, **experts, intermediate_size=768, norm_topk_prob=True))


def _make_qwen3_moe_wide(folder: Path) -> None:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 300, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    _save(folder, Qwen3MoeConfig(**CONFIG, **experts, intermediate_size=768, norm_topk_prob=True))


def _save(
    folder: Path, config: Any, dtype: str = "bfloat16", special: Sequence[str] = SPECIAL
) -> None:
    """Random weights for `config`, with the tokenizer, into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = _tokenizer(special)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.eos_token_id = stop
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(special: Sequence[str]) -> Any:
    """Byte-level BPE, trained on the licence text: enough for some merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"  # digits one by one, as Qwen
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    licence = Path(__file__).resolve().parents[1] / "LICENSE"
    tokenizer.train_from_iterator(licence.read_text().splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONFIG["max_position_embeddings"],
    )


def _make_lora(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    rank, hidden, heads = 4, CONFIG["hidden_size"], CONFIG["head_dim"]
    rows = {
        "q_proj": CONFIG["num_attention_heads"] * heads,
        "v_proj": CONFIG["num_key_value_heads"] * heads,
    }
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, out in rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=random) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny_qwen3",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(rows),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=2))


MODELS = {
    make.__name__: make
    for make in (
        *[smollm2, tiny_lora, tiny_qwen3, tiny_qwen3_float32],
        *[tiny_qwen3_moe, tiny_qwen3_moe_wide],
    )
}

if __name__ == "__main__":
    print(MODELS[sys.argv[1]]())
