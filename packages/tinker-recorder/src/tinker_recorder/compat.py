"""The versions of the Tinker SDK that are supported, and the refusal of others.

What differs between them:

| tinker | a sample's future | sequence ids | samplers |
| --- | --- | --- | --- |
| 0.25 | `concurrent.futures.Future` | no | snapshots |
| 0.26 to 0.36 | the same | yes | snapshots |
| 0.38 | one that can be awaited as well | yes | snapshots and in-flight ones |
"""

from __future__ import annotations

from packaging.version import Version

from recorder_core.engines.support import EngineSupport
from recorder_core.errors import UnsupportedEngineError

SUPPORT = EngineSupport("tinker", "tinker-recorder", Version("0.25.0"), Version("0.38.0"))
_REQUIREMENT = f"'tinker>={SUPPORT.oldest},<={SUPPORT.newest_tested}'"


def check_sdk() -> None:
    """Check that `tinker` is the SDK, in a version that is not refused, with what the hook needs.

    Raises:
        UnsupportedEngineError: With the way out.
    """
    try:
        import tinker
    except ImportError as error:
        raise UnsupportedEngineError(
            f"the Tinker SDK cannot be imported ({error}): pip install {_REQUIREMENT}"
        ) from error
    title = getattr(tinker, "__title__", None)
    if title != "tinker":
        raise UnsupportedEngineError(
            f"the package `tinker` in this environment is not the Tinker SDK but {title!r}, a "
            "replacement with a client of its own, which cannot be recorded. Uninstall "
            f"{title or 'it'}, then: pip install --force-reinstall {_REQUIREMENT}"
        )
    SUPPORT.check_version(tinker.__version__)
    # Older releases do not have it in the package's own namespace.
    from tinker.lib.public_interfaces.rest_client import RestClient

    SUPPORT.check_parameters(
        tinker.SamplingClient,
        "sample",
        ["self", "prompt", "num_samples", "sampling_params", "include_prompt_logprobs"],
    )
    SUPPORT.check_parameters(
        tinker.SamplingClient,
        "create",
        ["holder", "model_path", "base_model", "sampling_session_id"],
    )
    SUPPORT.check_parameters(RestClient, "get_sampler", ["self", "sampler_id"])
