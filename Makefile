# Every target creates .venv and installs what it needs; a second call is quick.
# PYTHON may name another interpreter, 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
# what is installed is compiled when it is first imported, or by `compiled`: pip would take a minute for it
PIP := $(BIN)/pip install -qq --no-input --disable-pip-version-check --no-compile

# tests start a hundred processes, and each would compile the package again if Python were told to keep nothing
unexport PYTHONDONTWRITEBYTECODE

# tests wait for servers a quarter of the time: one file more than there are cores runs at once, each on one thread
NUM_CORES := $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

# tests that load no model and start no process: together they take about a minute
QUICK := tests/architecture tests/cost tests/pictures tests/scheduling tests/simulate tests/telemetry/test_logs.py

.PHONY: help check static style types layers compiled test format demo sheets serve serve-ray report figures chromium screenshots
.DELETE_ON_ERROR:

help:
	@echo "make check   check format, lint, types and layers, run the quick tests (under 2 minutes; for every save)"
	@echo "make test    the same with all tests (about 20 minutes on 2 cores with the installation)"
	@echo "make demo    edit photographs into out/demo.png, with the time of every way (under a minute on 2 cores)"
	@echo "make serve   serve the built-in model on http://127.0.0.1:8000 (FLAGS='--port 9000' adds flags)"
	@echo "make serve-ray  the same with workers on the nodes of a Ray cluster, all on this machine"
	@echo "make report  run the tables and figures of the paper again into docs/report (15 minutes)"
	@echo "make sheets  draw the sheets of example edits in docs/ again"
	@echo "make figures PHOTOS=DIR  measure the built-in model on photographs (FLAGS='--against OLD' compares; --quick)"
	@echo "make screenshots  take the pictures of the pages in docs/"
	@echo "make format  format the code and fix what lint can fix"

check:
	@$(MAKE) --no-print-directory --jobs=2 types compiled static
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(QUICK)

test:
	@$(MAKE) --no-print-directory --jobs=2 types compiled static chromium
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $$(($(NUM_CORES) + 1)) --dist loadfile --no-loadscope-reorder

static: types style layers

style: .venv/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.tools
	$(BIN)/mypy

layers: .venv/.tools
	$(BIN)/lint-imports --no-cache

# compiles all packages, beside the check of types, which needs one core: a compiler's warning would fail a test.
# Without what no test imports: the tests of packages, libraries on top of Ray, pip
compiled: .venv/.tools
	@$(BIN)/python -m compileall -qq -x '/tests/|/ray/(data|llm|rllib|serve|train|tune)/|/pip/' .venv/lib instgenie || true

# the browser for the tests of the web pages: the shell without windows takes half the time of a whole Chromium.
# Without any browser these tests are skipped
chromium:
	@{ command -v chromium-headless-shell \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y chromium-headless-shell; } \
		|| command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| { [ "$$(id -u)" = 0 ] && apt-get install -qq -y chromium; }; } >/dev/null 2>&1 \
		|| echo "Chromium is missing and cannot be installed: the tests of the web pages are skipped"

screenshots: .venv/.tools chromium
	PYTHONPATH=tests $(BIN)/python -m helpers.screenshots

format: .venv/.tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: .venv/.installed
	$(BIN)/python -m instgenie.cli.demo --rows 2 --times

# what the documentation shows of the model: after new weights, run it again
sheets: .venv/.installed
	$(BIN)/python -m instgenie.cli.demo --rows 2 --times -o docs/demo.png
	$(BIN)/python -m instgenie.cli.demo --steps 20 --times -o docs/edits.png

serve: .venv/.installed
	$(BIN)/instgenie serve builtin $(FLAGS)

# a Ray head and two nodes on this machine, with a worker each
serve-ray: .venv/.ray
	$(BIN)/python -m instgenie.cluster.ray.local 2 $(BIN)/instgenie serve builtin $(FLAGS)

report: .venv/.installed
	mkdir -p docs/report
	$(BIN)/instgenie bench reproduce all --model builtin --out docs/report --json docs/report/figures.json

figures: .venv/.training
	$(BIN)/python -m training.evaluate --photos $(PHOTOS) --out out/figures $(FLAGS)

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11: run make PYTHON=python3.11 (or newer)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# torch comes first and by itself, so that nothing else can pull in another one
.venv/.torch: .venv/.created
	$(PIP) torch==2.13.0
	@touch $@

# what the package itself needs, for editing and serving
.venv/.installed: .venv/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

# the same with the tools of developers
.venv/.tools: .venv/.torch pyproject.toml
	$(PIP) --editable '.[dev]'
	@touch .venv/.installed $@

# the same with Ray
.venv/.ray: .venv/.torch pyproject.toml
	$(PIP) --editable '.[ray]'
	@touch .venv/.installed $@

# the same with the networks that judge pictures
.venv/.training: .venv/.torch pyproject.toml
	$(PIP) --editable '.[train]'
	@touch .venv/.installed $@
