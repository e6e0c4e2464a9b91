"""TRL's stock `AsyncGRPOTrainer` on a CPU, with nothing to send weights to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

from tests.models import tiny_qwen3_float32


def sdpa_of_segments(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any, **__: Any
) -> Any:
    """Variable-length causal attention without the GPU kernel that TRL loads for it."""
    out = torch.empty_like(query)
    repeat = query.shape[1] // key.shape[1]
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        k = key[k0:k1].repeat_interleave(repeat, 1)
        v = value[k0:k1].repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * softmax_scale
        allowed = torch.arange(k1 - k0) <= torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


class OnCpu:
    """The one function of the attention kernel that TRL calls."""

    flash_attn_varlen_func = staticmethod(sdpa_of_segments)


class NoTransfer:
    """No engine to send weights to."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


def use_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The things that TRL has for GPUs only."""
    if Version(trl.__version__) >= Version("1.13"):
        monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    if Version(trl.__version__) >= Version("1.16"):
        from trl.experimental.async_grpo import packing

        monkeypatch.setattr(packing, "_flash_attn", lambda: OnCpu)
        return
    load = AutoModelForCausalLM.from_pretrained

    def with_sdpa(*args: Any, **kwargs: Any) -> Any:
        """It tells packed sequences apart by their positions, as that kernel does."""
        return load(*args, **{**kwargs, "attn_implementation": "sdpa"})

    monkeypatch.setattr(async_grpo_trainer.AutoModelForCausalLM, "from_pretrained", with_sdpa)


def trainer(
    folder: Path, worker: Any, *, samples: int, steps: int = 1, **more: Any
) -> AsyncGRPOTrainer:
    """A trainer of the tiny model that takes so many samples for each step, and learns nothing."""
    args = AsyncGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        max_steps=steps,
        learning_rate=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        dtype="float32",
        max_grad_norm=1e9,
        save_strategy="no",
        token_budget=0,
    )
    return AsyncGRPOTrainer(
        model=str(tiny_qwen3_float32()),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["of no use to a worker of ours"]}),
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
        **more,
    )
