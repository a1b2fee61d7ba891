"""libingot_blas.so in front of cuBLAS. What stands for cuBLAS here computes on the host; so do the
programs of Ingot that the products run on. A GPU's side is tools/gpu_checks/check_blas.py's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_cublas
import pytest

HERE = Path(__file__).resolve().parent
ACCURATE = 1e-6
BY_POINTERS = "a batch by pointers, whose copies would take what is gained"


@pytest.fixture(scope="module")
def fakes(tmp_path_factory) -> fake_cublas.Fakes:
    return fake_cublas.built_or_skipped(tmp_path_factory.mktemp("cublas"))


def call(fakes, name: str, **environment) -> tuple[dict, list]:
    """What blas_calls.py found, and the rows of the process's report."""
    report = fakes.folder / "report"
    report.unlink(missing_ok=True)
    environment = {"INGOT_BLAS_REPORT": str(report), **environment}
    answer = fakes.run([sys.executable, HERE / "blas_calls.py", name], **environment)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(report.read_text())["products"] if report.exists() else []
    return json.loads(answer.stdout), rows


def outcomes(rows: list) -> dict:
    counts: dict = {}
    for row in rows:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + row["count"]
    return counts


@pytest.mark.parametrize("program", ["linked", "opens"])
def test_a_program_that_links_or_opens_cublas_is_reached(fakes, program):
    command = [fakes.folder / program]
    assert fakes.run(command, preload=False).stdout == "wrong 0, by the library 1\n"
    assert fakes.run(command).stdout == "wrong 0, by the library 0\n"


def test_a_program_that_links_it_before_cublas_is_reached(fakes):
    folders = f"{fakes.folder}:{fakes.blas.parent}"
    answer = fakes.run([fakes.folder / "linked_first"], preload=False, LD_LIBRARY_PATH=folders)
    assert answer.stdout == "wrong 0, by the library 0\n", answer.stderr


@pytest.mark.parametrize("program", ["linked", "opens"])
@pytest.mark.parametrize("switch", ["INGOT", "INGOT_BLAS"])
def test_off_leaves_everything_to_the_library(fakes, program, switch):
    answer = fakes.run([fakes.folder / program], **{switch: "off", "INGOT_BLAS_REPORT": "stderr"})
    assert (answer.stdout, answer.stderr) == ("wrong 0, by the library 1\n", "")


@pytest.mark.parametrize("program", ["linked", "opens"])
def test_threads_that_share_handles_and_streams(fakes, program):
    answer = fakes.run([fakes.folder / program, "threads"], INGOT_BLAS_REPORT="stderr")
    assert answer.stdout == "wrong 0, by the library 0\n"
    assert "took 160 of 160 fp32 products" in answer.stderr


def test_a_process_that_never_multiplies_pays_nothing(fakes):
    answer = fakes.run([fakes.folder / "opens", "idle"], INGOT_BLAS_REPORT="stderr")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_dlsym_means_what_it_meant(fakes):
    for program in ("linked", "opens"):
        command = [fakes.folder / program, "lookup"]
        plain = fakes.run(command, preload=False).stdout
        assert plain == "1 1 1\n"
        assert fakes.run(command).stdout == plain


def test_products_are_right_whatever_their_layout(fakes):
    found, rows = call(fakes, "products")
    assert found["worst"] < ACCURATE
    assert found["library"] == 0
    assert outcomes(rows) == {"taken (fp32)": found["count"]}


def test_batches_are_right(fakes):
    found, rows = call(fakes, "batches")
    assert found["worst"] < ACCURATE
    assert found["library"] == [0, 0, 0, 0]
    assert found["launches"] == [1, 2, 3, 4]  # one for each batch
    assert sorted(row["batches"] for row in rows if row["taken"]) == [3, 4, 4, 8]


def test_batches_by_pointers_are_right(fakes):
    found, rows = call(fakes, "pointers")
    assert [case["library"] for case in found["taken"]] == [0] * len(found["taken"])
    assert max(case["error"] for case in found["taken"]) < ACCURATE
    assert [case["library"] for case in found["left"]] == [1, 1, 1]
    counted = outcomes(rows)
    assert counted.pop("taken (fp32)") == len(found["taken"])
    assert counted == {BY_POINTERS: 2, "alpha is zero": 1}


@pytest.mark.parametrize("what", ["gather", "run", "scatter"])
def test_a_batch_by_pointers_that_fails_is_the_librarys_whole(fakes, what):
    found, rows = call(fakes, "pointers_fail", FAKE_FAIL=what)
    assert found["found"] == [{"library": 1}] * 2
    assert outcomes(rows) == {"Ingot failed": 2}


def test_batches_by_pointers_become_part_of_a_graph(fakes):
    found, rows = call(fakes, "pointers_captured")
    assert [case["library"] for case in found["found"]] == [1, 0, 0]
    assert found["found"][2]["error"] < ACCURATE
    assert outcomes(rows) == {"the stream is being captured": 1, "taken (fp32)": 2}


def test_what_is_not_taken_arrives_as_it_was(fakes):
    found, rows = call(fakes, "handed_on")
    assert found["wrong"] == []
    assert not any(row["taken"] for row in rows)
    counted = outcomes(rows)
    assert counted["the math mode or compute type asks for the library"] == 20
    assert counted["alpha or beta is not finite"] == 2
    assert counted[BY_POINTERS] == 4


def test_the_library_may_call_itself(fakes):
    """The fake's cublasGemmEx_64 computes by cublasSgemm_v2_64: counted once, taken never."""
    found, rows = call(fakes, "handed_on")
    assert found["wrong"] == []
    pedantic = [row for row in rows if row["function"] == "cublasGemmEx_64"]
    assert pedantic and not any(row["taken"] for row in pedantic)
    plain = [row for row in rows if row["function"] == "cublasSgemm_v2_64"]
    # The calls of its own: three math modes, and six others.
    assert sum(row["count"] for row in plain) == 9


def test_the_math_mode_chooses_the_precision(fakes):
    found, rows = call(fakes, "tf32")
    assert outcomes(rows) == {"taken (tf32)": 1}
    assert found["library"] == 0
    _, rows = call(fakes, "tf32", NVIDIA_TF32_OVERRIDE="0")
    assert outcomes(rows) == {"taken (fp32)": 1}


def test_scalars_may_lie_on_the_device_and_be_many(fakes):
    found, rows = call(fakes, "device_scalars")
    assert found["worst"] < ACCURATE
    assert found["library"] == 0
    assert outcomes(rows) == {"taken (fp32)": found["count"]}


def test_captured_products_work_in_memory_of_their_graph(fakes):
    """Two graphs that live, and what runs beside them, have no memory in common."""
    found, _ = call(fakes, "captures")
    assert found["new"] == [-1]  # compiled for no one yet: the library's
    assert found["eager"] == [0, 1, 2] or found["eager"] == [0, 0, 1]
    one, two, three = (found[graph] for graph in ("one", "two", "three"))
    assert one[0] == one[1] == one[3] != one[2]  # two branches of one graph
    assert two[0] != two[1] == two[2]  # a larger one, for the products from then on
    assert not {*found["eager"], *found["eager again"]} & {*one, *two}
    assert not {*one} & {*two}
    assert {*three} == {*one}  # whose graph is gone
    assert found["four"] == [two[1]]
    assert found["library"] == 1


@pytest.mark.thorough
def test_without_user_objects_captured_products_are_the_librarys(fakes):
    found, rows = call(fakes, "captures", FAKE_NO_OBJECTS="1")
    assert found["one"] == [-1] * 4
    assert outcomes(rows)["no memory for its workspace"] == 10


def test_captured_products_are_the_librarys_on_demand(fakes):
    found, rows = call(fakes, "captures", INGOT_BLAS_CAPTURE="off")
    assert found["one"] == [-1] * 4
    assert outcomes(rows)["the stream is being captured"] == 11


def test_a_card_that_fills_up_gets_its_memory_back(fakes):
    found, rows = call(fakes, "fills_up", FAKE_IDLE="1")
    first, beside, crowded, after = found["taken"]
    assert (first, beside) == (300, 100)
    assert 0 < crowded < 250
    assert found["freed"] == 1
    assert 0 < after < 1100  # asked for again, after a while
    assert outcomes(rows)["no memory for its workspace"] == 250 - crowded + 1100 - after


def test_lt_products_with_epilogues_orders_and_batches(fakes):
    found, _ = call(fakes, "lt")
    assert [case["library"] for case in found["taken"]] == [0] * 23
    assert max(case["error"] for case in found["taken"]) < ACCURATE
    assert found["left"] == [1, 2, 3, 4, 5, 6]


def test_what_the_gpu_run_asks_cublaslt_for_is_taken(fakes):
    """By the real library's descriptors, where PyTorch brings one: they need no GPU."""
    command = [sys.executable, HERE / "blas_gpu_run.py"]
    answer = fakes.run(command, LD_LIBRARY_PATH="", INGOT_BLAS_REPORT="stderr")
    assert answer.returncode == 0, answer.stderr
    if answer.stdout == "no library\n":
        pytest.skip("this PyTorch brings no cuBLASLt")
    assert float(answer.stdout) < ACCURATE
    assert "took 6 of 6 fp32 products" in answer.stderr


def test_ingots_own_calls_go_below(fakes):
    assert call(fakes, "ingots_own")[0] == {"same": 0}
    assert call(fakes, "ingots_own", preload=False)[0] == {"same": 1}


def test_a_second_copy_of_cublas_is_left_alone(fakes):
    found, rows = call(fakes, "two_copies")
    assert found["library"] == [0, 1, 0]
    assert outcomes(rows) == {"taken (fp32)": 2}


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [
        ({"FAKE_CAPTURING": "1"}, "the stream is being captured"),
        ({"FAKE_CAPTURING": "1", "INGOT_BLAS_CAPTURE": "off"}, "the stream is being captured"),
        ({"FAKE_FULL": "1"}, "no memory for its workspace"),
        ({"INGOT_BLAS_MEMORY": "1"}, "no memory for its workspace"),
        ({"FAKE_OLD": "1"}, "the GPU, or the context of the stream"),
        ({"FAKE_FAIL": "run"}, "Ingot failed"),
        ({"FAKE_FAIL": "prepare"}, "Ingot failed"),
        ({"INGOT_LIBRARY": "/nowhere/libingot.so"}, "libingot.so could not be used"),
    ],
)
def test_whatever_fails_is_the_librarys(fakes, environment, outcome):
    found, rows = call(fakes, "repeated", **environment)
    assert found["worst"] < ACCURATE
    assert found["library"] == 3
    assert outcomes(rows) == {outcome: 3}


def test_a_batch_that_fails_half_way_is_completed_once(fakes):
    found, rows = call(fakes, "second_fails", FAKE_FAIL="second run")
    assert found["worst"] < ACCURATE
    assert (found["calls"], found["batches"]) == (1, 2)
    assert outcomes(rows) == {"Ingot failed": 1}


def ingot_run(fakes, *words, **environment) -> subprocess.CompletedProcess:
    return fakes.run(
        [sys.executable, "-m", "ingot.cli", "run", *words],
        preload=False,
        INGOT_LIBRARY=str(fake_cublas.find_library()),
        **environment,
    )


def test_ingot_run_says_that_nothing_was_multiplied(fakes):
    answer = ingot_run(fakes, sys.executable, "-c", "print('hello')")
    assert (answer.returncode, answer.stdout) == (0, "hello\n")
    assert answer.stderr == "ingot run: no product reached cuBLAS.\n"


def test_ingot_run_gives_the_programs_status(fakes):
    assert ingot_run(fakes, sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert ingot_run(fakes, sys.executable, "-c", killed).returncode == 128 + 15
    answer = ingot_run(fakes, "/nowhere/program")
    assert answer.returncode == 2
    assert "/nowhere/program" in answer.stderr


def test_ingot_run_survives_a_broken_report(fakes):
    """Of a process that was killed while it wrote."""
    script = r"printf '{\"products\n[1]\n\377\n' >> $INGOT_BLAS_REPORT; exit 7"
    answer = ingot_run(fakes, "sh", "-c", script)
    assert answer.returncode == 7
    assert answer.stderr == "ingot run: no product reached cuBLAS.\n"


def test_ingot_run_without_a_library_is_one_message():
    answer = subprocess.run(
        [sys.executable, "-m", "ingot.cli", "run", "true"],
        env={**os.environ, "INGOT_LIBRARY": "/nowhere/libingot.so"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("Error: INGOT_LIBRARY names /nowhere")


def test_ingot_run_reports_children_too(fakes):
    """What a shell starts inherits it. This machine has no GPU: the products are the library's."""
    program = fakes.folder / "linked"
    answer = ingot_run(fakes, "sh", "-c", f"{program}; {program}")
    assert answer.returncode == 0
    assert answer.stderr.count("linked (process") == 2
    assert answer.stderr.count("0 of 1 fp32 products taken") == 2
    assert "cublasSgemm_v2" in answer.stderr
