"""What a trainer's experience buffer does without a format of its own.

It trusts what it reads: pickle runs whatever a blob tells it to. The single generations (`turns`),
which hold every token once more, are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import msgspec
import numpy as np
from safetensors.numpy import load, save

from recorder_core import Experience


def baseline_encode(experiences: Sequence[Experience]) -> bytes:
    """Every tensor a safetensors blob of its own, all pickled."""
    written = []
    for experience in experiences:
        fields = msgspec.structs.asdict(experience)
        tensors = {name: each for name, each in fields.items() if isinstance(each, np.ndarray)}
        rest = {name: each for name, each in fields.items() if name not in {*tensors, "turns"}}
        written.append((rest, {name: save({"_": array}) for name, array in tensors.items()}))
    return pickle.dumps(written)


def baseline_decode(blob: bytes) -> list[Experience]:
    """Read what `baseline_encode` wrote."""
    return [
        Experience(**rest, **{name: load(tensor)["_"] for name, tensor in tensors.items()})
        for rest, tensors in pickle.loads(blob)
    ]
