# Everything a user calls. `make study` is the main job; nothing else is needed on Linux or macOS.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/.tools

.PHONY: help study test lint format lab constraints clean
help:
	@echo "make study   set up, measure everything here, build site/index.html"
	@echo "make lab     open the notebooks in JupyterLab"
	@echo "make test    set up and run the tests"
	@echo "make lint    check style"

study: $(STAMP)
	@$(BIN)/python -m flashstudy study

test: $(TOOLS)
	@$(BIN)/python -m flashstudy fetch
	$(BIN)/python -m pytest

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --extra-keys "metadata.papermill cell.metadata.papermill metadata.language_info" notebooks/*.ipynb

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/nbstripout --extra-keys "metadata.papermill cell.metadata.papermill metadata.language_info" notebooks/*.ipynb

# Results of notebooks run by hand land beside those of the runner; the wheels are fetched so that the first cell does not wait.
lab: $(TOOLS)
	@$(BIN)/python -m flashstudy fetch
	FLASHSTUDY_RESULTS="$(CURDIR)/results" $(BIN)/jupyter lab --notebook-dir "$(CURDIR)" \
		--LabApp.news_url=None --LabApp.default_url="/lab/tree/notebooks/README.md"

# A new environment is made only when the dependencies change. What only tests, style checks and JupyterLab need comes
# when it is first asked for: without it the first answer is there a minute earlier.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
		"flashstudy needs Python 3.11 to 3.13, found " + sys.version.split()[0] + "; choose one with: make study PYTHON=python3.12")'
	@echo "Setting up .venv (once, about two minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(TOOLS): $(STAMP)
	@echo "Adding JupyterLab and the developers' tools to .venv (once, about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Regenerates constraints.txt from pyproject.toml; local builds and this project itself are left out of the list.
constraints: $(TOOLS)
	@echo "torch==2.13.0" > .pin.in
	$(BIN)/pip-compile --quiet --upgrade --all-extras -c .pin.in --strip-extras --no-annotate --no-header --no-emit-index-url \
		--no-emit-find-links -o .constraints.tmp pyproject.toml
	@sed -e '/file:/d' -e '/^#/d' -e '/^$$/d' -e 's/+cpu$$//' .constraints.tmp > constraints.txt
	@rm -f .constraints.tmp .pin.in

clean:
	rm -rf results site
