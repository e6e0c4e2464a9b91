"""Stands in, on a CPU, for the one part of `--return-sampling-mask` that needs Triton.

vLLM's Model Runner V2 takes the masks from the logits in a kernel of its own. Here the CPU's runner
takes them from the same step's processed logprobs: what truncation left has a finite one. vLLM's
check at start, which refuses every other runner, is passed over.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAME = "sampling_mask_stand_in"


def make_plugin(folder: Path) -> None:
    """Let vLLM find this module among its plugins, where `PYTHONPATH` has the folder."""
    found = folder / f"{NAME}-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (found / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n"
    )


def register() -> None:
    """In each of vLLM's processes."""
    from vllm.config import VllmConfig
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    VllmConfig._verify_sampling_replay_config = _on_any_runner(
        VllmConfig._verify_sampling_replay_config
    )
    Sampler.sample = _keeping_what_is_left(Sampler.sample)
    GPUModelRunner.sample_tokens = _giving_masks(GPUModelRunner.sample_tokens)


def _on_any_runner(verify: Any) -> Any:
    @functools.wraps(verify)
    def verify_all_but_the_runner(config: Any) -> None:
        try:
            verify(config)
        except ValueError as refusal:
            if "Model Runner V2" not in str(refusal):
                raise

    return verify_all_but_the_runner


def _keeping_what_is_left(sample: Any) -> Any:
    @functools.wraps(sample)
    def sample_and_keep(sampler: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = sample(sampler, *args, **kwargs)
        # bool [requests, vocabulary]
        sampler.left = None if logprobs is None else logprobs > -torch.inf
        return sampled, logprobs

    return sample_and_keep


def _giving_masks(sample_tokens: Any) -> Any:
    from vllm.v1.outputs import SamplingMaskLists

    @functools.wraps(sample_tokens)
    def sample_tokens_with_masks(runner: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(runner, *args, **kwargs)
        step = getattr(output, "_model_runner_output", output)  # the first if it is asynchronous
        left = getattr(runner.sampler, "left", None)
        if left is not None and step is not None and step.req_ids:
            counts = left.sum(dim=1).numpy()
            step.sampling_masks = SamplingMaskLists(
                left.nonzero()[:, 1].numpy().astype(np.int32),
                np.concatenate([[0], np.cumsum(counts)]),
            )
        return output

    return sample_tokens_with_masks
