"""Run by Python at the start of every process that has this folder on its path; see README.md."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def declare_torchvision_operators() -> None:
    """The operators whose schemas torchvision extends when it is imported."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules[__name__].__dict__["_library"] = library  # they last as long as it does


def leave_host_memory_unregistered(module: ModuleType) -> None:
    """Host memory needs registering with CUDA only where there is CUDA."""
    if hasattr(module, "_cuda_host_register"):
        module.__dict__["_cuda_host_register"] = lambda *args, **kwargs: None


class UnpinnedTorch(ModuleType):
    """torch, but for memory that is pinned for a GPU: it is ordinary memory."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        import torch

        return torch.zeros(*args, **kwargs)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        import torch

        return torch.empty(*args, **kwargs)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        import torch

        return torch.tensor(*args, **kwargs)


def leave_memory_unpinned(module: ModuleType) -> None:
    """Memory can be pinned only where there is a GPU."""
    module.__dict__["torch"] = UnpinnedTorch("torch")


def leave_adapters_unpinned(module: ModuleType) -> None:
    """The same for tensors that are pinned after they are made."""
    import torch

    leave_memory_unpinned(module)
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]


def copy_routed_experts(module: ModuleType) -> None:
    """Older releases: from a GPU `.to("cpu")` copies, on a CPU it does not.

    The next batch would overwrite what the last one's routed experts are read from.
    """
    leave_memory_unpinned(module)

    def copy_to_cpu(self: Any) -> None:
        self.out_cache_loc = self.out_cache_loc.clone()
        self.routed_experts = self.routed_experts.clone()

    module.RoutedExpertsOutput.copy_to_cpu = copy_to_cpu


def pace(module: ModuleType) -> None:
    """Long generations take their time, for the tests that act while one runs.

    On a machine short of CPU the scheduler can be done with hundreds of tokens before a client gets
    to its first; a scheduler that sleeps leaves the others their time.
    """
    if "RECORDER_TESTS_PACED_TOKENS" not in os.environ:
        return
    long = int(os.environ["RECORDER_TESTS_PACED_TOKENS"])
    run_batch = module.Scheduler.run_batch

    def paced(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if any((each.sampling_params.max_new_tokens or 0) >= long for each in batch.reqs):
            time.sleep(0.01)
        return run_batch(self, batch, *args, **kwargs)

    module.Scheduler.run_batch = paced


BEFORE: dict[str, Callable[[], None]] = {"torchvision": declare_torchvision_operators}
AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.layers.moe.routed_experts_capturer": copy_routed_experts,
    "sglang.srt.state_capturer.base": leave_memory_unpinned,
    "sglang.srt.lora.backend.torch_backend": leave_adapters_unpinned,
    "sglang.srt.lora.layers": leave_adapters_unpinned,
    "sglang.srt.managers.scheduler": pace,
    "sglang.srt.mem_cache.pool_host.common": leave_host_memory_unregistered,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules named above as Python does, and does something more."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name in BEFORE:
            BEFORE.pop(name)()
        if name not in AFTER:
            return None
        then = AFTER.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
