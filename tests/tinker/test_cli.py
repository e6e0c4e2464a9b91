"""The command line: `run` records a script as it is, `serve` refuses what would be unsafe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recorder_core import decode_records
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


def tinker_recorder(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinker_recorder.cli", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "TINKER_TELEMETRY": "0"},
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
    first, second = decode_records((tmp_path / "records.safetensors").read_bytes())
    assert first.response_ids.tolist() == printed
    assert {str(first.key), str(second.key)} == {"0/script/1"}
    assert first.versions[0].version == str(model)
    assert "2 samples: 2 recorded" in done.stderr


@pytest.mark.server
def test_a_script_without_a_key_is_run_and_counted(
    server: SkyRLServer, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "none.safetensors"
    done = tinker_recorder("run", "--out", out, script, server.base_url, model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert decode_records(out.read_bytes()) == []
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
