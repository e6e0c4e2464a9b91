"""Numpy arrays as fields of pydantic models: coerced once, shown as lists in JSON."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

AnyArray = npt.NDArray[Any]


class ArrayModel(BaseModel):
    """Base of the schema's models: immutable, equal by content, keeps fields it does not know.

    A field that a newer version wrote survives a round trip through an older one.
    """

    model_config = ConfigDict(frozen=True, extra="allow", arbitrary_types_allowed=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayModel) or type(self) is not type(other):
            return NotImplemented
        mine, theirs = dict(self), dict(other)
        return mine.keys() == theirs.keys() and all(
            _equal(mine[name], theirs[name]) for name in mine
        )

    __hash__ = object.__hash__


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        # NaN marks a value that the engine did not give: two such are the same.
        nan = left.dtype.kind == "f" and right.dtype.kind == "f"
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=nan)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


def _to_list(array: AnyArray) -> list[Any]:
    values: list[Any] = array.tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # JSON has no NaN: what is missing is null.
        return [value if np.isfinite(value) else None for value in values]
    return values


def _checked_cast(array: AnyArray, wanted: np.dtype[Any]) -> AnyArray:
    if array.dtype == wanted:
        return array
    if array.size and wanted.kind in "iu" and array.dtype.kind in "iu":
        low, high, limits = array.min(), array.max(), np.iinfo(wanted)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"values from {low} to {high} do not fit {wanted.name} "
                f"({limits.min} to {limits.max})"
            )
    elif array.size and not np.can_cast(array.dtype, wanted, casting="same_kind"):
        raise ValueError(f"an array of {array.dtype.name} is no array of {wanted.name}")
    return array.astype(wanted)


def _read_once(value: Any, wanted: np.dtype[Any]) -> AnyArray:
    """Memory is shared where there is some to share; a list is read straight into the dtype."""
    if isinstance(value, (np.ndarray, array, bytes, bytearray, memoryview)):
        return np.asarray(value)
    if wanted == np.int32 and isinstance(value, Sequence):
        # numpy would cut 1.5 down to 1, and numpy 1 would wrap what does not fit; this refuses.
        return np.asarray(array("i", value))
    return np.asarray(value, dtype=wanted)


def _vector_of(dtype: npt.DTypeLike) -> Callable[[Any], AnyArray]:
    wanted = np.dtype(dtype)

    def coerce(value: Any) -> AnyArray:
        if isinstance(value, np.ndarray) and value.dtype == wanted and value.ndim == 1:
            return value  # as it mostly is: the context below would take most of the time
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            try:
                values = _read_once(value, wanted)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"not an array of {wanted.name}: {error}") from None
            if values.ndim != 1:
                raise ValueError(f"the array has {values.ndim} dimension(s), 1 expected")
            return _checked_cast(values, wanted)

    return coerce


def _expert_ids(value: Any) -> AnyArray:
    array = np.asarray(value)
    if array.ndim != 3:
        raise ValueError(
            f"routed experts have {array.ndim} dimension(s), expected [rows, layers, top_k]"
        )
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype.kind not in "iu":
        raise ValueError(f"expert ids must be integers, not {array.dtype.name}")
    # The narrower of the two that holds every id: 512 experts need uint16.
    return _checked_cast(array, np.dtype(np.uint8 if array.max(initial=0) < 256 else np.uint16))


@dataclass(frozen=True)
class _ArraySchema:
    coerce: Callable[[Any], AnyArray]
    item: str
    ndim: int = 1

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.coerce,
            serialization=core_schema.plain_serializer_function_ser_schema(
                _to_list, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described: JsonSchemaValue = {"type": self.item}
        for _ in range(self.ndim):
            described = {"type": "array", "items": described}
        return described


Int32Array = Annotated[npt.NDArray[np.int32], _ArraySchema(_vector_of(np.int32), "integer")]
Float32Array = Annotated[npt.NDArray[np.float32], _ArraySchema(_vector_of(np.float32), "number")]
BoolArray = Annotated[npt.NDArray[np.bool_], _ArraySchema(_vector_of(np.bool_), "boolean")]
ExpertIds = Annotated[AnyArray, _ArraySchema(_expert_ids, "integer", ndim=3)]
