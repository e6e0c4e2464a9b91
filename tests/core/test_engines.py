"""What every engine package checks at start, and stamped weight labels."""

from __future__ import annotations

import pytest
from packaging.version import Version

from recorder_core import VersionSpan
from recorder_core.engines.labels import VersionLabels
from recorder_core.engines.refusals import refuse
from recorder_core.engines.support import EngineSupport
from recorder_core.errors import UnsupportedEngineError

SUPPORT = EngineSupport(
    "Engine", "engine-recorder", Version("1.2"), Version("1.4.9"), {"1.3.1": "it forgets requests"}
)


@pytest.mark.parametrize("text", ["1.2", "1.4.9", "1.4.9+cpu", "1.2.0rc1", "1.3.1.1"])
def test_tested_versions_are_taken_without_a_word(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    version = SUPPORT.check_version(text)
    assert SUPPORT.is_tested(version)
    assert not caplog.records


@pytest.mark.parametrize("text", ["1.1.9", "1.1.9.post1", "0.9", "1.1rc3"])
def test_older_versions_are_refused_with_the_way_out(text: str) -> None:
    message = rf"Engine {text} .*wants 1\.2 or newer\. Install Engine 1\.2 to 1\.4\.9"
    with pytest.raises(UnsupportedEngineError, match=message):
        SUPPORT.check_version(text)


@pytest.mark.parametrize("text", ["1.5", "1.4.10.dev3", "2"])
def test_a_version_newer_than_the_newest_tested_is_taken_and_said_once(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not SUPPORT.is_tested(SUPPORT.check_version(text))
    SUPPORT.check_version(text)
    (said,) = caplog.messages
    assert said.startswith(f"Engine {text} is newer than this engine-recorder is tested with (1.2 ")


@pytest.mark.parametrize("text", ["1.3.1", "1.3.1+cpu"])
def test_a_version_that_is_known_to_be_broken_is_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedEngineError) as caught:
        SUPPORT.check_version(text)
    assert str(caught.value).startswith(f"Engine {text} cannot be recorded: it forgets requests.")


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="'unknown', which is none"):
        SUPPORT.check_version("unknown")


def test_a_hook_point_that_is_missing_or_other_is_named() -> None:
    class Output:
        def add(self, request: object, prompt: object) -> None: ...

    SUPPORT.check_parameters(Output, "add", ["self", "request"])
    SUPPORT.check_parameters(Output(), "add", ["request"])
    with pytest.raises(UnsupportedEngineError, match=r"Engine's Output\.take is missing"):
        SUPPORT.check_parameters(Output, "take", ["self"])
    with pytest.raises(UnsupportedEngineError, match=r"takes \['self', 'request'\], expected"):
        SUPPORT.check_parameters(Output, "add", ["self", "prompt"])


def test_at_the_command_line_a_refusal_is_its_message() -> None:
    message = "engine: error: --enable-recording: no way; do this"
    with pytest.raises(SystemExit, match=message), SUPPORT.refusing():
        refuse({"fine": False, "no way; do this": 1, "nor this": True})


def test_labels_are_stamped_from_where_they_changed() -> None:
    labels = VersionLabels("a")
    assert labels.spans(5) == ((VersionSpan(0, 5, "a"),), ())
    labels.change("b", 3)
    labels.change("c", 3)
    spans, flags = labels.spans(5)
    assert spans == (VersionSpan(0, 3, "a"), VersionSpan(3, 5, "c"))
    assert flags == ("version_boundary_approximate",)
    # A change at or after the last token is none.
    assert labels.spans(3) == ((VersionSpan(0, 3, "a"),), ())


def test_without_a_label_nothing_is_known_until_there_is_one() -> None:
    labels = VersionLabels("")
    assert labels.spans(4) == ((), ())
    labels.change("a", 2)
    assert labels.spans(4) == ((VersionSpan(2, 4, "a"),), ("version_boundary_approximate",))
