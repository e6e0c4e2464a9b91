"""Start stock SGLang as a child process, with settings for a small CPU machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from examples.engine_server import EngineServer

# What a small offline machine needs; everything else is SGLang's default.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more of them fight over few cores
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ARGUMENTS = [
    *["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"],
    *["--mem-fraction-static", "0.3", "--max-total-tokens", "30000", "--context-length", "2048"],
    "--sleep-on-idle",  # else the idle scheduler takes a core
]


class SGLangServer(EngineServer):
    """One `python -m sglang.launch_server` on a free loopback port, stopped when the block ends.

        with SGLangServer(model, "--enable-recording") as server:
            client = OpenAI(base_url=f"{server.base_url}/v1", api_key="batch/task/0")

    Args:
        model: The model's folder.
        *args: More arguments of the launcher. One given here wins over the default.
        env: Environment variables to set, or with None to unset.
        name: The model's name in the API.
        log: Where the output goes. A temporary file if None.
        start_timeout_s: How long the server may take until it is healthy.
    """

    def __init__(
        self,
        model: Path | str,
        *args: str,
        env: Mapping[str, str | None] | None = None,
        name: str = "model",
        log: Path | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        super().__init__(
            [
                *[sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)],
                *["--served-model-name", name, *ARGUMENTS],
                *args,
            ],
            env={**ENVIRONMENT, **(env or {})},
            name=name,
            log=log,
            start_timeout_s=start_timeout_s,
        )
