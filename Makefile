PYTHON    ?= python3
PARTITION ?= balanced
BIN       := .venv/bin

.PHONY: demo test check bench

demo: .venv/installed
	$(BIN)/zenps launch --workers 2 --servers 2 --set sync.partition=$(PARTITION) -- $(BIN)/python examples/lstm_lm.py

test: .venv/installed
	$(BIN)/pytest

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# mypy does not know setup.cfg's mapping: it is shown the tree as it is imported.
	rm -rf build/typed && mkdir -p build/typed/zenps
	ln -s $(addprefix $(CURDIR)/,$(wildcard zenps/*) worker server scheduler) build/typed/zenps/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p zenps

bench: .venv/installed
	$(BIN)/python benchmarks/bench_sync.py --quick

.venv: .venv/installed

.venv/installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,lint,bench]'
	touch $@
