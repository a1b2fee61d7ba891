"""Writes docs/reference from the command line's help, docstrings and the C and C++ headers.

python tools/make_reference.py            writes docs/reference/*.md
python tools/make_reference.py --check    says what is not current; exit status 1 if anything is
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
FOLDER = ROOT / "docs" / "reference"
_NOTE = "<!-- Written by tools/make_reference.py from {sources}: edit those. -->\n"


def pages() -> dict:
    return {
        "command-line.md": command_line(),
        "python.md": python_api(),
        "c.md": c_api(),
        "cpp.md": cpp_api(),
    }


def stale() -> list:
    """A line for each page that is not what the sources say."""
    wanted = pages()
    found = []
    for name, text in wanted.items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            found.append(f"docs/reference/{name} is not current: run tools/make_reference.py")
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            found.append(f"docs/reference/{path.name} comes from nothing: remove it")
    return found


# Command line ------------------------------------------------------------------------------------


def command_line() -> str:
    import click
    from ingot.cli import main as group

    parts = [
        "# Command line\n",
        _NOTE.format(sources="python/ingot/cli"),
        f"{_flowed(group.help)}\n",
    ]
    top = click.Context(group, info_name="ingot")
    for name in sorted(group.list_commands(top)):
        command = group.get_command(top, name)
        context = click.Context(command, info_name=f"ingot {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"## ingot {name}\n\n`ingot {name} {usage}`\n\n{_flowed(command.help)}\n")
        rows = [p.get_help_record(context) for p in command.get_params(context)]
        rows = [r for r in rows if r]
        parts.append("| option | what |\n| --- | --- |")
        parts += [f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _flowed(text: str | None) -> str:
    """Paragraphs, as they are; \\b marks of click removed."""
    return inspect.cleandoc(text or "").replace("\b\n", "").strip()


# Python ------------------------------------------------------------------------------------------


def python_api() -> str:
    import ingot
    import ingot.bench
    import ingot.verify

    parts = ["# Python\n", _NOTE.format(sources="the docstrings")]
    for module in (ingot, ingot.verify, ingot.bench):
        parts.append(f"## {module.__name__}\n\n{inspect.getdoc(module)}\n")
        for name in sorted(module.__all__):
            parts.append(_described(module.__name__, name, getattr(module, name)))
    return "\n".join(parts)


def _described(module: str, name: str, value: Any) -> str:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"### {module}.{name}\n\n`{value!r}`\n"
    text = f"### {module}.{name}\n\n"
    if (
        inspect.isfunction(value)
        or _has_own(value, "__init__")
        or hasattr(value, "__dataclass_fields__")
    ):
        text += f"```\n{name}{_signature(value)}\n```\n\n"
    document = (
        inspect.getdoc(value) if "__doc__" in vars(value) or inspect.isfunction(value) else ""
    )
    if document and not document.startswith(f"{name}("):
        text += f"{document}\n"
    if inspect.isclass(value):
        for member, function in vars(value).items():
            if member.startswith("_") or not (
                inspect.isfunction(function) or isinstance(function, property)
            ):
                continue
            about = function.__doc__ and inspect.getdoc(function)
            if about:
                arguments = "" if isinstance(function, property) else _signature(function)
                text += f"\n#### {name}.{member}\n\n```\n{member}{arguments}\n```\n\n{about}\n"
    return text


def _has_own(value: type, name: str) -> bool:
    return name in vars(value)


def _signature(function: Any) -> str:
    """Without addresses, which differ from run to run."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<function [\w.]*<lambda>>", "…", text).replace("<factory>", "…")
    return text.replace("(self, ", "(").replace("(self)", "()")


# C and C++ ---------------------------------------------------------------------------------------


def c_api() -> str:
    text = (ROOT / "include/ingot/ingot.h").read_text(encoding="utf-8")
    about, _, rest = text.partition("#ifndef")
    parts = [
        "# C ABI\n",
        _NOTE.format(sources="include/ingot/ingot.h"),
        "`#include <ingot/ingot.h>`\n",
    ]
    parts.append(_comment(about) + "\n")
    pattern = re.compile(
        r"(?P<comment>/\*(?:[^*]|\*(?!/))*\*/\n)?"
        r"(?P<code>INGOT_API [^;]*;|typedef (?:enum|struct) \w+ \{[^}]*\} \w+;"
        r"|#define INGOT_\w+ \d+\n)"
    )
    for found in pattern.finditer(rest):
        code = found["code"].strip()
        name = re.search(r"(\w+)\(", code) if code.startswith("INGOT_API") else None
        name = name or re.search(r"\} (\w+);", code) or re.search(r"#define (\w+)", code)
        parts.append(f"## {name[1]}\n")
        if found["comment"]:
            parts.append(_comment(found["comment"]) + "\n")
        parts.append(f"```c\n{code.removeprefix('INGOT_API ')}\n```\n")
    return "\n".join(parts)


def cpp_api() -> str:
    """What the headers declare outside namespace detail, each with the comment before it."""
    parts = ["# C++ API\n", _NOTE.format(sources="include/ingot/*.hpp")]
    parts.append("`#include <ingot/ingot.hpp>`, namespace `ingot`.\n")
    for name in ("ingot.hpp", "graph.hpp", "program.hpp", "error.hpp"):
        text = (ROOT / "include/ingot" / name).read_text(encoding="utf-8")
        about = re.match(r"(?://[^\n]*\n)+", text)
        parts.append(f"## {name}\n\n{_comment(about[0])}\n" if about else f"## {name}\n")
        parts += list(_cpp_items(text[about.end() if about else 0 :]))
    return "\n".join(parts)


def _cpp_items(text: str) -> Iterator[str]:
    text = re.sub(r"namespace detail \{.*?\n\}  // namespace detail\n", "", text, flags=re.DOTALL)
    comment: list = []
    generated: list = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("//"):
            comment.append(line)
            continue
        macro = re.match(r"INGOT_API_\w+\((\w+)", line)
        if macro:
            generated.append(macro[1])
        elif re.match(r"(struct|class|enum class) \w+.*\{$", line):
            text = "\n".join(_public(line, lines))
            body = r"^(  \S(?:[^\n{]|\{\}|\n {6,})*\)(?: const)?) \{\n(?:    .*\n|\n)*  \}$"
            yield _cpp_item(comment, re.sub(body, r"\1;", text, flags=re.MULTILINE))
        elif re.match(r"(inline|template|using)\b", line) and not line.startswith(
            "inline namespace"
        ):
            yield _cpp_item(comment, _declaration(line, lines))
        comment = []
    if generated:
        names = ", ".join(f"`{n}`" for n in generated)
        yield (
            f"Functions of values that do as PyTorch's of the same name: {names}. Reductions and "
            "softmax take the axes as well, by default the features.\n"
        )


def _public(line: str, lines: Iterator[str]) -> list:
    """A class without its private part."""
    kept, private = [line], False
    for line in lines:
        private = private or line == " private:"
        if line.startswith("}"):
            return [*kept, line]
        if not private:
            kept.append(line)
    return kept


def _declaration(line: str, lines: Iterator[str]) -> str:
    """A function without its body."""
    text = line
    while not text.endswith((";", "{", "}")):
        text += "\n" + next(lines)
    if text.endswith("{"):
        for line in lines:
            if line.startswith("}"):
                break
    return re.sub(r"\s*\{[^{}]*\}?$", ";", text) if not text.endswith(";") else text


def _cpp_item(comment: list, code: str) -> str:
    about = _comment("\n".join(comment))
    return (f"{about}\n\n" if about else "") + f"```cpp\n{code}\n```\n"


def _comment(text: str) -> str:
    lines = text.strip().removeprefix("/*").removesuffix("*/").splitlines()
    lines = [re.sub(r"^\s*(\*|//) ?", "", line).rstrip() for line in lines]
    # Indented by two or more: code, which Markdown wants indented by four.
    return "\n".join(f"  {x}" if re.match(r"  +[^ -]", x) else x for x in lines).strip()


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = stale()
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
