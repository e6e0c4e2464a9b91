"""The versions of the Tinker SDK that are supported, and the refusal outside.

What differs between them:

| tinker | a sample's future | sequence ids | samplers |
| --- | --- | --- | --- |
| 0.25 | `concurrent.futures.Future` | no | snapshots |
| 0.26 to 0.36 | the same | yes | snapshots |
| 0.38 | one that can be awaited as well | yes | snapshots and in-flight ones |
"""

from __future__ import annotations

import inspect
from typing import Any

from packaging.version import InvalidVersion, Version

from recorder_core.errors import UnsupportedEngineError

OLDEST = Version("0.25.0")
NEWEST = Version("0.39.0")
"""The first release that is not supported."""


def check_version(text: str) -> Version:
    """The SDK's version.

    Raises:
        UnsupportedEngineError: It is outside the supported range.
    """
    try:
        version = Version(Version(text).base_version)
    except InvalidVersion:
        raise UnsupportedEngineError(f"tinker calls its version {text!r}, which is none") from None
    if not OLDEST <= version < NEWEST:
        raise UnsupportedEngineError(
            f"tinker {text} cannot be recorded: this tinker-recorder supports >={OLDEST}, "
            f"<{NEWEST}. Install a tinker in that range, or a tinker-recorder for yours."
        )
    return version


def check_sdk() -> None:
    """Check that `tinker` is the SDK, in a supported version, with what the hook builds on.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    try:
        import tinker
    except ImportError as error:
        raise UnsupportedEngineError(
            f"the Tinker SDK cannot be imported ({error}): pip install 'tinker>={OLDEST},<{NEWEST}'"
        ) from error
    title = getattr(tinker, "__title__", None)
    if title != "tinker":
        raise UnsupportedEngineError(
            f"the package `tinker` in this environment is not the Tinker SDK but {title!r}, a "
            "replacement with a client of its own, which cannot be recorded. Uninstall "
            f"{title or 'it'}, then: pip install --force-reinstall 'tinker>={OLDEST},<{NEWEST}'"
        )
    check_version(tinker.__version__)
    # Older releases do not have it in the package's own namespace.
    from tinker.lib.public_interfaces.rest_client import RestClient

    _check_parameters(
        tinker.SamplingClient.sample,
        ["self", "prompt", "num_samples", "sampling_params", "include_prompt_logprobs"],
    )
    _check_parameters(
        tinker.SamplingClient.create,
        ["holder", "model_path", "base_model", "sampling_session_id"],
    )
    _check_parameters(RestClient.get_sampler, ["self", "sampler_id"])


def _check_parameters(function: Any, expected: list[str]) -> None:
    found = list(inspect.signature(function).parameters)[: len(expected)]
    if found != expected:
        raise UnsupportedEngineError(
            f"tinker's {function.__qualname__} takes {found}, expected {expected}: another package "
            "has patched it, or this build of the SDK differs from the release that "
            "tinker-recorder was made for"
        )
