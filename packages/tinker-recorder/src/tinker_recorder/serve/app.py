"""The application: OpenAI's routes over a sampling client, and `/records`."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from tinker import types

from recorder_core.context import MISSING, current_identity
from recorder_core.drops import DropReason
from recorder_core.protocol import PREFIX
from recorder_core.recorder import Recorder
from recorder_core.server import AdminGuard, IdentityMiddleware, RecorderCollector, records_router
from recorder_core.view.pieces import pieces_of
from tinker_recorder.futures import plain
from tinker_recorder.serve.errors import APIError, error_response, of_the_service
from tinker_recorder.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    SamplerReply,
    SamplerRequest,
    SamplingRequest,
)
from tinker_recorder.serve.rendering import Answer, Rendering, plain_messages
from tinker_recorder.serve.samplers import SamplerPool
from tinker_recorder.turns import Call, Prompt, read_logprobs, read_tokens

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 2048


class Sampled(NamedTuple):
    """One sampled sequence, and what the agent is shown of it."""

    ids: list[int]
    logprobs: list[float]
    stop_reason: str
    answer: Answer


class Server:
    """Answers requests.

    Args:
        samplers: What samples.
        rendering: Between messages and ids.
        recorder: Where turns go.
        name: The model's name in the API.
        max_tokens: Where a request names no limit.
    """

    def __init__(
        self,
        samplers: SamplerPool,
        rendering: Rendering,
        recorder: Recorder,
        *,
        name: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.samplers = samplers
        self.rendering = rendering
        self.recorder = recorder
        self.name = name or samplers.base_model
        self.max_tokens = max_tokens
        self.started = int(time.time())

    def check(self, request: SamplingRequest) -> None:
        """Refuse what cannot be done.

        Raises:
            APIError: With what would be right.
        """
        known = (None, self.name, self.samplers.current.weights.label)
        if request.model not in known:
            raise APIError(
                f"the model {request.model!r} is not served here, {self.name!r} is",
                404,
                param="model",
                code="model_not_found",
            )
        field = request.unsupported()
        if field is not None:
            raise APIError(f"{field} asks for what Tinker cannot do; leave it out", param=field)

    async def sample(
        self,
        request: SamplingRequest,
        prompt_ids: list[int],
        max_tokens: int | None,
        read: Any,
    ) -> list[Sampled]:
        """Sample, and record; the record is stored before this returns.

        Args:
            request: How to sample.
            prompt_ids: The prompt.
            max_tokens: The request's limit.
            read: From a sequence's ids to its `Answer`; runs on a thread.

        Raises:
            APIError: Tinker did not sample.
        """
        sampler = self.samplers.current
        params = types.SamplingParams(
            max_tokens=max_tokens or self.max_tokens,
            seed=request.seed,
            stop=[*self.rendering.stop_ids, *request.stop_token_ids],
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=-1 if not request.top_k else request.top_k,
            top_p=1.0 if request.top_p is None else request.top_p,
        )
        call = self._call(request.n, params, prompt_ids)
        try:
            future = sampler.client.sample(
                types.ModelInput.from_ints(prompt_ids), request.n, params
            )
            response = await asyncio.wrap_future(plain(future))
        except Exception as error:
            # Of whatever type: the SDK raises ValueError for some of the service's refusals.
            if call is not None:
                call.drop(DropReason.FAILED)
            raise of_the_service(error) from error
        except BaseException:
            if call is not None:
                call.drop(DropReason.CANCELLED)
            raise
        try:
            sampled = await asyncio.to_thread(_read_all, response, read)
            details = [
                {"response_text": each.answer.text, "stop_reason": each.answer.stop_string}
                for each in sampled
            ]
        except Exception:
            details = []  # what cannot be shown was sampled all the same
            raise
        finally:
            if call is not None:
                stored = asyncio.get_running_loop().create_future()
                call.finish(response, sampler.weights, _thread_safe(stored), details)
                await stored
        return sampled

    def _call(self, n: int, params: Any, prompt_ids: list[int]) -> Call | None:
        identity = current_identity() or MISSING
        if identity.key is None:
            self.recorder.count_unkeyed(identity.reason, identity.detail)
            return None
        call = Call(self.recorder, identity, n, params, raises=False)
        call.prompt = Prompt(np.array(prompt_ids, dtype=np.int32))
        return call

    async def chat(self, request: ChatRequest) -> Response:
        """`POST /v1/chat/completions`."""
        self.check(request)
        if request.tool_choice not in (None, "auto", "none"):
            raise APIError("tool_choice can be 'auto' or 'none'", param="tool_choice")
        tools = request.tools if request.tool_choice != "none" else None
        key = (current_identity() or MISSING).key
        messages = plain_messages(request.messages)
        prompt_ids = await asyncio.to_thread(self.rendering.chat, key, messages, tools)
        sampled = await self.sample(
            request,
            prompt_ids,
            request.max_completion_tokens or request.max_tokens,
            lambda ids: self.rendering.parse(prompt_ids, ids, tools, request.stop),
        )
        shown = [_message(each.answer) for each in sampled]
        if key is not None:
            answers = [(m, s.ids) for m, s in zip(shown, sampled, strict=True)]
            self.rendering.remember(key, messages, tools, prompt_ids, answers)
        choices: list[dict[str, Any]] = []
        for index, (message, each) in enumerate(zip(shown, sampled, strict=True)):
            logprobs = None
            if request.logprobs and each.logprobs:
                logprobs = await asyncio.to_thread(self._chat_logprobs, each)
            choice = {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": _finish_reason(each),
                "stop_reason": each.answer.stop_string,
            }
            if request.return_token_ids:
                choice["token_ids"] = each.ids
            choices.append(choice)
        body = self._body("chat.completion", "chatcmpl", choices, [prompt_ids], sampled)
        if request.return_token_ids:
            body["prompt_token_ids"] = prompt_ids
        return _reply(body, request, _as_delta)

    async def complete(self, request: CompletionRequest) -> Response:
        """`POST /v1/completions`."""
        self.check(request)
        prompts = await asyncio.to_thread(
            lambda: [self.rendering.text(p) if isinstance(p, str) else p for p in request.prompts]
        )
        batches = await asyncio.gather(
            *(
                self.sample(
                    request,
                    ids,
                    request.max_tokens,
                    lambda ids: self.rendering.complete(ids, request.stop),
                )
                for ids in prompts
            )
        )
        choices: list[dict[str, Any]] = []
        for prompt_ids, batch in zip(prompts, batches, strict=True):
            for each in batch:
                logprobs = None
                if request.logprobs is not None and each.logprobs:
                    logprobs = await asyncio.to_thread(self._text_logprobs, each)
                choice = {
                    "index": len(choices),
                    "text": each.answer.content,
                    "logprobs": logprobs,
                    "finish_reason": _finish_reason(each),
                    "stop_reason": each.answer.stop_string,
                }
                if request.return_token_ids:
                    choice |= {"token_ids": each.ids, "prompt_token_ids": prompt_ids}
                choices.append(choice)
        sampled = [each for batch in batches for each in batch]
        body = self._body("text_completion", "cmpl", choices, prompts, sampled)
        return _reply(body, request, lambda choice: choice)

    def _body(
        self,
        kind: str,
        prefix: str,
        choices: list[dict[str, Any]],
        prompts: Sequence[list[int]],
        sampled: Sequence[Sampled],
    ) -> dict[str, Any]:
        asked, answered = sum(map(len, prompts)), sum(len(each.ids) for each in sampled)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": asked,
                "completion_tokens": answered,
                "total_tokens": asked + answered,
            },
        }

    def _chat_logprobs(self, sampled: Sampled) -> dict[str, Any]:
        pieces = self.rendering.pieces(sampled.ids)
        return {
            "content": [
                {
                    "token": piece,
                    "logprob": logprob,
                    "bytes": list(piece.encode()),
                    "top_logprobs": [],
                }
                for piece, logprob in zip(pieces, sampled.logprobs, strict=True)
            ]
        }

    def _text_logprobs(self, sampled: Sampled) -> dict[str, Any]:
        pieces = self.rendering.pieces(sampled.ids)
        offsets = np.cumsum([0, *map(len, pieces)])[:-1].tolist()
        return {
            "tokens": pieces,
            "token_logprobs": sampled.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        model = {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "tinker",
            "root": self.samplers.current.weights.label,
        }
        return {"object": "list", "data": [model]}

    async def swap(self, request: SamplerRequest) -> SamplerReply:
        """`POST /records/sampler`."""
        if not request.model_path.startswith("tinker://"):
            raise APIError("a sampler path begins with tinker://", param="model_path")
        try:
            sampler = await asyncio.to_thread(self.samplers.swap, request.model_path)
        except Exception as error:
            raise of_the_service(error) from error
        logger.info("Sampling from %s from now on", sampler.weights.label)
        return SamplerReply(version=sampler.weights.label or "")


def _read_all(response: Any, read: Any) -> list[Sampled]:
    sampled = []
    for sequence in response.sequences:
        ids = read_tokens(sequence).tolist()
        logprobs = read_logprobs(sequence)
        values = [] if logprobs is None else logprobs.tolist()
        sampled.append(Sampled(ids, values, str(sequence.stop_reason), read(ids)))
    return sampled


def _thread_safe(stored: asyncio.Future[None]) -> Any:
    loop = stored.get_loop()

    def settle() -> None:
        if not stored.done():  # the request may have been cancelled meanwhile
            stored.set_result(None)

    def complete(_: Exception | None) -> None:
        loop.call_soon_threadsafe(settle)

    return complete


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = list(answer.tool_calls)
    return message


def _finish_reason(sampled: Sampled) -> str:
    if sampled.answer.stop_string is not None:
        return "stop"
    return "tool_calls" if sampled.answer.tool_calls else sampled.stop_reason


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": n, **c} for n, c in enumerate(delta["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name != "message"}
    return {**rest, "delta": delta}


def _reply(body: dict[str, Any], request: SamplingRequest, delta: Any) -> Response:
    if not request.stream:
        return JSONResponse(body)
    return StreamingResponse(_events(body, request, delta), media_type="text/event-stream")


def _events(body: dict[str, Any], request: SamplingRequest, delta: Any) -> Iterator[str]:
    """One delta for each choice: Tinker samples whole sequences."""
    usage = body.pop("usage")
    choices = body.pop("choices")
    if body["object"] == "chat.completion":
        body["object"] = "chat.completion.chunk"
    for choice in choices:
        yield f"data: {json.dumps({**body, 'choices': [delta(choice)]})}\n\n"
    if request.include_usage:
        yield f"data: {json.dumps({**body, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def create_app(
    samplers: SamplerPool,
    rendering: Rendering,
    recorder: Recorder,
    *,
    name: str | None = None,
    guard: AdminGuard | None = None,
    api_key: str | None = None,
    secret: str | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> FastAPI:
    """The application.

    Args:
        samplers: What samples.
        rendering: Between messages and ids.
        recorder: Where turns go.
        name: The model's name in the API; the base model's by default.
        guard: Who may use `/records`; programs on this machine by default.
        api_key: What agents must know; they send it as `K:<record key>`.
        secret: What record keys have to be signed with; None: they are not signed.
        max_tokens: Where a request names no limit.
    """
    server = Server(samplers, rendering, recorder, name=name, max_tokens=max_tokens)
    guard = guard or AdminGuard(None)
    app = FastAPI(title="tinker-recorder")
    app.add_middleware(IdentityMiddleware, api_keys=[api_key] if api_key else [], secret=secret)

    def authorized(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = (
            token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        )
        if api_key and not hmac.compare_digest(given.encode("latin-1"), api_key.encode()):
            raise APIError("the API key is missing or wrong", 401, code="invalid_api_key")

    openai = APIRouter(prefix="/v1", dependencies=[Depends(authorized)])

    @openai.get("/models")
    async def models() -> dict[str, Any]:
        return server.models()

    @openai.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest) -> Response:
        return await server.chat(body)

    @openai.post("/completions", response_model=None)
    async def complete(body: CompletionRequest) -> Response:
        return await server.complete(body)

    admin = APIRouter(prefix=PREFIX, tags=["records"], dependencies=[Depends(guard)])

    @admin.post("/sampler")
    async def swap(body: SamplerRequest) -> SamplerReply:
        """Sample from other weights from now on."""
        return await server.swap(body)

    @admin.get("/sampler")
    async def sampler() -> SamplerReply:
        """What samples now."""
        return SamplerReply(version=samplers.current.weights.label or "")

    registry = CollectorRegistry()
    registry.register(RecorderCollector(recorder))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    app.include_router(openai)
    app.include_router(admin)
    pieces = functools.partial(pieces_of, rendering.tokenizer)
    app.include_router(records_router(recorder, guard=guard, pieces=pieces))
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def is_openai(request: Request) -> bool:
        return not request.url.path.startswith(PREFIX)

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error.response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: Mapping[str, Any] = error.errors()[0]
        where = [str(each) for each in first["loc"] if each != "body"]
        return error_response(
            f"{'.'.join(where)}: {first['msg']}", 400, param=".".join(where) or None
        )

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if is_openai(request):
            return error_response(str(error.detail), error.status_code)
        return JSONResponse(
            {"detail": error.detail}, status_code=error.status_code, headers=error.headers
        )

    async def fault(request: Request, error: Exception) -> Response:
        logger.error("%s failed", request.url.path, exc_info=error)
        return error_response("the server failed; its log says why", 500)

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)
