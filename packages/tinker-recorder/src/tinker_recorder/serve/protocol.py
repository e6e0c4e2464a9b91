"""The requests of the OpenAI API, as far as Tinker can do what they ask.

What would change the answer and cannot be done is refused; what would not is passed over.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

MAX_SAMPLES = 128

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}
"""Fields that Tinker has nothing for, with the values that ask for nothing."""

Stops = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])
]


class SamplingRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Stops = []
    """Texts; the reply ends before the first of them. The recorded ids go on."""
    stop_token_ids: list[int] = []
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    @field_validator("n", "stream", "return_token_ids", "stop_token_ids", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    def unsupported(self) -> str | None:
        """The first field that asks for what Tinker cannot do."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
                return name
        return None


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if not value or (isinstance(value, list) and not all(value) and 0 not in value):
            raise ValueError("a prompt must not be empty")
        return value


class SamplerRequest(BaseModel):
    """`POST /records/sampler`: what samples from now on."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_path: str = Field(min_length=1, max_length=1024)
    """A sampler path, `tinker://...`."""


class SamplerReply(BaseModel):
    """What samples now."""

    version: str
    """The sampler path, or the base model's name."""
