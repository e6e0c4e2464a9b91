"""The command line: `run` records a script as it is, `serve` refuses what would be unsafe."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recorder_core import decode_runs
from tests import signals
from tests.tinker.servers import SkyRLServer

SCRIPT = """\
import sys

import tinker
from tinker import types

url, model = sys.argv[1:]
assert __name__ == "__main__"
assert sys.argv[0].endswith("script.py")
service = tinker.ServiceClient(base_url=url, api_key="tml-tests")
made = service.create_sampling_client(base_model=model)
client = made.result() if hasattr(made, "result") else made
params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
prompt = types.ModelInput.from_ints([5 + 7 * position for position in range(16)])
result = client.sample(prompt, 2, params).result()
print("sampled", *result.sequences[0].tokens)
"""


COMMAND = [sys.executable, "-m", "tinker_recorder.cli"]
ENV = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-tests"}


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A folder of its own, where the command runs."""
    return tmp_path


def tinker_recorder(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        cwd=cwd,
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.server
@pytest.mark.parametrize("ending", ["", "raise RuntimeError('the script is broken')"])
def test_a_script_is_recorded_as_it_is_however_it_ends(
    ending: str, server: SkyRLServer, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + ending)
    key = ["--key", "0/script/1"]
    done = tinker_recorder("run", *key, script, server.base_url, model, cwd=tmp_path)
    assert done.returncode == (1 if ending else 0), done.stderr
    assert ("the script is broken" in done.stderr) is bool(ending)
    printed = [int(word) for word in done.stdout.split()[1:]]
    (run,) = decode_runs((tmp_path / "records.rec").read_bytes())
    first, second = run.records.values()
    assert first.response_ids.tolist() == printed
    assert {str(first.key), str(second.key)} == {"0/script/1"}
    assert first.versions[0].version == str(model)
    assert "2 samples: 2 recorded" in done.stderr


WAITS = """
import time
print("ready", flush=True)
time.sleep(60)
"""
WAITS_FOR_A_POOL = """
import time
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:  # a script that is unwound waits here
    pool.submit(time.sleep, 60)
    print("ready", flush=True)
"""
FORKS = """
import os, signal, time
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b".")
    time.sleep(60)
    os._exit(1)
os.read(reading, 1)  # Python forgets a signal that comes while it forks
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
if not os.fork():
    raise SystemExit  # and so ends as the script does
os.wait()
print("ready", flush=True)
time.sleep(60)
"""
HAS_ITS_OWN_HANDLER = (
    """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
"""
    + WAITS
)


@pytest.mark.server
@pytest.mark.parametrize(
    ("ending", "number", "status"),
    [
        (WAITS, signal.SIGTERM, -signal.SIGTERM),
        (WAITS, signal.SIGHUP, -signal.SIGHUP),
        (WAITS, signal.SIGINT, -signal.SIGINT),
        (WAITS_FOR_A_POOL, signal.SIGTERM, -signal.SIGTERM),
        (FORKS, signal.SIGTERM, -signal.SIGTERM),
        (HAS_ITS_OWN_HANDLER, signal.SIGTERM, 7),
    ],
    ids=["SIGTERM", "SIGHUP", "SIGINT", "waiting", "forks", "a handler"],
)
def test_a_script_that_is_ended_by_a_signal_leaves_its_records(
    ending: str, number: signal.Signals, status: int, server: SkyRLServer, model: Path, cwd: Path
) -> None:
    """The signal does what it would without a recorder, and the records are there.

    E9.
    """
    (cwd / "script.py").write_text(SCRIPT + ending)
    command = [*COMMAND, "run", "--key", "0/script/1", "script.py", server.base_url, str(model)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # whatever goes wrong, its signals reach nobody else
        preexec_fn=signals.as_usual,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                process.send_signal(number)
                break
        _, said = process.communicate(timeout=30)
    assert process.returncode == status, said
    (run,) = decode_runs((cwd / "records.rec").read_bytes())
    assert len(run.records) == 2
    assert said.count("2 samples: 2 recorded") == 1, said
    assert (f"ended by {number.name}" in said) is (
        ending in (WAITS, WAITS_FOR_A_POOL, FORKS) and number is not signal.SIGINT
    )
    assert sorted(path.name for path in cwd.iterdir()) == ["records.rec", "script.py"]


@pytest.mark.server
def test_what_threads_and_exit_handlers_sample_is_written_too(
    server: SkyRLServer, model: Path, cwd: Path
) -> None:
    """A script ends when its last thread does; where it then is does not move the file.

    E9.
    """
    late = """
import atexit, os, threading, time
from recorder_core import record_key
def again():
    with record_key("0/late/0"):
        client.sample(prompt, 1, params).result()
atexit.register(again)
threading.Thread(target=lambda: (time.sleep(1), again())).start()
os.mkdir("elsewhere")
os.chdir("elsewhere")
"""
    (cwd / "script.py").write_text(SCRIPT + late)
    done = tinker_recorder("run", "script.py", server.base_url, model, cwd=cwd)
    assert done.returncode == 0, done.stderr
    (run,) = decode_runs((cwd / "records.rec").read_bytes())
    assert len(run.records) == 2
    assert "2 samples: 2 recorded" in done.stderr


@pytest.mark.parametrize(
    ("out", "words"),
    [("none/x", "a folder that exists"), (".", "is no file"), ("/proc/x", "cannot be written")],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_script_runs(
    out: str, words: str, cwd: Path
) -> None:
    """E9."""
    (cwd / "script.py").write_text("print('it ran')")
    done = tinker_recorder("run", "--out", out, "script.py", cwd=cwd)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--out {out}" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_records_that_cannot_be_written_at_the_end_are_an_error_and_spoil_nothing(
    cwd: Path,
) -> None:
    """E9."""
    (cwd / "out").mkdir()
    (cwd / "script.py").write_text("import os; os.rename('out', 'gone')")
    done = tinker_recorder("run", "--out", "out/records", "script.py", cwd=cwd)
    assert done.returncode == 1
    assert "error: 0 records could not be written" in done.stderr
    assert list((cwd / "gone").iterdir()) == []


@pytest.mark.server
def test_a_script_without_a_key_is_run_and_counted(
    server: SkyRLServer, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "none.safetensors"
    done = tinker_recorder("run", "--out", out, script, server.base_url, model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert decode_runs(out.read_bytes()) == []
    assert "1 calls without a record key" in done.stderr


def test_a_malformed_key_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    done = tinker_recorder("run", "--key", "nothing", "missing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "<batch>/<task>/<run>" in done.stderr


def test_serving_the_network_without_an_api_key_is_refused(tmp_path: Path) -> None:
    done = tinker_recorder("serve", "--base-model", "m", "--host", "0.0.0.0", cwd=tmp_path)
    assert done.returncode == 1
    assert "--api-key" in done.stderr


def test_serving_wants_to_know_what_samples(tmp_path: Path) -> None:
    done = tinker_recorder("serve", cwd=tmp_path)
    assert done.returncode == 2
    assert "--base-model --model-path" in done.stderr


def test_a_service_that_does_not_answer_is_given_up_in_time(cwd: Path) -> None:
    """Whether it takes connections and says nothing, or takes none.

    E12.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for service in (silent, closed):
            url = f"http://127.0.0.1:{service.getsockname()[1]}"
            began = time.monotonic()
            args = ["--base-model", "m", "--base-url", url, "--connect-timeout", "2"]
            done = tinker_recorder("serve", *args, cwd=cwd)
            assert done.returncode == 1
            assert f"Connecting to Tinker at {url} for m" in done.stderr.splitlines()[0]
            *_, last = done.stderr.splitlines()
            expected = f"tinker-recorder: error: Tinker at {url} did not answer within 2 s."
            assert last.startswith(expected)
            assert "--connect-timeout" in last
            assert time.monotonic() - began < 30  # most of it imports


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(seconds: str, cwd: Path) -> None:
    """E12."""
    args = ["--base-model", "m", "--connect-timeout", seconds]
    done = tinker_recorder("serve", *args, cwd=cwd)
    assert done.returncode == 2
    assert "--connect-timeout" in done.stderr
