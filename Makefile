# make demo       installs what is missing, builds, optimises the example model, verifies and times it
# make test       installs what is missing, builds, runs the checks for every change
# make test-all   the same, and then the rest of the checks: what the CI runs
# Finer targets: setup build unit asan python kernels docs format check-format clean

.PHONY: demo test test-all setup build unit asan python kernels docs format check-format clean

# Without a GPU the demonstration takes a model a quarter as wide, so that it ends soon.
SMALLER := $(if $(wildcard /dev/nvidiactl /dev/dxg),,--set in_features=2048 --set out_features=2048)

demo: setup
	.venv/bin/ingot optimize examples/gemm_scale_bn.py $(SMALLER) -o build/model_new.py --report build/report.html

test:
	tools/setup --strict
	tools/check --quick all

test-all: test
	tools/check --rest all

setup:
	tools/setup

build unit asan python kernels docs:
	tools/check $@

check-format:
	tools/check format

format:
	tools/format

clean:
	rm -rf build
