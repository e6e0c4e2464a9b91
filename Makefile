PYTHON ?= python3.11
NOX := .venv-tools/bin/nox

.PHONY: test test-engines test-rest test-all lint types core vllm sglang tinker rollout format clean
.PHONY: demo demo-sglang demo-tinker demo-rl bench bench-tinker

test: test-engines test-rest  ## what each change must pass; make -j2 test: both halves at once

test-engines test-rest: test-%: $(NOX)
	$(NOX) -t $*

test-all: $(NOX)  ## the same in every engine version
	$(NOX) -s lint types core vllm sglang tinker rollout

# One session, with arguments for what it runs: make vllm ARGS="-k streamed"
lint format types core vllm sglang tinker rollout demo demo-sglang demo-tinker demo-rl bench bench-tinker: $(NOX)
	$(NOX) -s $@ -- $(ARGS)

$(NOX):
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet 'nox[uv]>=2025.5'

clean:
	rm -rf .venv-tools .nox .envs .models
