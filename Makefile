PYTHON    ?= python3
PARTITION ?= balanced
BIN       ?= .venv/bin

.PHONY: demo test check bench test-long test-long-units test-long-jobs test-monitoring test-browser test-hosts \
        test-docker test-frameworks test-upstream test-package docs figures fuzz soak simulate chaos test-gpu bench-gpu bench-kernels bench-net \
        bench-convergence

demo: .venv/installed
	$(BIN)/zenps launch --workers 2 --servers 2 --set sync.partition=$(PARTITION) -- $(BIN)/python examples/lstm_lm.py

# Tests of whole jobs run one after the other, for leases run out where processes outnumber cores. worksteal keeps
# the tests of a file together, which share compiled kernels, until one of the processes has none left.
PROCESSES ?= 2
IN_PARALLEL = -n $(PROCESSES) --dist worksteal
JOBS := tests/integration tests/chaos tests/soak tests/monitoring \
        tests/zenps/cli/test_launch.py tests/zenps/cli/test_commands.py tests/zenps/cli/test_local_clusters.py

test: .venv/installed
	$(BIN)/pytest $(IN_PARALLEL) $(JOBS:%=--ignore=%)
	$(BIN)/pytest $(JOBS)

# Tests of jobs that call all methods of the kernels: on servers, among peers, in two levels, for rows, blocks and
# quantized values. In the default suite they have native kernels.
SUMS := levels omnireduce push_pull schemes table_sizes training values

test-long: test-long-units test-long-jobs

test-long-units: .venv/installed
	$(BIN)/pytest $(IN_PARALLEL) -m long $(JOBS:%=--ignore=%)

test-long-jobs: .venv/installed
	$(BIN)/pytest -m long $(JOBS)
	ZENPS_KERNELS_BACKEND=torch $(BIN)/pytest $(SUMS:%=tests/integration/test_%.py)

# A file of benchmarks/ is either imported as benchmarks.x or has its folder on sys.path: mypy must be told which.
MODULES = $(shell grep -l '^from benchmarks' benchmarks/*.py)
SCRIPTS = $(filter-out $(MODULES),$(wildcard benchmarks/*.py)) examples

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p zenps
	$(BIN)/mypy tests $(MODULES)
	MYPYPATH=benchmarks:examples $(BIN)/mypy $(SCRIPTS)
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

bench: .venv/installed
	$(BIN)/python benchmarks/bench_sync.py --quick

bench-convergence: .venv/installed
	$(BIN)/python benchmarks/bench_density.py
	$(BIN)/python benchmarks/bench_convergence.py
	$(BIN)/python benchmarks/bench_consistency.py

# Needs root and iproute2. QUICK=1: under 3 minutes. What a run that was cut lacks: RESUME=1.
bench-net: .venv/installed
	$(BIN)/python benchmarks/bench_net.py $(if $(QUICK),--quick) $(if $(RESUME),--resume)

# CPU kernels, those in C beside torch's; on a machine that does nothing else.
bench-kernels: .venv/installed
	$(BIN)/python benchmarks/bench_kernels.py --turns 25 --json benchmarks/results/kernels.json

INPUTS ?= 1000000
STEPS  ?= 20000
ROUNDS ?= 100000
RUNS   ?= 20
# Where reports of these go. Those of benchmarks/results are committed, and cited in docs/reliability.md.
RESULTS ?= benchmarks/results

fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz.fuzzer --inputs $(INPUTS) --json $(RESULTS)/fuzz.json

soak: .venv/installed
	$(BIN)/python -m tests.soak.soak --steps $(STEPS) --json $(RESULTS)/soak.json

chaos: .venv/installed
	$(BIN)/python -m tests.chaos.chaos --runs $(RUNS) --json $(RESULTS)/chaos.json

simulate: .venv/installed
	$(BIN)/python -m tests.simulation.run --rounds $(ROUNDS) --json $(RESULTS)/simulation.json

# Needs Debian's prometheus.
test-monitoring: .venv/installed
	$(BIN)/pytest tests/monitoring/provoked.py

# Needs Debian's chromium and chromium-driver. SCREENSHOT=docs/status.png renews the picture that is kept.
test-browser: .venv/installed
	TEST_BROWSER=1 TEST_SCREENSHOT=$(SCREENSHOT) $(BIN)/pytest tests/browser

# Needs root and iproute2.
test-hosts: .venv/installed
	ZENPS_TEST_HOSTS=1 $(BIN)/pytest tests/netns tests/benchmarks/test_bench_net.py

# Needs a Docker engine, and Compose of either generation.
test-docker: .venv/installed
	ZENPS_TEST_DOCKER=1 $(BIN)/pytest tests/docker

# Lightning, Accelerate, Trainer, FSDP2, Ray.
test-frameworks: .venv/frameworks
	ZENPS_TEST_FRAMEWORKS=1 $(BIN)/pytest tests/frameworks

# Source distribution and wheel: what is in them, and that they install and run. Fetches dependencies.
test-package: .venv/package
	TEST_PACKAGE=1 $(BIN)/pytest tests/package

# The site, into site/. Warnings, also of links and anchors that lead nowhere, are errors.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/pytest tests/docs/test_site.py

# Draws all plots again from benchmarks/results/*.json, without measuring, and takes a new picture of the status page.
figures: .venv/installed
	$(BIN)/python benchmarks/figures.py
	$(MAKE) test-browser SCREENSHOT=docs/status.png

# Horovod's own tests, BytePS's own examples, DLRM's model: SOURCES has the checkouts horovod, byteps and dlrm.
test-upstream: .venv/installed
	TEST_UPSTREAM=$(SOURCES) $(BIN)/pytest tests/migration

# The two below need a CUDA device. `make test-gpu BIN=…` takes another environment than .venv.
KERNELS  := bitmap_codec bitmap_compact place radix_sort scatter sort_compact threshold_compact
ON_GPU    = ZENPS_TEST_GPU=1 PYTEST_ADDOPTS="-p no:xdist"
SANITIZE  = compute-sanitizer --error-exitcode 66 --target-processes all
GPU_TESTS = $(KERNELS:%=tests/cuda/test_%.py)

test-gpu:
	$(ON_GPU) $(BIN)/python -m pytest $(GPU_TESTS) tests/worker/encode/test_transfer.py tests/worker/encode/test_gpu.py
	$(BIN)/python -m pytest tests/gpu
	@# Each tensor its own allocation: then its end is memory's end.
	$(ON_GPU) ZENPS_TEST_SMALL=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		$(SANITIZE) --tool memcheck $(BIN)/python -m pytest $(GPU_TESTS)
	$(ON_GPU) ZENPS_TEST_SMALL=1 $(SANITIZE) --tool racecheck $(BIN)/python -m pytest $(GPU_TESTS)

bench-gpu:
	$(BIN)/python -m benchmarks.bench_compaction
	$(BIN)/python -m benchmarks.bench_model

.venv: .venv/installed

.venv/installed: setup.cfg setup.py pyproject.toml constraints.txt $(wildcard zenps/kernels/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,lint,bench]'
	touch $@

.venv/frameworks .venv/docs .venv/package: .venv/installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(@F)]'
	touch $@
