"""A front end in a process of its own, that does what it reads on its input, line by line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from recorder_core import RecordKey, Turn
from recorder_core.host.messages import Folder
from recorder_core.host.relay import Relay


def turn(key: str, prompt: list[int], response: list[int], **fields: object) -> Turn:
    now = time.time()
    given = {"finish_reason": "stop", "created_at": now, "finished_at": now, **fields}
    given.setdefault("logprobs", [-0.5] * len(response))
    return Turn(key=RecordKey.parse(key), prompt_ids=prompt, response_ids=response, **given)


def main() -> None:
    relay = Relay(Folder(Path(sys.argv[1])))
    pending = []
    print("ready", flush=True)
    for line in sys.stdin:
        command, *keys = line.split()
        for key in keys:
            if command == "start":
                pending.append(relay.start(RecordKey.parse(key)))
            else:
                relay.submit(turn(key, [1, 2], [3, 4]))
        print("done", flush=True)


if __name__ == "__main__":
    main()
