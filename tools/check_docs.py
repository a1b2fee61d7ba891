"""Checks the documents: links between files resolve, the reference is what the sources say, and the
commands and code of the README, the tutorial and the how-to pages do what the pages show.

    python tools/check_docs.py [--no-blocks | --only-blocks]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def documents() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).exists()]


def anchor(heading: str) -> str:
    """The anchor that the usual renderers give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def broken_links(document: Path) -> list[str]:
    bad = []
    text = CODE_FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            bad.append(f"{document.relative_to(ROOT)}: no such file: {target}")
        elif fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if fragment not in map(anchor, headings):
                bad.append(f"{document.relative_to(ROOT)}: no such heading: {target}")
    return bad


def main() -> int:
    import doc_blocks
    import make_reference

    bad = []
    if "--only-blocks" not in sys.argv[1:]:
        files = documents()
        bad = [line for document in files for line in broken_links(document)]
        print(f"{len(files)} documents, {len(bad)} broken links", flush=True)
        bad += make_reference.stale()
    if "--no-blocks" not in sys.argv[1:]:
        docs = ROOT / "docs"
        pages = [ROOT / "README.md", docs / "tutorial.md", *sorted((docs / "howto").glob("*.md"))]
        bad += doc_blocks.run_pages(pages, sys.executable)
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
