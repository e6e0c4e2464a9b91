"""JSON bodies that routes read themselves, so that one that is too large is not read at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel

from recorder_core.protocol import MAX_BODY_BYTES

Body = TypeVar("Body", bound=BaseModel)


def reads(model: type[BaseModel]) -> dict[str, Any]:
    """Describes a body that the route reads itself."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema that refers to no definitions beside it, where OpenAPI has none."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}


async def read_body(model: type[Body], request: Request) -> Body:
    """A request's JSON body.

    Raises:
        HTTPException: 413.
        ValidationError: It is not what the model says.
    """
    text = bytearray()
    async for piece in request.stream():
        text += piece
        if len(text) > MAX_BODY_BYTES:
            raise HTTPException(
                413, f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is read"
            )
    return model.model_validate_json(bytes(text))
