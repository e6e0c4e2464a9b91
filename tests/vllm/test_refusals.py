"""What the flags say, and the refusal, with the way out, of all that cannot be recorded."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from openai import OpenAI
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

import vllm_recorder
from examples.vllm_server import VLLMServer
from recorder_core.client import RecordClient
from recorder_core.errors import UnsupportedEngineError
from tests.models import tiny_qwen3
from tests.vllm.command_lines import Command, Outcome, run_all
from tests.vllm.conftest import AS_UNTESTED, UNTESTED
from vllm_recorder import compat, plugin
from vllm_recorder.compat import SUPPORT

SECRET = "words-that-nobody-may-see"
FLAGS = [
    "--enable-recording",
    "--recording-admin-key",
    "--recording-max-bytes",
    "--recording-aborted",
    "--recording-adapter-versions",
    "--recording-routed-experts",
]
GRPC_PACKAGES = [
    *["grpc", "grpc_health.v1", "grpc_reflection.v1alpha", "smg_grpc_proto"],
    *["smg_grpc_servicer.vllm.health_servicer", "smg_grpc_servicer.vllm.servicer"],
]
PREFILLS = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}
CONFIG = f"""\
port: 0
enable-recording: true
recording-max-bytes: 3MiB
recording-aborted: drop
recording-admin-key: {SECRET}
"""

REFUSALS = {
    "an older vLLM": ["vLLM 0.26.1", "wants 0.27.0 or newer", f"Install vLLM {SUPPORT.tested}"],
    "an untested vLLM that records nothing": [
        *["in this untested vLLM", "recorded with logprobs were []", f"vLLM {SUPPORT.tested}"],
    ],
    "gRPC": ["gRPC", "leave out --grpc"],
    "headless": ["--headless", "give the flag to the node that does"],
    "the Rust front end": ["Rust front end", "unset VLLM_USE_RUST_FRONTEND"],
    "run-batch": ["no HTTP API", "use `vllm serve`"],
    "a renderer": ["does not generate text", "start it without the flag"],
    "a size that is none": ["'eight'", "write bytes or a unit, e.g. 8GiB"],
    "a size that holds nothing": ["'1000'", "at least 1MiB"],
    "an unknown policy": ["'perhaps'", "'keep'", "'drop'"],
    "an empty admin key": ["the key is empty", "leave the flag out to allow this machine only"],
    "logits": ["processed_logits gives logits", "use processed_logprobs or raw_logprobs"],
    "a prefill server": ["kv_producer", "give the flag to the server that decodes"],
    "a missing hook point": ["LogprobsProcessor._update_sample_logprobs is missing"],
}


BATCHED = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "model", "messages": [{"role": "user", "content": "Hello"}]},
}


def _commands(folder: Path) -> dict[str, Command]:
    model = str(tiny_qwen3())
    (folder / "config.yaml").write_text(CONFIG)
    serve = ["serve", model, "--port", "0"]
    recording = [*serve, "--enable-recording"]
    requests = folder / "requests.jsonl"
    requests.write_text(json.dumps(BATCHED))
    batch = ["run-batch", "-i", str(requests), "-o", "none.jsonl", "--model", model]
    key = {"RECORDER_ADMIN_KEY": SECRET}
    return {
        "an older vLLM": Command(recording, version="0.26.1"),
        "an untested vLLM that records nothing": Command(
            [*recording, "--max-model-len", "512", "--enforce-eager"],
            version=UNTESTED,
            without="vllm_recorder.hook:Hook._attach",
        ),
        "gRPC": Command([*recording, "--grpc"], stubs=GRPC_PACKAGES),
        "headless": Command([*recording, "--headless"]),
        "the Rust front end": Command(
            recording,
            # Any program will do: it must not be started.
            {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": shutil.which("true") or ""},
        ),
        # It prints every argument.
        "run-batch": Command([*batch, "--enable-recording", "--recording-admin-key", SECRET]),
        "a renderer": Command(["launch", "render", model, "--port", "0", "--enable-recording"]),
        "a size that is none": Command([*recording, "--recording-max-bytes", "eight"]),
        "a size that holds nothing": Command([*recording, "--recording-max-bytes", "1000"]),
        "an unknown policy": Command([*recording, "--recording-aborted", "perhaps"]),
        "an empty admin key": Command([*recording, "--recording-admin-key", " "]),
        "logits": Command([*recording, "--logprobs-mode", "processed_logits"]),
        "a prefill server": Command([*recording, "--kv-transfer-config", json.dumps(PREFILLS)]),
        "a missing hook point": Command(
            [*recording, "--max-model-len", "512", "--enforce-eager"],
            without="vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        ),
        "the group's help": Command(["serve", "--help=Recording"], key),
        "the whole help": Command(["serve", "--help=all"], key),
        "flags": Command(
            [*recording, "--recording-admin-key", SECRET, "--recording-max-bytes", "8GiB"],
            understand=True,
        ),
        "defaults": Command(recording, key, understand=True),
        "a config file": Command(
            ["serve", model, "--config", str(folder / "config.yaml")], understand=True
        ),
        "no flag": Command(serve, understand=True),
        "headless without the flag": Command([*serve, "--headless"], understand=True),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_all(_commands(tmp_path_factory.mktemp("commands")))


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_with_the_way_out(what: str, outcomes: dict[str, Outcome]) -> None:
    """M4, M8."""
    outcome = outcomes[what]
    assert outcome.status not in (0, None), outcome.output
    # What the recorder caught and logged stands behind the logger's own head.
    assert not re.search(r"^(\(.*?\) )?Traceback", outcome.output, re.MULTILINE)
    for words in REFUSALS[what]:
        assert words in outcome.output.splitlines()[-1], outcome.output


def test_the_command_itself_ends_with_the_message() -> None:
    command = [Path(sysconfig.get_path("scripts"), "vllm"), "serve", tiny_qwen3()]
    arguments = ["--enable-recording", "--headless"]
    done = subprocess.run(
        [*map(str, command), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "vllm: error: --enable-recording: --headless serves no API: give the flag to the node "
        "that does"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["the group's help", "the whole help"])
def test_the_flags_have_a_group_of_their_own_in_the_help(
    what: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[what]
    assert outcome.status == 0
    # From its title to the next one.
    groups = re.findall(r"^Recording:\n((?: .*\n|\n)+)", outcome.output, re.MULTILINE)
    assert len(groups) == 1
    for flag in FLAGS:
        assert re.search(rf"^  {flag}\b", groups[0], re.MULTILINE), flag


def test_flags_are_understood(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["flags"].status == 0
    assert (
        "understood enabled=True admin_key='***' max_bytes=8589934592 aborted='keep' "
        "routed_experts=False" in outcomes["flags"].output
    )
    assert (
        "understood enabled=True admin_key='***' max_bytes=4294967296 aborted='keep' "
        "routed_experts=False" in outcomes["defaults"].output
    )


def test_flags_work_from_a_config_file(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["a config file"].status == 0
    assert (
        "understood enabled=True admin_key='***' max_bytes=3145728 aborted='drop' "
        "routed_experts=False" in outcomes["a config file"].output
    )


def test_without_the_flag_only_the_flags_are_loaded(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["no flag"].status == 0
    assert "understood enabled=False admin_key=None" in outcomes["no flag"].output
    assert (
        "['vllm_recorder', 'vllm_recorder.compat', 'vllm_recorder.plugin']"
        in outcomes["no flag"].output
    )

    assert outcomes["headless without the flag"].status == 0
    assert "understood enabled=False" in outcomes["headless without the flag"].output


def test_the_admin_key_is_never_printed(outcomes: dict[str, Outcome]) -> None:
    # Both ways in are covered, and a command that prints all its arguments.
    assert "recording_admin_key='***'" in outcomes["run-batch"].output
    assert "'recording_admin_key': '***'" in outcomes["flags"].output
    for what, outcome in outcomes.items():
        assert SECRET not in outcome.output, what


def test_the_plugin_is_cheap_to_import() -> None:
    # vLLM imports it in every process it starts.
    code = (
        "import sys, time; began = time.process_time(); import vllm_recorder.plugin; "
        "print(time.process_time() - began, *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *modules = done.stdout.split()
    heavy = {"torch", "vllm", "fastapi", "starlette", "httpx", "prometheus_client", "transformers"}
    assert "recorder_core.options" in modules
    assert not heavy & set(modules)
    assert "vllm_recorder.hook" not in modules
    assert float(seconds) < 1


def test_registering_twice_adds_the_flags_once() -> None:
    plugin.register()
    methods = EngineArgs.add_cli_args, EngineArgs.from_cli_args, plugins.load_endpoint_plugins
    plugin.register()
    assert methods == (
        *[EngineArgs.add_cli_args, EngineArgs.from_cli_args, plugins.load_endpoint_plugins],
    )
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert [group.title for group in parser._action_groups].count("Recording") == 1


def test_registering_in_a_vllm_of_another_shape_says_so_and_patches_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delattr(EngineArgs, "_recorder_registered")
    monkeypatch.delattr(plugins, "load_endpoint_plugins")
    methods = EngineArgs.add_cli_args, EngineArgs.from_cli_args
    plugin.register()
    assert methods == (EngineArgs.add_cli_args, EngineArgs.from_cli_args)
    assert f"made for vLLM {SUPPORT.tested}; this one gets no --enable-recording" in caplog.text


def test_registering_without_a_vllm_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    plugin.register()
    assert "gets no --enable-recording" in caplog.text


@pytest.mark.server
def test_an_untested_vllm_starts_says_so_once_and_records(tmp_path: Path) -> None:
    """S13: what is left when it is ended is in its log."""
    server = VLLMServer(tiny_qwen3(), "--enable-recording", log=tmp_path / "server.log")
    server.command[:1] = [sys.executable, "-c", AS_UNTESTED]
    with server, RecordClient(server.base_url) as records:
        agent = OpenAI(base_url=f"{server.base_url}/v1", api_key="0/untested/0")
        agent.completions.create(model=server.name, prompt="Hello", max_tokens=4)
        (record,) = records.get("0")
        # The generation of the check at start is not among what is counted.
        (stats,) = records.stats().values()
        assert stats.recorder.started == 1
    assert record.logprobs is not None
    log = server.log()
    assert log.count(f"vLLM {UNTESTED} is newer than this vllm-recorder is tested") == 1
    assert log.count("1 records were not drained, 0 of them leased") == 1


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1+cpu", "0.30.1.dev5+g1234567", "0.32.0"])
def test_tested_versions(version: str) -> None:
    assert SUPPORT.is_tested(SUPPORT.check_version(version))


@pytest.mark.parametrize("version", ["0.9.2", "0.26.9", "0.27.0rc1.broken"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=version):
        SUPPORT.check_version(version)


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="calls its version 'dev', which is none"):
        SUPPORT.check_version("dev")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OutputProcessor, "add_request"),
        (RequestState, "_new_completion_output"),
        (LogprobsProcessor, "_update_sample_logprobs"),
    ],
)
def test_a_hook_point_that_is_missing_or_changed_is_named(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = object.__new__(OutputProcessor)
    compat.check_hook_points(processor)
    monkeypatch.setattr(owner, name, lambda self, other: None)
    with pytest.raises(
        UnsupportedEngineError, match=rf"{owner.__name__}\.{name} takes \[.*'other'\], expected"
    ):
        compat.check_hook_points(processor)
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        UnsupportedEngineError, match=rf"{owner.__name__}\.{name} is missing.*Install a released"
    ):
        compat.check_hook_points(processor)


def test_an_engine_that_only_encodes_is_refused() -> None:
    """M4."""
    # A real one needs a model with images.
    config = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        kv_transfer_config=None,
        ec_transfer_config=SimpleNamespace(ec_role="ec_producer"),
    )
    with pytest.raises(UnsupportedEngineError, match=r"ec_producer.*server that decodes"):
        compat.check_config(config)


def test_an_object_without_an_output_processor_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"SimpleNamespace has no output processor.*"):
        vllm_recorder.install(SimpleNamespace())


def test_an_engine_of_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.26.1")
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 0\.26\.1 cannot be recorded"):
        vllm_recorder.install(SimpleNamespace(output_processor=object()))
