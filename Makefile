PYTHON ?= python3.11
NOX := .venv-tools/bin/nox

.PHONY: test test-engines test-rest test-all lint types docs core vllm sglang tinker trainers transfer-queue harbor rollout view format clean
.PHONY: canary demo view-demo demo-sglang demo-tinker demo-rl demo-trl soak bench bench-peers bench-tinker

test: test-engines test-rest  ## what each change must pass; make -j2 test: both halves at once

test-engines test-rest: test-%: $(NOX)
	$(NOX) -t $*

test-all: export HYPOTHESIS_PROFILE = full
test-all: $(NOX)  ## the same in every engine version, and property tests with many examples
	$(NOX) -s lint types docs core vllm sglang tinker trainers transfer-queue harbor rollout view

# One session, with arguments for what it runs: make vllm ARGS="-k streamed"
lint format types docs core vllm sglang tinker trainers transfer-queue harbor rollout view canary demo view-demo demo-sglang demo-tinker demo-rl demo-trl soak bench bench-peers bench-tinker: $(NOX)
	$(NOX) -s $@ -- $(ARGS)

$(NOX):
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet 'nox[uv]>=2025.5'

clean:
	rm -rf .venv-tools .nox .envs .models site
