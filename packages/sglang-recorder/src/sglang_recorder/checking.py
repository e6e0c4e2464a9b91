"""The check at start: a generation must yield a record, or the server ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.utils import kill_process_tree

from recorder_core.errors import UnsupportedEngineError
from recorder_core.keys import RecordKey, sign
from recorder_core.local import LocalRecords
from recorder_core.protocol import KEY_HEADER
from recorder_core.recorder import Recorder
from sglang_recorder.hook import Hook

logger = logging.getLogger("sglang.recorder")

_KEY = RecordKey("sglang-recorder", "start-check", 0)
_TIMEOUT_S = 600.0


class Check:
    """Sends a request as a client would, and looks for its record.

    Args:
        installed: What is to record it.
        app: The application that it is sent to.
        secret: What record keys have to be signed with; None: they are not signed.
    """

    def __init__(self, installed: Hook, app: Any, secret: str | None) -> None:
        self._installed = installed
        self._app = app
        self._secret = secret

    def after(
        self,
        warm_up: Callable[..., Any],
        server_args: Any,
        loop: Callable[[], asyncio.AbstractEventLoop],
        process: int,
    ) -> Any:
        """SGLang's own warm-up, on its thread, and then the check.

        Args:
            warm_up: SGLang's own.
            server_args: SGLang's `ServerArgs`.
            loop: Gives the server's event loop, which there is after the warm-up.
            process: What ends, with all that it started, where nothing is recorded.
        """

        def judge(checking: Future[None]) -> None:
            if checking.cancelled() or (error := checking.exception()) is None:
                return
            logger.error(
                "--enable-recording: a generation yielded no record; the server ends",
                exc_info=error,
            )
            kill_process_tree(process)

        done = warm_up(server_args)
        if done:
            # Not waited for: a server that is told to end waits for this thread on that loop.
            checking = asyncio.wait_for(self.run(server_args), _TIMEOUT_S)
            asyncio.run_coroutine_threadsafe(checking, loop()).add_done_callback(judge)
        return done

    async def run(self, server_args: Any) -> None:
        """Check, on the server's event loop.

        Args:
            server_args: SGLang's `ServerArgs`.

        Raises:
            UnsupportedEngineError: There is no record, or it is of other tokens.
        """
        recorder = Recorder()
        self._installed.probe = (_KEY, recorder)
        try:
            output = await self._answer(server_args)
            await asyncio.to_thread(recorder.flush, _TIMEOUT_S)
            records = await asyncio.to_thread(LocalRecords(recorder).get)
        finally:
            self._installed.probe = None
            recorder.close()
        found = [record.response_ids.tolist() for record in records if record.logprobs is not None]
        if found != [output]:
            raise UnsupportedEngineError(
                f"the engine answered with the tokens {output}, recorded with logprobs were {found}"
            )

    async def _answer(self, server_args: Any) -> Any:
        body: dict[str, Any] = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        }
        if server_args.disaggregation_mode == "decode":
            # As SGLang's own warm-up: no prefill server takes part.
            body |= {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
        key = _KEY.text if self._secret is None else sign(_KEY, self._secret, _TIMEOUT_S)
        headers = {KEY_HEADER: key}
        if server_args.api_key:
            headers["Authorization"] = f"Bearer {server_args.api_key}"
        # Within this process: a request to the port may come out at another tokenizer worker.
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as http:
            reply = await http.post("/generate", json=body, headers=headers, timeout=None)
        return reply.raise_for_status().json()["output_ids"]
