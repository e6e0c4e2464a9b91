"""What callers give as arrays, made into numpy arrays of the schema's dtypes, or refused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


def int32(value: Any, name: str = "") -> Int32Array:
    """Token ids: int32 [n].

    Raises:
        ValueError: Another shape, or values that are no integers or do not fit.
    """
    return _vector(value, _INT32, name)


def float32(value: Any, name: str = "") -> Float32Array:
    """Logprobs, rewards and the like: float32 [n]; what float32 cannot hold becomes infinite.

    Raises:
        ValueError: Another shape, or values that are no numbers.
    """
    return _vector(value, _FLOAT32, name)


def boolean(value: Any, name: str = "") -> BoolArray:
    """Masks: bool [n].

    Raises:
        ValueError: Another shape, or values that are no booleans.
    """
    return _vector(value, _BOOL, name)


def expert_ids(value: Any) -> AnyArray:
    """Expert ids: uint8 or uint16 [rows, layers, top_k], the narrower that holds every id.

    Raises:
        ValueError: Another shape, or values that are no integers or do not fit.
    """
    ids = np.asarray(value)
    if ids.ndim != 3:
        raise ValueError(
            f"routed experts have {ids.ndim} dimension(s), expected [rows, layers, top_k]"
        )
    if ids.dtype in (np.uint8, np.uint16):
        return ids
    if ids.dtype.kind not in "iu":
        raise ValueError(f"expert ids must be integers, not {ids.dtype.name}")
    return _cast(ids, np.dtype(np.uint8 if ids.max(initial=0) < 256 else np.uint16))


def equal(left: Any, right: Any) -> bool:
    """Whether two values are equal; NaN, which marks a value that is not there, equals itself."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        nan = left.dtype.kind == "f" and right.dtype.kind == "f"
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=nan)
    return bool(left == right)


def _vector(value: Any, wanted: np.dtype[Any], name: str) -> AnyArray:
    if isinstance(value, np.ndarray) and value.dtype == wanted and value.ndim == 1:
        return value  # as it mostly is: the context below would take most of the time
    try:
        with np.errstate(over="ignore"):
            values = _read_once(value, wanted)
            if values.ndim != 1:
                raise ValueError(f"the array has {values.ndim} dimension(s), 1 expected")
            return _cast(values, wanted)
    except (TypeError, ValueError, OverflowError) as error:
        where = f"{name}: " if name else ""
        raise ValueError(f"{where}not an array of {wanted.name}: {error}") from None


def _read_once(value: Any, wanted: np.dtype[Any]) -> AnyArray:
    """Memory is shared where there is some to share; a list is read straight into the dtype."""
    if isinstance(value, (np.ndarray, array, bytes, bytearray, memoryview)):
        return np.asarray(value)
    if wanted == np.int32 and isinstance(value, Sequence):
        # numpy would cut 1.5 down to 1, and numpy 1 would wrap what does not fit; this refuses.
        return np.asarray(array("i", value))
    return np.asarray(value, dtype=wanted)


def _cast(values: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    if values.dtype == wanted:
        return values
    if values.size and wanted.kind in "iu" and values.dtype.kind in "iu":
        low, high, limits = values.min(), values.max(), np.iinfo(wanted)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"values from {low} to {high} do not fit {wanted.name} "
                f"({limits.min} to {limits.max})"
            )
    elif values.size and not np.can_cast(values.dtype, wanted, casting="same_kind"):
        raise ValueError(f"an array of {values.dtype.name} is no array of {wanted.name}")
    return values.astype(wanted)
