PYTHON ?= python3.11
NOX := .venv-tools/bin/nox

.PHONY: test lint types core vllm rollout demo demo-rl bench format clean

test: $(NOX)  ## everything that CI runs
	$(NOX)

# One session, with arguments for what it runs: make vllm ARGS="-k streamed"
lint format types core vllm rollout demo demo-rl bench: $(NOX)
	$(NOX) -s $@ -- $(ARGS)

$(NOX):
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet 'nox[uv]>=2025.5'

clean:
	rm -rf .venv-tools .nox .envs .models
