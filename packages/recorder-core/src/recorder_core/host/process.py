"""The launcher's side: it starts the recorder process, and starts it again if it dies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recorder_core.environment import ADMIN_KEY_VARIABLE, SECRET_VARIABLE
from recorder_core.errors import RecorderError
from recorder_core.host.messages import Folder
from recorder_core.options import RecordingOptions

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 30.0
_WELL_S = 60.0
"""A process that lived so long is started again at once."""


class HostProcess:
    """The recorder process of an engine with several front ends; it ends with this process.

    Args:
        options: What the flags said.

    Raises:
        ValueError: The folder for temporary files has too long a path.
        RecorderError: The process does not come up.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self.folder = Folder(Path(tempfile.mkdtemp(prefix="recorder-")))
        self.folder.check()
        # Read by nobody but this user, like the folder.
        self.folder.key.write_bytes(secrets.token_bytes(32))
        # Front ends ask for both: the recorder process has no use for them.
        self._options = options.model_copy(update={"admin_key": None, "secret": None})
        self._ending = threading.Event()
        self._launcher = os.getpid()
        self._process = self._start()
        self._wait_until_up()
        threading.Thread(target=self._keep, name="recorder-process", daemon=True).start()
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Of the recorder process now."""
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "recorder_core.host", str(self.folder.path)]
        ours = (ADMIN_KEY_VARIABLE, SECRET_VARIABLE)
        environment = {name: each for name, each in os.environ.items() if name not in ours}
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, and is seen to
            process.stdin.write(pickle.dumps(self._options))
            process.stdin.flush()
        return process

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not Path(self.folder.http).exists():
            code = self._process.poll()
            if code is None and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            self.close()
            how = "did not come up in time" if code is None else f"ended with exit code {code}"
            raise RecorderError(f"the recorder process {how}; what it printed says why")

    def _keep(self) -> None:
        pause = 0.0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if self._ending.is_set():
                return
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            lived = time.monotonic() - began
            pause = 0.0 if lived > _WELL_S else min(2 * pause + 0.1, _LONGEST_PAUSE_S)
            logger.error(
                "The recorder process ended (exit code %d); it is started again in %.1f s. What it "
                "had in memory is gone; generations that finish meanwhile are dropped: store_down",
                code,
                pause,
            )
            if self._ending.wait(pause):
                return
            self._process = self._start()

    def close(self) -> None:
        """End the process, which says what nobody has drained."""
        if os.getpid() != self._launcher or self._ending.is_set():
            return  # a child that was forked, or done before
        self._ending.set()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b".")  # processes forked from this one hold it open
            self._process.stdin.close()
            self._process.wait(_END_TIMEOUT_S)
        except BrokenPipeError:
            pass  # it has ended
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self.folder.path, ignore_errors=True)
