# The two commands of a newcomer are `make demo` and `make test`; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SKILL := skills/pytrio-skill
DRYRUN := $(BIN)/python $(SKILL)/scripts/dryrun.py
# Torch's threads spin; one is the fastest choice on a shared machine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow mutation docs-check lint format package install-local bench clean

demo: $(VENV)/.ready
	$(DRYRUN) run $(SKILL)/examples/quickstart_sft.py

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

mutation: $(VENV)/.ready-dev
	$(BIN)/python tests/mutants/run.py

docs-check: $(VENV)/.ready-dev
	$(BIN)/python scripts/check_docs.py

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SKILL)/scripts/dryrun.py $(SKILL)/scripts/trio_local \
		$(SKILL)/scripts/audit $(SKILL)/scripts/lint $(SKILL)/scripts/probe \
		$(SKILL)/examples scripts evals/*.py
	$(BIN)/python scripts/package.py --check

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package:
	$(PYTHON) scripts/package.py

# AGENT=claude-code or codex; for one project also SCOPE=project DIR=its-folder.
install-local:
	$(PYTHON) scripts/install_local.py --agent "$(AGENT)" \
		$(if $(SCOPE),--scope "$(SCOPE)") $(if $(DIR),--dir "$(DIR)")

bench: $(VENV)/.ready
	$(BIN)/python scripts/bench.py

# Installed again only when a requirements file changed.
$(VENV)/.ready: requirements.txt $(SKILL)/scripts/requirements.txt scripts/make_venv.py
	$(PYTHON) scripts/make_venv.py $(VENV) requirements.txt
	@touch $@

$(VENV)/.ready-dev: requirements-dev.txt $(VENV)/.ready
	$(PYTHON) scripts/make_venv.py $(VENV) requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .trio-local
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
