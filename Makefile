# Two commands: `make book` builds the site with its first page run live, `make test` checks everything.
# The environment, .venv, is made by either and brought up to date when what pyproject.toml or constraints.txt say
# changes (not when they are merely touched: the name of the stamp holds a checksum of both).

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do command -v $$name && break; done)
BIN := .venv/bin
ENVIRONMENT := .venv/.up-to-date-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PEERS := .venv-peers/.up-to-date
BRIAN := .venv-brian/.up-to-date

# Data files beside the checkout, where there are some; elsewhere the loaders download what they need.
ifneq ($(wildcard ../shared/data),)
export GP_THESIS_DATA ?= $(abspath ../shared/data)
endif

.PHONY: book site test peers brian clean

book: $(ENVIRONMENT)
	$(BIN)/nbdev-export
	rm -rf _live && cp -r nbs _live
	cd _live && ../$(BIN)/jupyter execute --inplace index.ipynb
	$(BIN)/python -m tools.site _live
	@echo "The book is built: open _docs/index.html in a browser, or serve it:"
	@echo "    $(BIN)/python -m http.server --bind 127.0.0.1 --directory _docs 8000"

site: $(ENVIRONMENT)
	$(BIN)/python -m tools.site

test: $(ENVIRONMENT)
	$(BIN)/python -m tools.check

peers: $(PEERS)
	.venv-peers/bin/python benchmarks/run.py

brian: $(BRIAN)
	.venv-brian/bin/python benchmarks/hodgkin_huxley.py

clean:
	rm -rf _docs _proc _live .cache .pytest_cache .hypothesis

$(ENVIRONMENT):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or later is needed: make PYTHON=...')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

$(PEERS): benchmarks/requirements-peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< --editable ".[data]"
	touch $@

$(BRIAN): benchmarks/requirements-brian.txt
	test -x .venv-brian/bin/python || $(PYTHON) -m venv .venv-brian
	.venv-brian/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@
