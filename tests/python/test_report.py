"""The report's text: what it says, what it says is missing, and that it is one whole file."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

import verify_pairs as pairs
from ingot.cli import main
from ingot.report import layout, text
from ingot.report.scales import LinearScale, LogScale
from report_samples import bench_page, optimize_page

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "batch_size=24", "--set", "in_features=40", "--set", "out_features=36"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Page(HTMLParser):
    """Visible words, and everything that would be fetched."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        links = [given.get("src"), given.get("srcset"), given.get("data")]
        links.append(given.get("href") if tag != "a" else None)
        self.fetched += [link for link in links if link and not link.startswith("data:")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def run(*arguments: str):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_complete(page: Page) -> None:
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"@import|url\((?!data:)|https?://", page.html)
    for target in re.findall(r'href="#([^"]+)"', page.html):
        assert target in page.ids


@pytest.mark.thorough
def test_optimize_without_timing_says_what_is_missing(tmp_path):
    model = shutil.copy(ROOT / "examples/gemm_scale_bn.py", tmp_path / "gemm_scale_bn.py")
    target = tmp_path / "out.html"
    result = run("optimize", model, "--device", "cpu", "--no-timing", *SMALL, "--report", target)
    assert result.exit_code == 0, result.output
    page = Page(target)
    assert_complete(page)
    assert re.search(r"Verified: (\d+) of \1 checks passed", page.text)
    assert "Speed was not measured: --no-timing was given." in page.text
    assert "Operators replaced" in page.text and "batch_norm" in page.text
    assert "equal operators on equal arguments have one value" in page.text
    assert "gemm_scale_statistics" in page.text
    assert "ingot optimize" in page.text and "--set batch_size=24" in page.text
    assert "class ModelNew" in page.text
    assert "2^±60 within rows" in page.text
    assert f"Report: {target}" in result.output


@pytest.mark.thorough
def test_verify_of_a_failing_pair_names_what_failed(tmp_path):
    (tmp_path / "model.py").write_text(pairs.ORIGINAL)
    wrong = pairs.candidate(pairs.DISHONEST["multiplies in bfloat16"][0])
    (tmp_path / "wrong.py").write_text(wrong)
    target = tmp_path / "out.html"
    options = ["--device", "cpu", "--report", target]
    assert run("verify", tmp_path / "model.py", tmp_path / "wrong.py", *options).exit_code == 1
    page = Page(target)
    assert_complete(page)
    assert "Not verified" in page.text
    assert "It looks like: lower precision." in page.text
    assert "No speed is stated: the candidate did not pass the checks." in page.text
    assert "does not look inside the candidate" in page.text


def test_explain_shows_plan_and_kernels_and_runs_nothing(tmp_path):
    target = tmp_path / "out.html"
    model = ROOT / "examples/gemm_bn_scale_softmax.py"
    result = run("explain", model, *SMALL, "--mode", "both", "--report", target)
    assert result.exit_code == 0, result.output
    page = Page(target)
    assert_complete(page)
    assert "Not verified: nothing was run" in page.text
    assert "accuracy and speed are not known here" in page.text
    assert "fused_gemm" in page.text and "extern" in page.text
    assert "of compute capability 9.0" in page.text
    assert page.html.count('class="graph"') == 4  # before and after, in both modes


def test_report_is_written_whole_or_not_at_all(tmp_path):
    result = run("explain", ROOT / "examples/linear_gelu.py", "--report", tmp_path / "no/out.html")
    assert result.exit_code == 2
    assert "is no folder" in result.output
    target = tmp_path / "out.html"
    target.write_text("before")
    bad = tmp_path / "bad.py"
    bad.write_text("Model = 3")
    assert run("explain", bad, "--report", target).exit_code == 2
    assert target.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.py", "out.html"]


def test_names_from_a_model_cannot_inject_markup(tmp_path):
    sample = optimize_page(tmp_path, rename="<script>alert(1)</script>")
    page = Page(sample)
    assert_complete(page)
    assert "<script" not in page.html
    assert "<script>alert(1)</script>" in page.text


def test_measured_report_has_every_part(tmp_path):
    page = Page(optimize_page(tmp_path))
    assert_complete(page)
    assert "4.72 times faster" in page.text
    assert "torch.compile takes 2.77 ms" in page.text
    assert "never slower: the interval's slow end is at most 1.02" in page.text
    assert "Left to PyTorch" in page.text
    assert "Roofline" in page.text and "of limit" in page.text


def test_a_slower_result_is_called_slower(tmp_path):
    page = Page(optimize_page(tmp_path, slower=3.0))
    assert "Slower than PyTorch" in page.text
    assert "times slower" in page.text
    assert "not shown to be never slower" in page.text


def test_bench_report_has_table_and_cases(tmp_path):
    page = Page(bench_page(tmp_path))
    assert_complete(page)
    assert "2 combinations of model, size and mode" in page.text
    assert page.text.count("gemm_scale_bn 1024×8192→8192") >= 4
    assert "at the best rates of the same run" in page.text


def test_the_command_is_given_as_a_shell_takes_it(tmp_path):
    target = tmp_path / "a b.html"
    run("explain", ROOT / "examples/linear_gelu.py", "--report", target)
    assert f"--report '{target}'" in Page(target).text


# Parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.5877, "0.588 ms"), (0.0231, "23.1 µs"), (356.05, "356 ms"), (12_000, "12.0 s")],
)
def test_durations(value, words):
    assert text.duration(value) == words


def test_numbers():
    assert text.scientific(4.7e-7) == "4.7×10⁻⁷"
    assert text.scientific(float("nan")) == "NaN"
    assert text.data_size(33554432) == "33.6 MB"
    assert text.operations(137_598_484_481) == "138 Gflop"
    assert text.faster_or_slower(4.72) == "4.72 times faster"
    assert text.faster_or_slower(0.5) == "2.00 times slower"
    assert text.faster_or_slower(1.01) == "as fast"
    assert text.extents(["B", 1, 1, 8192]) == "B×8192"
    assert text.extents("[1, 1, 1, 1]") == "scalar"
    assert text.duration_range(23.9, 30.2) == "23.9 to 30.2 ms"
    assert text.duration_range(0.05, 0.2) == "50.0 µs to 0.200 ms"


def test_scales_keep_values_inside():
    scale = LogScale.over([3e-7, 2e-2], 10, 90)
    assert (scale.first, scale.last) == (-7, -1)
    assert scale.at(1e-30) == 10 and scale.at(float("inf")) == 90
    assert 10 < scale.at(3e-7) < scale.at(2e-2) < 90
    assert len(LogScale(-30, 30).ticks(6)) <= 6
    assert [t["label"] for t in LinearScale(11.4).ticks()] == ["0", "5", "10"]
    assert LinearScale(0.0).at(3) == 0


def test_layout_neither_overlaps_nor_turns_edges_round():
    widths = {str(i): 60.0 + 7 * (i % 5) for i in range(40)}
    edges = [(str(i // 2), str(i)) for i in range(1, 40)] + [("0", "39"), ("3", "30")]
    drawing = layout.lay_out(widths, edges)
    assert len(drawing.paths) == len(edges)
    rows: dict[float, list] = {}
    for key, (x, y) in drawing.centres.items():
        rows.setdefault(y, []).append((x - widths[key] / 2, x + widths[key] / 2))
        assert 0 <= x - widths[key] / 2 and x + widths[key] / 2 <= drawing.width + 1e-6
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(row, row[1:]))
    for upper, lower in edges:
        assert drawing.centres[upper][1] < drawing.centres[lower][1]


def test_samples_are_json_like():
    """The samples have the form of what the commands print."""
    from report_samples import REPORT, VERIFICATION

    assert json.loads(json.dumps(VERIFICATION)) == copy.deepcopy(VERIFICATION)
    printed = {"ingot_json", "command", "operators_replaced", "optimisations", "unsupported"}
    assert set(REPORT) == printed | {"programs"}
