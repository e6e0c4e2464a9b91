"""A script that is run as it is, and the file of its records, written however it ends."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from recorder_core.codec import encode_runs
from recorder_core.context import record_key
from recorder_core.errors import RecorderError
from recorder_core.keys import KeyPrefix, RecordKey
from tinker_recorder.recorder import TinkerRecorder

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program at once, if it does not say otherwise."""


class RecordFile:
    """A file that is written whole, or not at all.

    Args:
        path: Its place.

    Raises:
        RecorderError: No file can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # now: the script may change its folder
        self._part = self.path.with_name(f".records-{os.getpid()}.part")
        if self.path.exists() and not self.path.is_file():
            raise RecorderError(f"--out {path} is there already and is no file: name another")
        try:
            self._part.touch()
            self._part.unlink()
        except OSError as error:
            raise RecorderError(
                f"--out {path} cannot be written ({error.strerror}): name a file in a folder that "
                "exists and that you may write to"
            ) from None

    def write(self, data: bytes) -> None:
        """Replace what is there.

        Raises:
            OSError: It cannot be written; what was there before still is.
        """
        try:
            self._part.write_bytes(data)
            self._part.replace(self.path)
        except OSError:
            self._part.unlink(missing_ok=True)
            raise


class Script:
    """Runs a Python script in this process, and writes what it sampled, once, when it ends.

    It ends when its threads and exit handlers have: by itself, by an exception, by Ctrl-C. A signal
    that ends it at once still does, after its records are written; its own handlers come first.

    Args:
        recorder: Records what it samples.
        out: Where the records go.
    """

    def __init__(self, recorder: TinkerRecorder, out: RecordFile) -> None:
        self._recorder = recorder
        self._out = out
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._written = False
        # A handler runs in the midst of the main thread's own work: it may not wait for a lock.
        self._signals: SimpleQueue[int] = SimpleQueue()

    def run(self, path: str, args: Sequence[str], key: RecordKey | None) -> None:
        """Run it to the end of its main thread.

        Args:
            path: The script.
            args: Its arguments.
            key: The record key of samples started where the script has none in force.
        """
        self._recorder.instrument()
        threading.Thread(target=self._end_by_signal, name="script-end", daemon=True).start()
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._take_signal)
        # First in, last out: after the script's threads and its own exit handlers.
        atexit.register(self._write_at_exit)
        # What a script sees when Python itself runs it.
        sys.argv = [path, *args]
        sys.path[0] = str(Path(path).resolve().parent)
        with ExitStack() as stack:
            if key is not None:
                stack.enter_context(record_key(key))
            runpy.run_path(path, run_name="__main__")

    def _take_signal(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process:
            self._signals.put(number)
        else:  # a forked child, which has no thread that listens
            os.kill(os.getpid(), number)

    def _end_by_signal(self) -> None:
        number = self._signals.get()
        try:
            self._write(f"ended by {signal.Signals(number).name}: ")
        finally:
            os.kill(self._process, number)

    def _write_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the records are its parent's to write
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut it off
        if not self._write():
            sys.stdout.flush()
            os._exit(1)  # raised here, an error would leave the exit status as it is

    def _write(self, how: str = "") -> bool:
        """Write the records and say so, the first time; returns whether they are written."""
        with self._lock:
            if self._written:
                return True
            self._recorder.close()
            runs = self._recorder.store.get(KeyPrefix())
            count = sum(len(run.records) for run in runs)
            stats = self._recorder.stats().recorder
            try:
                self._out.write(encode_runs(runs))
            except OSError as error:
                _say(f"error: {how}{count} records could not be written: {error}")
                return False
            self._written = True
            _say(
                f"{how}{stats.started} samples: {count} recorded in {self._out.path}, "
                f"{sum(stats.dropped.values())} dropped, {stats.pending} unfinished; "
                f"{sum(stats.unkeyed.values())} calls without a record key"
            )
            return True


def _say(text: str) -> None:
    # Not by way of logging, which is the script's to set up.
    sys.stderr.write(f"tinker-recorder: {text}\n")
    sys.stderr.flush()
