"""The scenarios of the stage `user`: see user_commands for how they are run and judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.user_commands import (
    DOCS,
    EXAMPLES,
    MODELS,
    OTHER_MODELS,
    PRECISIONS,
    ROOT,
    SEEDS,
    Session,
    WrongError,
    judged,
    script,
)

SETTINGS = (
    "gradients",
    "second_order",
    "tf32",
    "default_device",
    "autocast",
    "inference_mode",
    "compiled",
    "bf16_module",
)
VERIFIED = r"^Verified: (\d+) of \1 checks passed\.$"


@dataclass(frozen=True)
class Scenario:
    """alone: it measures times, with nothing beside it."""

    do: Callable[[Session], str]
    alone: bool = False

    def __call__(self, settings: Any) -> tuple[bool, str]:
        return judged(self.do, settings)


def scenarios(settings: Any) -> dict[str, Scenario]:
    """By name, in the order in which they are started: what takes longest first."""
    own = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in SEEDS[:2])
    found = {"installation": Scenario(installation)}
    found |= {f"optimize {model}": Scenario(partial(optimize, model)) for model in own}
    found |= {f"model {model}": Scenario(partial(other_model, model)) for model in OTHER_MODELS}
    found |= {f"precision {name}": Scenario(partial(precision, name)) for name in PRECISIONS}
    found |= {
        "standalone": Scenario(standalone),
        "quiet and verbose": Scenario(loudness),
        "explain": Scenario(explain),
        "bad input": Scenario(bad_input),
        "front": Scenario(lambda session: script(session, "user_front.py")),
        "replay": Scenario(lambda session: script(session, "user_replay.py")),
        "frozen": Scenario(lambda session: script(session, "user_frozen.py")),
        "lengths": Scenario(lambda session: script(session, "user_lengths.py")),
    }
    found |= {f"setting {name}": Scenario(partial(setting, name)) for name in SETTINGS}
    found |= {f"page {path.stem}": Scenario(partial(page, path)) for path in pages()}
    found |= {
        "tune": Scenario(tune, alone=True),
        "json": Scenario(as_json, alone=True),
        "bench": Scenario(bench, alone=True),
        "settings timed": Scenario(settings_timed, alone=True),
        "seeds timed": Scenario(seeds_timed, alone=True),
        "optimize timed": Scenario(optimize_timed, alone=True),
        "standalone timed": Scenario(standalone_timed, alone=True),
    }
    return found


# The package -------------------------------------------------------------------------------------


def installation(session: Session) -> str:
    session.type("ingot", "--version", says=(r"^ingot",))
    session.type("python", "-m", "ingot", "--version", says=(r"^ingot",))
    session.type("ingot", "--help", says=("optimize", "verify", "doctor"))
    for command in ("optimize", "verify", "explain", "bench", "tune", "doctor"):
        session.type("ingot", command, "--help", says=(rf"ingot {command} \[OPTIONS\]",))
    session.type("ingot", "completion", "bash", says=("_INGOT_COMPLETE",))
    session.type("ingot", "doctor", says=("This machine", "libingot"))
    found = session.type("ingot", "doctor", "--json").json()
    library = found["facts"]["libingot"]
    if str(session.python.parents[1]) not in library:
        raise WrongError(f"ingot doctor found {library}, which is not the installed wheel's")
    has_gpu = bool(re.search("H100|H200|NVIDIA|[Cc]ompute capability", json.dumps(found)))
    if session.on_gpu and not has_gpu:
        raise WrongError(f"ingot doctor names no GPU: {json.dumps(found)[:600]}")
    return f"ingot {found['facts']['Ingot']}, PyTorch {found['facts']['PyTorch']}"


def bad_input(session: Session) -> str:
    model = session.copied(EXAMPLES / "linear_gelu.py")
    (session.work / "ends.py").write_text(
        session.text(model).replace("    def forward(self, x):", "    def forward(self, x):\n"
                                    "        raise SystemExit('no licence')"),
        encoding="utf-8",
    )  # fmt: skip
    kept = session.text(model)
    for words, said in (
        (("optimize", "absent.py"), "absent.py"),
        (("optimize", model, "--set", "depth=3"), "no constant 'depth'"),
        (("optimize", model, "-o", "no/such/new.py"), "is no folder"),
        (("optimize", model, "-o", model), "the model itself"),
        (("optimize", "ends.py", *session.device), "the model ended the program"),
        (("verify", model, "absent.py"), "absent.py"),
        (("optimize", model, "--precision", "fp8"), "Invalid value"),
    ):
        session.type("ingot", *words, status=2, says=(said,))
    if session.text(model) != kept or (session.work / "linear_gelu_new.py").exists():
        raise WrongError("bad input left a file behind, or changed one")
    return ""


# optimize and verify -----------------------------------------------------------------------------


def optimize(model: str, session: Session) -> str:
    """At the model's own size; then the file that was written, at a smaller one."""
    name = session.copied(EXAMPLES / f"{model}.py")
    return _optimized(session, name, session.sizes(name, own=True), session.sizes(name))


def other_model(model: str, session: Session) -> str:
    """At a size that fills tiles; then the file that was written, at the model's own odd size."""
    name = session.copied(MODELS / f"{model}.py")
    return _optimized(session, name, session.sizes(name), [])


def precision(name: str, session: Session) -> str:
    model = session.copied(EXAMPLES / "linear_layernorm.py")
    words = ["--precision", name, *session.sizes(model)]
    said = _optimized(session, model, words, words)
    if f"ingot_precision = {name!r}" not in session.text("linear_layernorm_new.py"):
        raise WrongError(f"the file does not ask for {name}")
    return said


def _optimized(session: Session, model: str, words: list, again: list) -> str:
    """optimize with these words, then verify with the others."""
    new = f"{Path(model).stem}_new.py"
    session.type(
        *("ingot", "optimize", model, "--no-timing", *words, *session.device),
        writes=(new,),
        says=("Operators replaced", "Plan of", VERIFIED, rf"^Wrote {re.escape(new)}\.$"),
    )
    words = ("ingot", "verify", model, new, "--no-timing", *again, *session.device)
    session.type(*words, says=(VERIFIED,))
    return "" if "--precision" in again else _difference(session, new)


def _difference(session: Session, new: str) -> str:
    """From eager's result, in one call of each, typed as the documents show it."""
    code = (
        f"import torch, {Path(new).stem} as m\n"
        f"device = {session.settings.device!r}\n"
        "torch.manual_seed(0); a = m.Model(*m.get_init_inputs()).to(device)\n"
        "torch.manual_seed(0); b = m.ModelNew(*m.get_init_inputs()).to(device)\n"
        "x = [v.to(device) for v in m.get_inputs()]\n"
        "from torch.utils import _pytree as pytree\n"
        "first = lambda y: pytree.tree_leaves(y)[0]\n"
        "with torch.no_grad(): p, q = first(a(*x)).double(), first(b(*x)).double()\n"
        "print('differs from eager by %.1e' % ((p - q).norm() / p.norm()).item())\n"
        "b.load_state_dict(a.state_dict())\n"
    )
    said = session.type("python", "-c", code, says=("differs from eager by",)).out.strip()
    if float(said.split()[-1]) > 1e-4:
        raise WrongError(f"{new} {said}")
    return said


def standalone(session: Session) -> str:
    """Every kind of output; then the file where there is no package ingot."""
    model = session.copied(EXAMPLES / "linear_gelu.py")
    sizes = session.sizes(model)
    ended = VERIFIED if session.on_gpu else "Its kernels were not run"
    session.type(
        *("ingot", "optimize", model, "--standalone", "--no-timing", "--report", "page.html"),
        *(*sizes, *session.device),
        writes=("linear_gelu_new.py", "page.html"),
        says=("Operators replaced", ended, r"^Wrote linear_gelu_new\.py"),
    )
    found = session.type(
        *("ingot", "optimize", model, "--standalone", "--no-timing", "--json", "-o", "other.py"),
        *(*sizes, *session.device),
        writes=("other.py",),
    ).json()
    if not found["written"] or bool(found["verification"]) != session.on_gpu:
        raise WrongError(f"--json says written {found['written']}")
    if session.on_gpu:
        session.type(
            *("ingot", "verify", model, "linear_gelu_new.py", "--no-timing", *sizes),
            says=(VERIFIED,),
        )
    code = (
        "import sys; sys.modules['ingot'] = None\n"
        "import torch, linear_gelu_new as m\n"
        f"new = m.ModelNew(*m.get_init_inputs()).to({session.settings.device!r})\n"
        f"x = [v.to({session.settings.device!r}) for v in m.get_inputs()]\n"
        "print(tuple(new(*x).shape))\n"
    )
    session.type("python", "-c", code, says=(r"^\(\d+, \d+\)$",))
    return ""


def as_json(session: Session) -> str:
    model = session.copied(EXAMPLES / "gemm_bn_scale_softmax.py")
    words = (*session.sizes(model), *session.device)
    found = session.type(
        *("ingot", "optimize", model, "--json", "--no-compile", "--budget", 5, *words),
        *("--report", "page.html"),
        writes=("gemm_bn_scale_softmax_new.py", "page.html"),
    ).json()
    _check_verification(found["verification"], {"eager", "candidate"})
    if not found["written"] or not found["report"]["operators_replaced"]:
        raise WrongError(f"optimize --json: {json.dumps(found)[:400]}")
    page = session.text("page.html")
    if not page.rstrip().endswith("</html>") or "How fast is it?" not in page:
        raise WrongError("the report is not whole")
    new = "gemm_bn_scale_softmax_new.py"
    limits = ("--seed", 3, "--time-limit", 300, "--budget", 5, "--no-compile", "--lenient")
    verified = session.type("ingot", "verify", model, new, "--json", *limits, *words).json()
    _check_verification(verified, {"eager", "candidate"})
    return ""


def _check_verification(found: dict, subjects: set) -> None:
    timing = found["timing"] or {"subjects": {}}
    own = [a for a in found["accuracy"] if a["family"] == "own inputs"]
    if not found["verified"] or set(timing["subjects"]) != subjects or not own:
        raise WrongError(f"--json: {json.dumps(found)[:600]}")


def loudness(session: Session) -> str:
    model = session.copied(EXAMPLES / "linear_gelu.py")
    words = ("optimize", model, "--no-timing", *session.sizes(model), *session.device)
    for typed in (("ingot", "-q", *words), ("ingot", *words, "-q")):
        said = session.type(*typed, writes=("linear_gelu_new.py",), says=(VERIFIED,))
        if said.err.strip():
            raise WrongError(f"-q leaves on stderr:\n{said.err[-600:]}")
    words = ("explain", model, "--no-kernels")
    for typed in (
        ("ingot", "-vv", *words),
        ("ingot", *words, "-vv"),
        ("ingot", "-v", *words, "-v"),
    ):
        session.type(*typed, says=(r"ingot: debug: ",))
    return ""


def optimize_timed(session: Session) -> str:
    """The command of the README, with nothing added on a GPU; then the file, timed again."""
    model = session.copied(EXAMPLES / "gemm_scale_bn.py")
    budget = () if session.on_gpu else ("--budget", 2, "--no-compile")
    words = (*session.sizes(model, own=True), *budget, *session.device)
    said = session.type(
        *("ingot", "optimize", model, *words),
        writes=("gemm_scale_bn_new.py",),
        says=("Speed", "never slower", "measured [0-9.]+ ms", VERIFIED, r"^Wrote gemm_scale_bn_n"),
    )
    again = ("--no-compile", "--budget", 5, *session.sizes(model), *session.device)
    session.type(
        *("ingot", "verify", model, "gemm_scale_bn_new.py", *again), says=("Speed", VERIFIED)
    )
    return next(line.strip() for line in said.out.splitlines() if "measured" in line)


def standalone_timed(session: Session) -> str:
    """Its result is kept: tests/python/test_cli_recorded.py feeds it to what runs afterwards."""
    model = session.copied(EXAMPLES / "gemm_bn_scale_softmax.py")
    words = (*session.sizes(model, own=True), *session.device)
    new = "gemm_bn_scale_softmax_new.py"
    found = session.type(
        *("ingot", "optimize", model, "--standalone", "--json", "--report", "page.html", *words),
        writes=(new, "page.html"),
    ).json()
    if not session.on_gpu:
        return "written without a GPU"
    verification = found["verification"]
    _check_verification(verification, {"eager", "torch.compile", "candidate"})
    from ingot.bench.records import write_whole

    write_whole(session.settings.file("user"), json.dumps(verification, ensure_ascii=False) + "\n")
    times = {k: v["median_ms"] for k, v in verification["timing"]["subjects"].items()}
    if f"{times['candidate']:.3f} ms" not in session.text(new):
        raise WrongError("the file does not state its time")
    return ", ".join(f"{name} {ms:.4f} ms" for name, ms in times.items())


# The other commands ------------------------------------------------------------------------------


def explain(session: Session) -> str:
    model = session.copied(EXAMPLES / "gemm_bn_scale_softmax.py")
    session.type(
        "ingot", "explain", model, says=("Graph before rewriting", "Plan of", "__global__")
    )
    session.type("python", "-m", "ingot", "explain", model, "--device", "cpu", "--no-kernels")
    session.type(
        *("ingot", "explain", model, "--mode", "both", "--kernels-out", "kernels"),
        *("--report", "page.html"),
        writes=("page.html",),
        says=(r"Wrote \d+ kernels",),
    )
    if not list((session.work / "kernels").glob("*.cu")):
        raise WrongError("--kernels-out wrote nothing")
    if not session.type("ingot", "explain", model, "--json").json()["programs"]:
        raise WrongError("explain --json shows no program")
    return ""


def tune(session: Session) -> str:
    model = session.copied(EXAMPLES / "linear_gelu.py")
    words = ("ingot", "tune", model, *session.sizes(model), "--mode", "eval")
    if not session.on_gpu:
        session.type(*words, status=2, says=("measures on a GPU",))
        return "refused without a GPU"
    session.type(*words)
    session.type(*words, never=(r"\bmeasured\b",))  # known by now
    products = session.type(*words, "--again", "--json").json()["products"]
    return f"{len(products)} products"


def bench(session: Session) -> str:
    """A bundled model, and a product alone."""
    fast = ("--no-compile", "--rounds", 7, "--budget", 5, "--examples", EXAMPLES, *session.device)
    copied = session.copied(EXAMPLES / "gemm_scale_bn.py")
    case = ("--model", "gemm_scale_bn", "--rows", 1024, "--mode", "training")
    found = session.type(
        *("ingot", "bench", *case, *session.sizes(copied), *fast, "--json"),
        *("--results", "results", "--report", "page.html"),
        writes=("page.html",),
    ).json()
    if len(found["cases"]) != 1 or not list((session.work / "results").glob("*.json")):
        raise WrongError(f"bench gave {len(found['cases'])} cases, or wrote no results")
    shape = "1024x2048x2048" if session.on_gpu else "32x64x64"
    session.type("ingot", "bench", "--shape", shape, *fast, says=("Ingot / eager",))
    return (
        f"Ingot {found['cases'][0]['ingot_ms']:.4f} ms, eager {found['cases'][0]['eager_ms']:.4f}"
    )


# Settings and documents --------------------------------------------------------------------------


def setting(name: str, session: Session) -> str:
    return script(session, "user_settings.py", "--only", name)


def seeds_timed(session: Session) -> str:
    return script(session, "user_seeds.py", about=4)


def settings_timed(session: Session) -> str:
    return script(session, "user_settings.py", "--times", about=2)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield DOCS / "tutorial.md"
    yield from sorted((DOCS / "howto").glob("*.md"))


def page(path: Path, session: Session) -> str:
    """The page's blocks, by the installed package."""
    import doc_blocks

    blocks = doc_blocks.blocks_of(path.read_text(encoding="utf-8"))
    needs_build = any(b.language == "bash" and "build/release" in b.text for b in blocks)
    if needs_build and not (ROOT / "build" / "release" / "cmake_install.cmake").is_file():
        return "left out: it needs a build tree, and nothing is built here"
    made = doc_blocks.Page(path, str(session.python), session.on_gpu, installed=True)
    problems = made.run()
    if problems:
        raise WrongError("\n".join(problems))
    return f"{made.ran} blocks run, {made.compiled} compiled only"
