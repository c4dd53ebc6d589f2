# Everything a bare machine needs is python3 (3.11 or newer, with venv and pip) and make.
# `make train PYTHON=python3.12` chooses another interpreter.

PYTHON ?= python3
RUN := .venv/bin/python -m

.PHONY: train test test-all check clean

train: .venv/.plots.done
	.venv/bin/zeromesh train examples/stdlib.json --set run.output=runs/stdlib-$$(date +%Y%m%d-%H%M%S)

test: .venv/.test.done
	$(RUN) pytest

test-all: .venv/.test.done
	.venv/bin/python tools/test_all.py

check: .venv/.test.done
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy zeromesh
	.venv/bin/python tools/check_layers.py
	$(RUN) zeromesh.config.reference --check

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# The environment with the extras of one name, again whenever the requirements change.
.venv/.%.done: pyproject.toml constraints.txt tools/setup.py
	$(PYTHON) tools/setup.py $*
