"""What the flags say, and the refusal, with the way out, of all that cannot be recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from packaging.version import Version
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args

from recorder_core.engines import support
from recorder_core.errors import UnsupportedEngineError
from sglang_recorder import compat, hook_points, plugin
from tests.models import tiny_qwen3, tiny_qwen3_moe

MODEL = ["--model-path", str(tiny_qwen3()), "--device", "cpu"]
RECORDING = [*MODEL, "--enable-recording"]


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_plugins()


def understood(*argv: str) -> Any:
    """The arguments as SGLang's own launcher reads them."""
    return prepare_server_args(list(argv))


REFUSALS = {
    "an encoder": (["--encoder-only"], "give the flag to the language server"),
    "a prefill server": (["--disaggregation-mode", "prefill"], "give the flag to the decode"),
    "gRPC": (["--grpc-mode"], "leave out --grpc-mode"),
    "an embedding model": (["--is-embedding"], "leave out --is-embedding"),
    "HTTP/2": (["--enable-http2"], "leave out --enable-http2"),
    "a second node": (["--nnodes", "2", "--node-rank", "1"], "give the flag to --node-rank 0"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_with_the_way_out(what: str) -> None:
    argv, way_out = REFUSALS[what]
    with pytest.raises(SystemExit, match=re.escape(way_out)):
        understood(*RECORDING, *argv)


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_GRPC", "SGLANG_GRPC_PORT"])
def test_servers_chosen_by_the_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit, match=rf"unset .*{name}"):
        understood(*RECORDING)


@pytest.mark.parametrize("version", ["0.4.9", "0.5.10", "dev"])
def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sglang, "__version__", version)
    with pytest.raises(SystemExit, match=rf"{version}.*(wants 0\.5\.11 or newer|is none)"):
        understood(*RECORDING)


def test_a_newer_release_is_taken_and_that_it_is_untested_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # SGLang takes all handlers off the root.
    monkeypatch.setattr(support.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(sglang, "__version__", "0.99.0")
    assert understood(*RECORDING)
    assert "SGLang 0.99.0 is newer than this sglang-recorder is tested with" in caplog.text


def test_an_untested_release_is_not_started_without_the_check_that_it_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_recorder import launching

    def launch(server_args: Any, tokenizer_manager: Any, execute_warmup_func: Any) -> None: ...

    monkeypatch.setattr(launching.server, "mount", lambda *_: None)
    args = SimpleNamespace(skip_server_warmup=True)
    with ExitStack() as ending:
        launching.attach(plugin.options, ending, launch, args, None, None)
        monkeypatch.setattr(sglang, "__version__", "0.99.0")
        with pytest.raises(UnsupportedEngineError, match="untested: leave it out"):
            launching.attach(plugin.options, ending, launch, args, None, None)


def test_this_release_is_taken(engine_version: Version) -> None:
    assert compat.SUPPORT.check_version(sglang.__version__) == engine_version


def test_a_missing_hook_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TokenizerManager, "_handle_abort_req")
    with pytest.raises(SystemExit, match=r"TokenizerManager\._handle_abort_req is missing"):
        understood(*RECORDING)


def test_a_hook_that_sglang_did_not_apply_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, recv_obj: Any) -> None: ...

    # As if a plugin had hooked the method first: SGLang then passes ours over, and says nothing.
    understood(*RECORDING)
    monkeypatch.setattr(TokenizerManager, "_handle_abort_req", other)
    with pytest.raises(SystemExit, match=r"did not hook .*_handle_abort_req.*SGLANG_PLUGINS"):
        understood(*RECORDING)
    HookRegistry._hooks[f"{hook_points._MANAGER}._handle_abort_req"].pop()


def test_the_flags_are_those_of_the_other_engines(tmp_path: Path) -> None:
    understood(
        *RECORDING, "--recording-max-bytes", "8GiB", "--recording-admin-key", "of-the-operator"
    )
    assert (plugin.options.enabled, plugin.options.max_bytes) == (True, 8 * 1024**3)
    assert (plugin.options.admin_key, plugin.options.aborted) == ("of-the-operator", "keep")
    assert "of-the-operator" not in repr(plugin.options)
    config = tmp_path / "config.yaml"
    config.write_text("enable-recording: true\nrecording-aborted: drop\n")
    understood(*MODEL, "--config", str(config))
    assert (plugin.options.enabled, plugin.options.aborted) == (True, "drop")
    understood(*MODEL)
    assert not plugin.options.enabled


def test_routed_experts_turn_on_the_engines_own_capture() -> None:
    model = ["--model-path", str(tiny_qwen3_moe()), "--device", "cpu", "--enable-recording"]
    assert understood(*model, "--recording-routed-experts").enable_return_routed_experts
    assert not understood(*model).enable_return_routed_experts


IN_A_FRESH_PROCESS = """\
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(sys.argv[1:])
from sglang.srt.plugins.hook_registry import HookRegistry
print(sorted(HookRegistry._patched))
print(sorted(name for name in sys.modules if name.startswith("sglang_recorder")), flush=True)
from sglang.cli.main import main
sys.argv[:] = ["sglang", "serve", *sys.argv[1:3], *"--enable-recording --encoder-only".split()]
main()
"""


def test_without_the_flag_only_flags_are_added_and_a_refusal_is_a_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, *MODEL],
        capture_output=True,
        text=True,
        check=False,
    )
    [patched] = [line for line in done.stdout.splitlines() if line.startswith("['sglang.srt.")]
    [modules] = [line for line in done.stdout.splitlines() if line.startswith("['sglang_recorder")]
    arguments = "sglang.srt.server_args.ServerArgs"
    assert patched == str([f"{arguments}.add_cli_args", f"{arguments}.from_cli_args"])
    assert modules == str([f"sglang_recorder{each}" for each in ("", ".compat", ".plugin")])

    assert done.returncode == 1, done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("sglang: error: --enable-recording: an encoder generates nothing")
    assert "Traceback" not in done.stderr


def test_the_tables_say_what_is_supported() -> None:
    root = Path(__file__).parents[2]
    for row in compat.TABLE:
        assert row.row("SGLang") in (root / "README.md").read_text()
        assert row.row("").replace("|  ", "| ") in (root / "docs" / "sglang.md").read_text()


def test_several_tokenizer_workers_without_one_recorder_are_refused() -> None:
    several = SimpleNamespace(tokenizer_worker_num=2)
    with pytest.raises(UnsupportedEngineError, match=r"each record only a part.*worker-num 1"):
        compat.check_engine(several)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.18"])
def test_several_tokenizer_workers_of_older_releases_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    assert understood(*RECORDING, "--tokenizer-worker-num", "1")
    monkeypatch.setattr(sglang, "__version__", version)
    with pytest.raises(SystemExit, match=r"2 tokenizer workers are recorded from SGLang 0\.5\.19"):
        understood(*RECORDING, "--tokenizer-worker-num", "2")


def test_no_engine_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="no tokenizer manager"):
        hook_points.install(object())
