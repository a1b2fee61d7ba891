# make demo       installs what is missing, builds, optimises the example model, verifies and times it
# make test       installs what is missing, builds, runs the checks for every change
# make test-all   the same, and then the rest of the checks: what the CI runs
# Finer targets: setup build unit asan python kernels docs format check-format clean

.PHONY: demo test test-all setup build unit asan python kernels docs format check-format clean

demo: setup
	.venv/bin/ingot optimize examples/gemm_scale_bn.py -o build/model_new.py --report build/report.html

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
