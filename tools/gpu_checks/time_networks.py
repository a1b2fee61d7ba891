"""Whole networks under Ingot beside eager: right against fp64, and how long they take.

python time_networks.py [--device cuda|cpu] [--small] [--seconds 500] [--networks A,B]
                        [--settings fp32,tf32,bf16,bf16_weights] [--modes eval,training]
                        [--rounds 20] [--times 1] [--graphs] [--reduced] [--jobs 1] [--compile]
                        [--out FILE] [--again] [--list]

Each network (networks.py) runs in a process of its own. A row is a network in a setting (fp32;
tf32: PyTorch allows TF32; bf16: autocast; bf16_weights: a module of that dtype, not among the
settings unless it is named) and a mode (eval without gradients; a training step: forward, backward,
gradients of all parameters). Outputs, gradients and moved buffers may be no worse against fp64
than a small factor of eager's own error; with dropout they are those of eager from the same seed.
Then times: interleaved rounds, cold L2, each on a stream and in memory of its own, medians, and
Ingot's time over eager's with its 95 % interval. --rounds 0 takes none. With --times K the batch is
K times as large, so that the GPU, not the host, is what a step waits for. With --graphs a CUDA
graph replays each call, forward and backward: its results are compared to fp64, and of the host's
time nothing is left. With --reduced Ingot and torch.compile have the mode "reduce-overhead".

Rows go to --out as they come; those of the present sources that were right are not repeated, so
that a run goes on where the last one ended, and what no sources have a row of comes first. With
--jobs several networks are checked at once (their first calls take longer then); times are taken
one network at a time, while the others wait. Exit status: 1 something was wrong, 3 time ran out,
else 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", Path(__file__).parent):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from networks import NETWORKS, named  # noqa: E402
from row_table import ENOUGH, RowTable, rows_told  # noqa: E402
from turns import Turns  # noqa: E402

ROW = "network-row: "
READY = "network-ready"
LEAST_S = 20.0


def child(arguments: argparse.Namespace) -> int:
    """Measures the rows of one network that are asked for, and prints each."""
    from network_rows import Options, Subject, allow_modes, row_of

    if arguments.reduced:
        allow_modes()
    print(READY, flush=True)
    warnings.simplefilter("ignore")
    network, deadline = named(arguments.child), time.monotonic() + arguments.seconds
    options = Options(
        torch.device(arguments.device),
        arguments.small,
        arguments.rounds,
        arguments.row_seconds,
        arguments.compile,
        Turns(arguments.turns),
        arguments.times,
        arguments.graphs,
        arguments.reduced,
    )
    subjects: dict = {}
    longest = 0.0
    for mode in arguments.modes.split(","):
        for setting in arguments.settings.split(","):
            begun = time.monotonic()
            if begun + longest > deadline:
                return 3
            row = {"network": network.name, "setting": setting, "mode": mode}
            try:
                if mode not in subjects:
                    with options.turns.beside_others():
                        subjects = {mode: Subject(network, mode, options)}
                row |= row_of(subjects[mode], setting, options)
            except Exception as error:  # the next setting may do better
                row["wrong"] = f"{type(error).__name__}: {error}"[:600]
                row["trace"] = traceback.format_exc(limit=-6)
            print(ROW + json.dumps(row), flush=True)
            longest = max(longest, time.monotonic() - begun)
    return 0


def key_of(row: dict) -> tuple:
    sizes = bool(row.get("small")), row.get("times", 1)
    how = row.get("replayed", False), row.get("reduced", False)
    return row["network"], row["setting"], row["mode"], *sizes, *how


def key(network: str, pair: tuple[str, str], arguments: argparse.Namespace) -> tuple:
    setting, mode = pair
    return key_of({"network": network, "setting": setting, "mode": mode, **sizes_of(arguments)})


def line(row: dict) -> str:
    times = f"×{row['times']} " if row.get("times", 1) > 1 else ""
    times += "replayed " * row.get("replayed", False) + "reduced " * row.get("reduced", False)
    what = f"{row['network']:24} {times}{row['setting']:12} {row['mode']:9}"
    if "first_call_s" not in row:
        return f"{what} WRONG {row['wrong']}"
    counts = f"{row['operators']:4} operators in {row['regions']:3} regions"
    first = f"first call {row['first_call_s']:6.2f} s"
    error = f"error {row['error']:.1e} eager's {row['eager_error']:.1e}"
    times = ""
    if "ratio" in row:
        compiled = f" compile {row['compile_ms']:9.3f}" if row["compile_ms"] else ""
        times = (
            f" eager {row['eager_ms']:9.3f}{compiled} Ingot {row['ingot_ms']:9.3f} ms ratio "
            f"{row['ratio']:.3f} [{row['ratio_lower']:.3f}, {row['ratio_upper']:.3f}]"
        )
    wrong = f" WRONG {row['wrong']}" if row["wrong"] else ""
    return f"{what} {counts} {first} {error}{times}{wrong}"


def measure(network, todo: list, table: RowTable, arguments, seconds: float) -> int:
    """Runs a child for rows of one network; the rows that it still owes at the end are wrong, but
    for those that time left out, whose number is given back."""
    owed = {(setting, mode) for setting, mode in todo}
    modes = [m for m in arguments.modes.split(",") if any(mode == m for _, mode in todo)]
    settings = [s for s in arguments.settings.split(",") if any(s == given for given, _ in todo)]
    command = [sys.executable, __file__, "--child", network.name, "--device", arguments.device]
    command += ["--modes", ",".join(modes), "--settings", ",".join(settings)]
    command += ["--rounds", str(arguments.rounds), "--row-seconds", str(arguments.row_seconds)]
    command += ["--small"] * arguments.small + ["--compile"] * arguments.compile
    command += ["--graphs"] * arguments.graphs + ["--reduced"] * arguments.reduced
    command += ["--times", str(arguments.times), "--turns", str(arguments.turns)]
    deadline = time.monotonic() + seconds
    late = deadline + LEAST_S
    said: list[str] = []
    # Imports take a core or more for seconds: not while another network is timed.
    with Turns(arguments.turns).beside_others():
        command += ["--seconds", str(deadline - time.monotonic())]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        timer = _kill_at(process, late)
        for text in process.stdout:
            if text.startswith(READY):
                break
            said.append(text.rstrip())
    for row in rows_told(process.stdout, ROW, said):
        row |= sizes_of(arguments) | {"jobs": arguments.jobs}
        owed.discard((row["setting"], row["mode"]))
        table.add(row)
        print(line(row), flush=True)
        if "trace" in row:
            print(row["trace"], flush=True)
    status = process.wait()
    timer.cancel()
    if status in (0, 3) or time.monotonic() >= late:
        return len(owed)
    for setting, mode in sorted(owed):
        row = {"network": network.name, "setting": setting, "mode": mode} | sizes_of(arguments)
        table.add({**row, "wrong": f"the process ended with status {status}"})
        print(line(table.rows[key_of(row)]), *said[-8:], sep="\n    ", flush=True)
    return 0


def sizes_of(arguments: argparse.Namespace) -> dict:
    sizes = {"small": arguments.small}
    if arguments.times > 1:
        sizes["times"] = arguments.times
    if arguments.graphs:
        sizes["replayed"] = True
    if arguments.reduced:
        sizes["reduced"] = True
    return sizes


def _kill_at(process: subprocess.Popen, when: float):
    timer = threading.Timer(max(0.0, when - time.monotonic()), process.kill)
    timer.daemon = True
    timer.start()
    return timer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small sizes, as on CPUs")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--row-seconds", type=float, default=12.0, help="for a row's rounds (12)")
    parser.add_argument("--networks", default="", help="these alone, separated by commas")
    parser.add_argument("--settings", default="fp32,tf32,bf16")
    parser.add_argument("--modes", default="eval,training")
    parser.add_argument("--rounds", type=int, default=20, help="0: correctness alone")
    parser.add_argument("--times", type=int, default=1, help="as large a batch (1)")
    parser.add_argument("--graphs", action="store_true", help="replayed by CUDA graphs")
    parser.add_argument("--reduced", action="store_true", help="in the mode reduce-overhead")
    parser.add_argument("--jobs", type=int, default=1, help="networks that are checked at once (1)")
    parser.add_argument("--compile", action="store_true", help="beside torch.compile too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat what was done")
    parser.add_argument("--list", action="store_true", help="what there is to do")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {network.name for network in NETWORKS}
    unknown = {name for name in arguments.networks.split(",") if name} - known
    if unknown:
        parser.error(f"unknown network {', '.join(sorted(unknown))}: {', '.join(sorted(known))}")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.child:
        return child(arguments)
    table = RowTable(arguments.out, key_of)
    wanted = [n for n in arguments.networks.split(",") if n] or [n.name for n in NETWORKS]
    missing = {name: named(name).missing() for name in wanted}
    for name in [name for name in wanted if missing[name]]:
        print(f"{name} is left out: {missing[name]}", flush=True)
    work = [(network, todo_of(network, table, arguments)) for network in map(named, wanted)]
    work = [(network, todo) for network, todo in work if not missing[network.name]]
    if arguments.list:
        for network, todo in work:
            rows = len(pairs_of(arguments))
            print(f"{network.name:24} {rows - len(todo)} of {rows} rows are done")
    if arguments.list or not work:
        return 0
    started = time.monotonic()
    left = measure_all(work, table, arguments)
    pairs = pairs_of(arguments)
    keys = [key(network.name, pair, arguments) for network, _ in work for pair in pairs]
    return verdict(table, keys, left, time.monotonic() - started)


def pairs_of(arguments) -> list[tuple[str, str]]:
    return [(s, m) for m in arguments.modes.split(",") for s in arguments.settings.split(",")]


def todo_of(network, table: RowTable, arguments) -> list[tuple[str, str]]:
    def done(pair: tuple) -> bool:
        return table.done(key(network.name, pair, arguments), arguments.rounds > 0)

    return [pair for pair in pairs_of(arguments) if arguments.again or not done(pair)]


def measure_all(work: list, table: RowTable, arguments) -> int:
    """Rows that time left out."""
    deadline = time.monotonic() + arguments.seconds

    def known(entry: tuple) -> int:
        network, todo = entry
        return sum(key(network.name, pair, arguments) in table.rows for pair in todo)

    def one(entry: tuple) -> int:
        network, todo = entry
        seconds = deadline - time.monotonic()
        if not todo or seconds < LEAST_S:
            return len(todo)
        return measure(network, todo, table, arguments, seconds)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        arguments.turns = Path(folder) / "turns"
        return sum(pool.map(one, sorted(work, key=known)))


def verdict(table: RowTable, keys: list, left: int, seconds: float) -> int:
    rows = [table.rows[key] for key in keys if key in table.rows]
    wrong = [" ".join(key_of(row)[:3]) for row in rows if row["wrong"]]
    slower = [
        f"{' '.join(key_of(row)[:3])} ({row['ratio']:.3f})"
        for row in rows
        if row.get("ratio", 0) > ENOUGH
    ]
    print(f"slower than eager: {', '.join(slower) or 'none'}")
    print(
        f"{len(rows)} rows in {seconds:.0f} s, {len(wrong)} wrong{': ' * bool(wrong)}"
        f"{', '.join(wrong)}; {left} left for another run"
    )
    return 1 if wrong else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
