"""SGLang's kernels, in name only: importing one is no error, calling one is."""

from __future__ import annotations

from typing import Any


def absent(name: str) -> Any:
    """A function that says that it is not there."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} has no CPU build; see tests/sglang/cpu_stand_in")

    kernel.__name__ = name
    return kernel


def __getattr__(name: str) -> Any:
    # SGLang itself handles the absence of `scalar_type`, and Python asks for dunder names.
    if name.startswith("__") or name == "scalar_type":
        raise AttributeError(name)
    return absent(name)
