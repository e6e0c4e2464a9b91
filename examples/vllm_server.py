"""Start stock `vllm serve` as a child process, with settings for a small CPU machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

from examples.engine_server import EngineServer

# What a small offline machine needs; everything else is vLLM's default.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Stock vLLM drops kept-alive connections after 5 s: "Server disconnected" under load.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMServer(EngineServer):
    """One `vllm serve MODEL` on a free loopback port, stopped when the block ends.

        with VLLMServer(model, "--enable-recording") as server:
            client = OpenAI(base_url=f"{server.base_url}/v1", api_key="batch/task/0")

    Args:
        model: The model's folder.
        *args: More arguments of `vllm serve`. One given here wins over the default.
        env: Environment variables to set, or with None to unset.
        name: The model's name in the API.
        command: The `vllm` command; by default that of the running environment.
        log: Where the output goes. A temporary file if None.
        start_timeout_s: How long the server may take until it is healthy.
    """

    def __init__(
        self,
        model: Path | str,
        *args: str,
        env: Mapping[str, str | None] | None = None,
        name: str = "model",
        command: str | None = None,
        log: Path | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        super().__init__(
            [
                *[command or str(Path(sysconfig.get_path("scripts"), "vllm")), "serve", str(model)],
                *["--served-model-name", name, "--max-model-len", "2048", "--enforce-eager"],
                *args,
            ],
            env={**ENVIRONMENT, **(env or {})},
            name=name,
            log=log,
            start_timeout_s=start_timeout_s,
        )
