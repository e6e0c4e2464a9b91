"""The wrappers around SGLang's methods, and their registration with SGLang's own HookRegistry."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sglang
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from recorder_core.drops import DropReason
from recorder_core.errors import UnsupportedEngineError
from recorder_core.host.relay import Relay
from recorder_core.intake import Intake
from recorder_core.recorder import Recorder
from sglang_recorder import compat
from sglang_recorder.client_request import ClientRequest, Replies
from sglang_recorder.hook import Hook
from sglang_recorder.news import Changed, Changing, Flushed, News, Paused

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_WORKER = "sglang.srt.managers.multi_tokenizer_mixin.TokenizerWorker"
_SOURCE = HookSource("recorder", "sglang-recorder")


def _hook_of(manager: Any) -> Hook | None:
    hook: Hook | None = getattr(manager, "_recorder_hook", None)
    return hook


def _generate_request(
    original: Any, manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    generator = original(manager, obj, request, *args, **kwargs)
    hook = _hook_of(manager)
    if hook is None or not isinstance(obj, GenerateReqInput):
        return generator
    return Replies(generator, ClientRequest.here(obj, request))


def _send_one_request(original: Any, manager: Any, tokenized_obj: Any) -> Any:
    return _send(original, manager, tokenized_obj, [tokenized_obj])


def _send_batch_request(original: Any, manager: Any, tokenized_objs: Any) -> Any:
    return _send(original, manager, tokenized_objs, tokenized_objs)


def _send(original: Any, manager: Any, argument: Any, requests: Sequence[Any]) -> Any:
    hook = _hook_of(manager)
    if hook is None:
        return original(manager, argument)
    rids = [rid for each in requests if (rid := hook.take(each))]
    try:
        # A function in older releases and a coroutine in newer ones: handed on as it is.
        sending = original(manager, argument)
    except BaseException:
        hook.forget(rids, DropReason.NOT_SENT)
        raise
    return _sent(sending, hook, rids) if rids and hasattr(sending, "__await__") else sending


async def _sent(sending: Any, hook: Hook, rids: list[str]) -> Any:
    try:
        return await sending
    except BaseException:
        hook.forget(rids, DropReason.NOT_SENT)
        raise


def _handle_batch_output(original: Any, manager: Any, recv_obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.receive(recv_obj)
    return original(manager, recv_obj)


def _handle_abort_req(original: Any, manager: Any, recv_obj: Any) -> Any:
    hook = _hook_of(manager)
    if hook is not None:
        hook.abort(recv_obj)
    return original(manager, recv_obj)


async def _pause_generation(original: Any, manager: Any, obj: Any) -> Any:
    await _befall(manager, Paused(getattr(obj, "mode", "")))
    return await original(manager, obj)


async def _continue_generation(original: Any, manager: Any, obj: Any) -> Any:
    await _befall(manager, Paused(""))
    return await original(manager, obj)


async def _update_weights(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    await _befall(manager, Changing(getattr(obj, "flush_cache", True)))
    result = await original(manager, obj, *args, **kwargs)
    if result[0]:
        await _befall(manager, Changed(obj.weight_version))
    return result


async def _update_weight_version(original: Any, manager: Any, obj: Any) -> Any:
    result = await original(manager, obj)
    await _befall(manager, Changed(obj.new_version))
    return result


async def _unload_lora_adapter(
    original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    result = await original(manager, obj, *args, **kwargs)
    if result.success:
        # SGLang refuses to load over a name in use: what has this name later is another adapter.
        await _befall(manager, Changed(None, obj.lora_name))
    return result


async def _flush_cache(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(manager, *args, **kwargs)
    if result.success:
        await _befall(manager, Flushed())
    return result


async def _befall(manager: Any, news: News) -> None:
    hook = _hook_of(manager)
    if hook is not None:
        await hook.befall(news)


_HOOKS: dict[str, Callable[..., Any]] = {
    "_send_one_request": _send_one_request,
    "_send_batch_request": _send_batch_request,
    "_handle_batch_output": _handle_batch_output,
    "_handle_abort_req": _handle_abort_req,
    "generate_request": _generate_request,
    "pause_generation": _pause_generation,
    "continue_generation": _continue_generation,
    "flush_cache": _flush_cache,
    "unload_lora_adapter": _unload_lora_adapter,
    "update_weights_from_disk": _update_weights,
    "update_weights_from_distributed": _update_weights,
    "update_weights_from_tensor": _update_weights,
    "update_weights_from_ipc": _update_weights,
}


def _own_hooks() -> dict[str, Callable[..., Any]]:
    """The targets in this release, and the hooks that go around them."""
    hooks = {f"{_MANAGER}.{name}": hook for name, hook in _HOOKS.items()}
    if hasattr(TokenizerManager, "update_weight_version"):
        hooks[f"{_MANAGER}.update_weight_version"] = _update_weight_version
    for name in ("pause_generation", "continue_generation"):
        if name in vars(TokenizerWorker):  # its own, which does not call the manager's
            hooks[f"{_WORKER}.{name}"] = _HOOKS[name]
    return hooks


def apply_hooks(others: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Register the hooks with SGLang's registry, once in this process, and see that they hold.

    Args:
        others: More targets and the hooks that go around them.

    Raises:
        UnsupportedEngineError: A hook point is missing, or was not hooked.
    """
    for name, expected in compat.HOOKS.items():
        compat.SUPPORT.check_parameters(TokenizerManager, name, expected)
    hooks = {**_own_hooks(), **(others or {})}
    for target, hook in hooks.items():
        if not _is_applied(target, hook):
            HookRegistry.register(target, hook, HookType.AROUND, source=_SOURCE)
    HookRegistry.apply_hooks()
    for target, hook in hooks.items():
        if not _is_applied(target, hook):
            # SGLang itself only logs that.
            raise UnsupportedEngineError(
                f"SGLang did not hook {target}; another plugin may have hooked it before: list "
                "the plugins to load in SGLANG_PLUGINS, `recorder` first"
            )


def _is_applied(target: str, hook: Callable[..., Any]) -> bool:
    """Whether a call of the target goes through the hook."""
    owner, _, name = target.rpartition(".")
    function: Any = getattr(pkgutil.resolve_name(owner), name)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def install(engine: Any, recorder: Intake | None = None, *, routed_experts: bool = False) -> Hook:
    """Hook an engine; see `sglang_recorder.install`.

    Args:
        engine: An `sgl.Engine` or a `TokenizerManager`.
        recorder: Where turns go; a new one by default.
        routed_experts: Ask for routed experts, and keep them out of replies that did not ask.

    Raises:
        UnsupportedEngineError: The engine cannot be recorded.
    """
    compat.SUPPORT.check_version(sglang.__version__)
    manager = getattr(engine, "tokenizer_manager", engine)
    if not isinstance(manager, TokenizerManager):
        raise UnsupportedEngineError(
            f"{type(engine).__name__} has no tokenizer manager in this process; give install() "
            "an sgl.Engine with one tokenizer worker"
        )
    compat.check_engine(manager.server_args, shared=isinstance(recorder, Relay))
    installed = _hook_of(manager)
    if installed is not None:
        installed.active = True
        return installed
    apply_hooks()
    hook = Hook(manager, recorder or Recorder(), routed_experts=routed_experts)
    manager._recorder_hook = hook
    # A manager made before the hooks were applied holds on to the method as it was.
    handlers = manager._result_dispatcher._mapping
    handlers[AbortReq] = manager._handle_abort_req
    return hook


def uninstall(engine: Any) -> None:
    """Undo `install`: what is in flight is still recorded."""
    hook = _hook_of(getattr(engine, "tokenizer_manager", engine))
    if hook is not None:
        hook.active = False
