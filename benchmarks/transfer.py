"""Codec and drain throughput, against pickle and a safetensors blob per tensor and experience.

The baseline is what a trainer's experience buffer does without a format of its own. It trusts
what it reads: pickle runs whatever a blob tells it to, and nothing is validated.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Response
from safetensors.numpy import load, save

from benchmarks import generations
from benchmarks.harness import Row, main, microseconds, no_gc, progress, row
from recorder_core import (
    Experience,
    Record,
    Recorder,
    assemble,
    decode_experiences,
    decode_records,
    encode_experiences,
    encode_records,
)
from recorder_core.client import RecordClient
from recorder_core.server import AdminGuard, records_router


def baseline_encode(experiences: Sequence[Experience]) -> bytes:
    """Every tensor a blob of its own, all pickled."""
    written = []
    for experience in experiences:
        tensors = {name: value for name, value in experience if isinstance(value, np.ndarray)}
        rest = experience.model_copy(update=dict.fromkeys(tensors))
        written.append((rest, {name: save({"_": array}) for name, array in tensors.items()}))
    return pickle.dumps(written)


def baseline_decode(blob: bytes) -> list[Experience]:
    """Read what `baseline_encode` wrote."""
    return [
        rest.model_copy(update={name: load(tensor)["_"] for name, tensor in tensors.items()})
        for rest, tensors in pickle.loads(blob)
    ]


def baseline_app(blob_of: Callable[[], bytes]) -> FastAPI:
    """A server that hands experiences out the baseline's way."""
    app = FastAPI()

    @app.get("/baseline")
    def drain() -> Response:  # on a thread, as ours does
        return Response(blob_of(), media_type="application/octet-stream")

    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """An application on a loopback port, in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class Rates:
    """Times of one way of moving the same records, as rates and per record."""

    def __init__(self, name: str, count: int, size: int) -> None:
        self.name, self.count, self.size = name, count, size
        self.microseconds: list[float] = []

    def rows(self, baseline: Rates | None = None) -> list[Row]:
        seconds = np.array(self.microseconds) / 1e6
        rows = [
            row(self.name, "MB/s", (self.size / 1e6 / seconds).tolist()),
            row(f"{self.name}, each", "/s", (self.count / seconds).tolist()),
        ]
        if baseline is not None:
            ratio = seconds / (np.array(baseline.microseconds) / 1e6)
            rows.append(row(f"{self.name}: time against the baseline's", "x", ratio.tolist()))
        return rows


def codec_rows(name: str, records: list[Record], repeats: int) -> list[Row]:
    """The formats alone, in memory."""
    experiences = assemble(records)
    blob, theirs = encode_experiences(experiences), baseline_encode(experiences)
    packed = encode_records(records)
    assert decode_experiences(blob) == baseline_decode(theirs) == experiences
    steps: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
        "encode experiences": (encode_experiences, experiences, len(blob)),
        "baseline: encode experiences": (baseline_encode, experiences, len(theirs)),
        "decode experiences": (decode_experiences, blob, len(blob)),
        "baseline: decode experiences": (baseline_decode, theirs, len(theirs)),
        "encode records": (encode_records, records, len(packed)),
        "decode records": (decode_records, packed, len(packed)),
    }
    rates = {
        step: Rates(f"{name}: {step}", len(records if "records" in step else experiences), size)
        for step, (_, _, size) in steps.items()
    }
    for _ in range(repeats):  # in turn: what disturbs one disturbs the others
        for step, (function, argument, _) in steps.items():
            with no_gc():
                rates[step].microseconds.append(microseconds(function, argument))
    rows = [row(f"{name}: blob size against the baseline's", "x", [len(blob) / len(theirs)])]
    for step, each in rates.items():
        rows += each.rows(rates.get(f"baseline: {step}"))
    return rows


def drain_rows(name: str, records: list[Record], repeats: int) -> list[Row]:
    """Over HTTP: from the server's store to experiences in the trainer's hands."""
    experiences = assemble(records)
    recorder = Recorder()
    app = baseline_app(lambda: baseline_encode(experiences))
    app.include_router(records_router(recorder, guard=AdminGuard(None)))
    size, theirs = len(encode_records(records)), len(baseline_encode(experiences))
    drained = Rates(f"{name}: drain, records", len(records), size)
    assembled = Rates(f"{name}: drain, experiences", len(experiences), size)
    baseline = Rates(f"{name}: baseline drain, experiences", len(experiences), theirs)
    with serving(app) as url, RecordClient(url) as client, httpx.Client(base_url=url) as http:
        for _ in range(repeats):
            for record in records:
                recorder.store.add(record)
            with no_gc():
                begin = time.perf_counter_ns()
                lease = client.lease("bench")
                client.ack(lease)
                middle = time.perf_counter_ns()
                found = lease.experiences
                end = time.perf_counter_ns()
                baseline.microseconds.append(
                    microseconds(lambda: baseline_decode(http.get("/baseline").content))
                )
            assert len(found) == len(experiences)
            drained.microseconds.append((middle - begin) / 1000)
            assembled.microseconds.append((end - begin) / 1000)
    recorder.close()
    return [*drained.rows(), *assembled.rows(baseline), *baseline.rows()]


def measure(quick: bool) -> list[Row]:
    runs, repeats = (2, 2) if quick else (20, 15)
    singles = [generations.single(512, 512) for _ in range(25 * runs)]
    talks = [turn for _ in range(runs) for turn in generations.conversation(20, 512, 128, 256)]
    rows = []
    for name, turns in {"512 + 512": singles, "20 turns": talks}.items():
        progress(f"transfer: {name}")
        records = generations.recorded(turns)
        rows += codec_rows(name, records, repeats)
        rows += drain_rows(name, records, repeats)
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
