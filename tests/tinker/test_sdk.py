"""What is patched, and the SDKs that are refused; no server is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

from recorder_core.errors import RecorderError, UnsupportedEngineError
from tinker_recorder import TinkerRecorder
from tinker_recorder.compat import SUPPORT


def run(code: str, *path: Path) -> str:
    """What a program prints; `path` comes before everything installed."""
    # -P: the checkout's own folders are not to be found.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": ":".join(map(str, path)), "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_importing_the_package_imports_no_sdk_and_patches_nothing() -> None:
    code = "import sys, tinker_recorder; print('tinker' in sys.modules)"
    assert run(code).split() == ["False"]
    code = "import tinker; a = tinker.SamplingClient.sample; import tinker_recorder.hook"
    assert run(code + "; print(tinker.SamplingClient.sample is a)").split() == ["True"]


def test_instrument_is_undone_by_uninstrument_and_both_may_be_repeated() -> None:
    def patched() -> list[Any]:
        return [vars(tinker.SamplingClient)["sample"], vars(tinker.SamplingClient)["create"]]

    before = patched()
    recorder = TinkerRecorder()
    recorder.instrument()
    once = patched()
    assert all(mine is not theirs for mine, theirs in zip(once, before, strict=True))
    recorder.instrument()
    assert patched() == once
    recorder.uninstrument()
    recorder.uninstrument()
    assert patched() == before
    recorder.instrument()
    recorder.close()
    assert patched() == before


def test_a_second_recorder_is_refused_while_one_is_at_work() -> None:
    first, second = TinkerRecorder(), TinkerRecorder()
    first.instrument()
    with pytest.raises(RecorderError, match="uninstrument"):
        second.instrument()
    first.close()
    second.instrument()
    second.close()


def test_a_patch_of_someone_elses_over_ours_survives_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    recorder = TinkerRecorder()
    recorder.instrument()
    ours = tinker.SamplingClient.sample

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(tinker.SamplingClient, "sample", theirs)
    recorder.close()
    assert tinker.SamplingClient.sample is theirs


@pytest.mark.parametrize("version", ["0.24.1", "0.22.7", "0.25.0rc0.broken"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "__version__", version)
    with pytest.raises(UnsupportedEngineError, match=version):
        TinkerRecorder().instrument()


def test_a_newer_version_is_recorded_and_that_it_is_untested_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tinker, "__version__", "99.0.0")
    for _ in range(2):
        recorder = TinkerRecorder()
        recorder.instrument()
        recorder.close()
    (said,) = caplog.messages
    assert said.startswith("tinker 99.0.0 is newer than this tinker-recorder is tested with")


def test_a_newer_version_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "__version__", "99.0.1")
    monkeypatch.delattr(RestClient, "get_sampler")
    with pytest.raises(UnsupportedEngineError, match=r"RestClient\.get_sampler is missing"):
        TinkerRecorder().instrument()


@pytest.mark.parametrize("version", ["0.25.0", "0.26.2", "0.38.0"])
def test_tested_versions(version: str) -> None:
    assert SUPPORT.is_tested(SUPPORT.check_version(version))


def test_a_changed_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker.SamplingClient, "sample", lambda self, request: None)
    with pytest.raises(UnsupportedEngineError, match="num_samples"):
        TinkerRecorder().instrument()


REPLACEMENT = """\
__title__ = "baseten-loops-tinker"
__version__ = "0.17.0"
class SamplingClient: ...
class ServiceClient: ...
"""
INSTRUMENT = "from tinker_recorder import TinkerRecorder; TinkerRecorder().instrument()"


def test_the_package_that_replaces_the_sdk_is_refused_by_name(tmp_path: Path) -> None:
    package = tmp_path / "tinker"
    package.mkdir()
    (package / "__init__.py").write_text(REPLACEMENT)
    said = run(INSTRUMENT, tmp_path).splitlines()[-1]
    assert said.startswith("recorder_core.errors.UnsupportedEngineError")
    assert "'baseten-loops-tinker'" in said
    assert "pip install" in said


def test_a_replacement_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "tinker"
    package.mkdir()
    (package / "__init__.py").write_text("import baseten.loops")
    said = run(INSTRUMENT, tmp_path).splitlines()[-1]
    assert "UnsupportedEngineError: the Tinker SDK cannot be imported" in said
