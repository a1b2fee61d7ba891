"""What surrounds the commands: completion, log levels, a library that does not fit."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ingot import __version__, log
from ingot.cli import main
from ingot.cli.console import output, print_json, table, writable_streams
from ingot.runtime.library import ABI_VERSION, Library, LibraryNotFoundError, find_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def usual_level(monkeypatch):
    monkeypatch.delenv(log.VARIABLE, raising=False)
    yield
    log.set_level(log.DEFAULT)


def ingot(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    # The tree's package finds no library of its own where another one is installed.
    found = {"INGOT_LIBRARY": str(find_library())}
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"), **{**found, **variables})
    return subprocess.run(
        [sys.executable, "-m", "ingot", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


# Completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_parse(shell, tmp_path):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_INGOT_COMPLETE" in result.output
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(result.output)
        subprocess.run([shell, "-n", script], check=True)


@pytest.mark.thorough
def test_bash_completes_commands_options_and_values(tmp_path):
    """In a bash of its own, as a user's would: source the script, call its function."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "ingot"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ingot "$@"\n')
    command.chmod(0o755)
    script = ingot("completion", "bash").stdout

    def completions(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("ingot", *words))
        text = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}\n_ingot_completion ingot\n"
        answer = subprocess.run(
            ["bash", "-c", script + "\n" + text + 'printf "%s\\n" "${COMPREPLY[@]}"'],
            capture_output=True,
            text=True,
            check=True,
            env=dict(
                os.environ,
                PYTHONPATH=str(ROOT / "python"),
                PATH=f"{folder}:{os.environ['PATH']}",
            ),
        )
        return answer.stdout.split()

    assert completions("opt") == ["optimize"]
    assert set(completions("")) >= {"optimize", "verify", "explain", "bench", "doctor"}
    assert completions("optimize", "--rep") == ["--report"]
    assert completions("verify", "--precision", "f") == ["fp32", "fp16"]


# Log levels -------------------------------------------------------------------------------------


def explain(*before: str, after: str = "", **variables: str) -> str:
    model = str(ROOT / "examples/linear_gelu.py")
    answer = ingot(*before, "explain", model, "--no-kernels", *after.split(), **variables)
    assert answer.returncode == 0, answer.stderr
    return answer.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        (">/dev/full", 1, "Error: cannot write the results: No space left on device\n"),
        (">&-", 0, ""),
        ("", 1, ""),  # a pipe whose reader has gone
    ],
)
def test_results_that_nobody_can_read(where, status, said):
    reader, writer = os.pipe()
    os.close(reader)
    answer = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m ingot --version {where}"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (status, said)


def test_letters_that_the_terminal_lacks_are_spelled(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with writable_streams():
        print("64×48")
        print_json("doctor", {"facts": {"é": "…"}})
    shown, _, found = written.getvalue().decode("ascii").partition("\n")
    assert shown == r"64\xd748" and json.loads(found)["facts"] == {"é": "…"}


def test_brackets_are_shown_as_they_are(capsys):
    """rich takes words in brackets for styles: paths, names and reasons may have some."""
    console = output()
    shown = table("[b] title", "[i] column")
    shown.add_row("a[dim]b [/red]")
    console.print(shown)
    console.print("Wrote new[bold].py.")
    console.rule("[u] rule")
    text = capsys.readouterr().out
    for words in ("[b] title", "[i] column", "a[dim]b [/red]", "new[bold].py", "[u] rule"):
        assert words in text


@pytest.mark.thorough
def test_levels_reach_front_and_library():
    assert "ingot: debug" not in explain()
    everything = explain("-vv")
    assert f"ingot: debug: using {find_library()}" in everything
    assert "passes planned for" in everything


@pytest.mark.thorough
def test_levels_before_and_after_the_command():
    assert "passes planned for" in explain(INGOT_LOG="debug")
    assert "ingot: debug" in explain("-v", after="-v")
    assert "ingot: debug" in explain(after="-vv")
    assert "ingot: debug" not in explain("-q", INGOT_LOG="debug")
    assert "ingot: debug" not in explain(after="-q", INGOT_LOG="debug")


@pytest.mark.parametrize("command", main.list_commands(None))
def test_every_command_takes_the_level(command):
    options = {o for p in main.get_command(None, command).params for o in p.opts}
    assert options >= {"-q", "--quiet", "-v", "--verbose"}


@pytest.mark.thorough
def test_quiet_leaves_out_progress(tmp_path):
    from verify_pairs import HONEST, ORIGINAL, candidate

    (tmp_path / "model.py").write_text(ORIGINAL)
    (tmp_path / "new.py").write_text(candidate(HONEST["operator by operator"]))
    files = [str(tmp_path / "model.py"), str(tmp_path / "new.py")]
    options = ["--device", "cpu", "--no-timing", "--lenient"]
    loud = CliRunner().invoke(main, ["verify", *files, *options])
    assert "… " in loud.stderr
    for words in (["-q", "verify", *files, *options], ["verify", *files, *options, "-q"]):
        quiet = CliRunner().invoke(main, words)
        assert quiet.stderr == ""
        assert quiet.exit_code == loud.exit_code
        assert "Verified" in quiet.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["-q", "-v", "doctor"], {}, "exclude each other"),
        (["doctor", "-q", "-v"], {}, "exclude each other"),
        (["-q", "doctor", "-v"], {}, "exclude each other"),
        (["doctor"], {"INGOT_LOG": "loud"}, "must be one of debug, info"),
    ],
)
def test_bad_levels_are_bad_input(arguments, variables, words):
    answer = ingot(*arguments, **variables)
    assert answer.returncode == 2
    assert words in answer.stderr


# Versions ---------------------------------------------------------------------------------------


def built(folder: Path, source: str) -> Path:
    """A shared library of this C source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "fake.c").write_text(source)
    target = folder / "libingot.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), str(folder / "fake.c")], check=True
    )
    return target


@pytest.mark.thorough
def test_a_library_of_another_abi_is_refused_clearly(tmp_path):
    fake = built(tmp_path, "int ingot_abi_version(void) { return 77; }\n")
    with pytest.raises(LibraryNotFoundError) as raised:
        Library(fake)
    assert str(raised.value).startswith(
        f"{fake} speaks ABI version 77, this Python package speaks {ABI_VERSION}: "
        "install both from the same release"
    )
    answer = ingot("explain", str(ROOT / "examples/linear_gelu.py"), INGOT_LIBRARY=str(fake))
    assert answer.returncode == 2
    assert "ABI version 77" in answer.stderr and "unset INGOT_LIBRARY" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_library_that_lacks_a_function_is_refused_clearly(tmp_path):
    source = f"int ingot_abi_version(void) {{ return {ABI_VERSION}; }}\n"
    with pytest.raises(LibraryNotFoundError, match="lacks ingot_"):
        Library(built(tmp_path, source))


def test_another_release_of_the_same_abi_is_named(monkeypatch):
    monkeypatch.setattr("ingot.__version__", "0.0.1")
    with pytest.warns(UserWarning, match=f"is of release {__version__}, this Python package of"):
        Library(find_library())


def test_doctor_says_each_thing_once():
    answer = ingot("doctor")
    rows = [line.split("│")[1].strip() for line in answer.stdout.splitlines() if "│" in line]
    rows = [row for row in rows if row]  # a long line goes on below its name
    assert len(rows) == len(set(rows)), rows
    for line in answer.stdout.splitlines():
        if "cpu: products" in line:
            products = [p.strip() for p in line.split("│")[2].split(", ")]
            assert len(products) == len(set(products))
