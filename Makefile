# Everything a bare machine needs is python3 (3.11 or newer, with venv and pip) and make.
# `make train PYTHON=python3.12` chooses another interpreter.

PYTHON ?= python3
RUN := .venv/bin/python -m
# Where it is set, each of thousands of processes in the tests would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all coverage bench bench-tensor bench-pipeline bench-links bench-kernel bench-offload bench-nvme bench-plan bench-tables bench-scale gpu validate-plan check docs docs-serve wheels pythons clean bench-examples

# With what README's "Fine-tune" needs, too.
train: .venv/.hf,plots.done
	.venv/bin/zeromesh train examples/stdlib.json --set run.output=runs/stdlib-$$(date +%Y%m%d-%H%M%S)

# Two tests at a time: most wait for processes that they have started. Each worker begins with half of the files, in order,
# so that the tests of a file share what they have started; the one that is done first takes tests of the other.
# `make test COVERAGE=1 && make coverage` prints the share of lines that they run, by file, and fails below 85 %.
test: .venv/.test.done
	$(RUN) $(if $(COVERAGE),coverage run -m) pytest --numprocesses 2 --dist worksteal --durations 60 --durations-min 2

coverage:
	$(RUN) coverage combine --quiet
	$(RUN) coverage report

test-all: .venv/.test.done
	.venv/bin/python tools/test_all.py

# `make bench CASES="communication-bf16" ROUNDS=3 OUT=runs/bench` narrows it, and writes elsewhere than to docs/benchmarks.
bench: .venv/.plots.done .venv/.mpi.done .venv-deepspeed/.peers.done
	.venv/bin/python benchmarks/bench.py $(if $(CASES),--cases $(CASES)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(OUT),--out $(OUT))

# Tensor parallelism beside torch's: step time, and memory per rank.
bench-tensor: .venv/.plots.done .venv/.mpi.done
	.venv/bin/python benchmarks/bench.py --ranks 2 --name tensor --cases $(or $(CASES),compute-bf16) \
		--rounds $(or $(ROUNDS),5) $(if $(OUT),--out $(OUT)) --variants floor DDP "torch tensor parallel" \
		"ZeroMesh tensor parallel" "ZeroMesh tensor parallel, sequence" "ZeroMesh tensor parallel, mpi" \
		"ZeroMesh tensor parallel, sequence, mpi" "ZeroMesh tensor parallel, traced"
	.venv/bin/python benchmarks/tensor_memory.py $(if $(OUT),--out $(OUT))

# Pipelines: stages that sleep, against the formulas; and step time beside torch's and DeepSpeed's.
bench-pipeline: .venv/.plots.done .venv/.mpi.done .venv-deepspeed/.peers.done
	.venv/bin/python benchmarks/pipeline_bubble.py $(if $(OUT),--out $(OUT))
	.venv/bin/python benchmarks/bench.py --ranks 2 --name pipeline --cases $(or $(CASES),compute-bf16) \
		--rounds $(or $(ROUNDS),5) $(if $(OUT),--out $(OUT)) --variants floor DDP "torch pipeline, 1f1b" \
		"torch pipeline, zb-h1" "ZeroMesh pipeline, 1f1b" "ZeroMesh pipeline, zb-h1" "ZeroMesh pipeline, 1f1b, mpi" \
		"ZeroMesh pipeline, zb-h1, mpi" "DeepSpeed pipeline"

# Two hosts over the rate of their link. `make bench-links RATES="10mbit unlimited" ROUNDS=1 OUT=runs/links` narrows it.
bench-links: .venv/.plots.done
	.venv/bin/python benchmarks/links.py $(if $(RATES),--rates $(RATES)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(OUT),--out $(OUT))

# The update on the host beside torch's and DeepSpeed's.
bench-kernel: .venv/.plots.done .venv-deepspeed/.peers.done
	.venv/bin/python benchmarks/kernel.py $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(OUT),--out $(OUT))

# States on the host beside the same rows without, and DeepSpeed's: `make bench-offload RANKS=1 ROUNDS=3 OUT=runs/offload`.
bench-offload: .venv/.plots.done .venv-deepspeed/.peers.done
	.venv/bin/python benchmarks/bench.py --ranks $(or $(RANKS),2) --name offload --cases $(or $(CASES),compute-bf16) \
		--rounds $(or $(ROUNDS),5) $(if $(OUT),--out $(OUT)) --variants floor "ZeroMesh 2" "ZeroMesh 2, host" \
		"ZeroMesh 3" "ZeroMesh 3, host" "ZeroMesh 3, all on host" "ZeroMesh 3, nvme" "DeepSpeed 2" "DeepSpeed 2, CPU offload"

# The NVMe tier beside other ways to a disk: `make bench-nvme FOLDER=/mnt/nvme ROUNDS=3 OUT=runs/nvme`.
bench-nvme: .venv/.plots.done
	.venv/bin/python benchmarks/nvme.py $(if $(FOLDER),--folder $(FOLDER)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(OUT),--out $(OUT))

# Embedding tables over their size, beside DDP and torchrec: `make bench-tables ROUNDS=3 TORCHREC=~/torchrec/bin/python`.
bench-tables: .venv/.plots.done
	.venv/bin/python benchmarks/tables.py $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(TORCHREC),--torchrec $(TORCHREC)) \
		$(if $(OUT),--out $(OUT))

# What grows with the number of ranks: `make bench-scale ROUNDS=1 OUT=runs/scale`.
bench-scale: .venv/.plots.done
	.venv/bin/python benchmarks/scale.py $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(OUT),--out $(OUT))

# The planner's predictions beside this machine: `make bench-plan ROUNDS=1 OUT=runs/plan`; it goes on where it was ended.
bench-plan: .venv/.plots.done
	.venv/bin/python benchmarks/plan_layouts.py $(if $(ROUNDS),--rounds $(ROUNDS)) \
		--out $(or $(OUT),docs/benchmarks)/$(or $(DATE),$(shell date +%Y-%m-%d))-plan.json
	.venv/bin/python benchmarks/plan_page.py $(or $(OUT),docs/benchmarks)/$(or $(DATE),$(shell date +%Y-%m-%d))-plan.json

# The planner's predictions beside published figures: `make validate-plan ROWS=FILE OUT=PAGE` for other rows.
validate-plan: .venv/.test.done
	.venv/bin/python benchmarks/validate_plan.py $(or $(ROWS),benchmarks/published-rows.json) \
		--markdown $(or $(OUT),docs/plan-report-card.md)

# One large GPU: all checks and measurements in at most 90 minutes, without installation or network. `make gpu MINUTES=9` ends
# before; the same command goes on. `make gpu REHEARSE=1 OUT=runs/gpu` runs all steps in a small form on the CPU.
gpu:
	$(or $(wildcard .venv/bin/python),$(PYTHON)) benchmarks/gpu.py $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(OUT),--out $(OUT)) $(if $(DATE),--date $(DATE)) $(if $(ONLY),--only "$(ONLY)") \
		$(if $(HOST_GIB),--host-gib $(HOST_GIB)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REHEARSE),--rehearse)

# Each example beside plain torch and DDP: `make bench-examples EXAMPLES="vision bert" SEEDS="0 1"`.
bench-examples: .venv/.test.done
	.venv/bin/python benchmarks/compare_examples.py $(EXAMPLES) $(if $(SEEDS),--seeds $(SEEDS))

check: .venv/.test.done
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy zeromesh
	.venv/bin/python tools/check_layers.py
	.venv/bin/python tools/check_structure.py
	$(RUN) pytest --collect-only --quiet --quiet
	.venv/bin/python tools/config_reference.py --check
	$(MAKE) docs

# The manual as a site, in build/site. A link or an anchor that leads nowhere is an error, unless --quiet hides it.
docs: .venv/.docs.done
	$(RUN) properdocs build --strict -f mkdocs.yml

docs-serve: .venv/.docs.done
	$(RUN) properdocs serve -f mkdocs.yml

# The sdist and two wheels in dist/, installed and tried.
wheels: .venv/.test.done
	.venv/bin/python tools/wheels.py

# The parts that differ between Pythons, on each of 3.11 to 3.14 that is here: `make pythons ONLY=3.13`.
pythons:
	$(PYTHON) tools/pythons.py $(ONLY)

clean:
	rm -rf .venv .venv-* build dist *.egg-info zeromesh/base/kernels/*.so .mypy_cache .ruff_cache .pytest_cache

# The environment with the extras of one name, again whenever the requirements or the native kernels change.
.venv/.%.done: pyproject.toml constraints.txt tools/setup.py setup.py $(wildcard zeromesh/base/kernels/*.[ch])
	$(PYTHON) tools/setup.py $*

# DeepSpeed in an environment of its own. Where it cannot be installed, its rows of the benchmark say so.
.venv-deepspeed/.peers.done: pyproject.toml constraints.txt tools/setup.py
	-$(PYTHON) tools/setup.py peers .venv-deepspeed
