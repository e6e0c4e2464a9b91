"""What uvicorn imports in each of several tokenizer workers."""

from sglang_recorder.workers import application

app = application()
