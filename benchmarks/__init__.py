"""What recording costs: `python -m benchmarks` runs all, `python -m benchmarks.NAME` one."""

import os

# Standard output is for results; set here, as vLLM reads it when it is imported.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
