"""Run experiments on one GPU within a time limit; repeat the command to resume unfinished ones.

    python benchmarks/gpu_queue.py --seconds 540 --out OUT table1 table1_wide small_members branched

Each job keeps its run directory in `runs/`. At the limit the job gets SIGTERM, saves a checkpoint and ends. All result
files (JSON, without weights and checkpoints) are then packed into OUT/results.tar.gz, and a job that is finished is not
started again. Unpacked at the root of the repository, `sweep_pages.py runs/NAME NAME`, `underfitting.py` and the page
scripts read them.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = (sys.executable, "-m", "torchace", "run")
GRACE = 45.0  # seconds for a checkpoint after SIGTERM
TABLES = {  # file, target, numbers of training rows
    "dna": ("DNA", "Class", "[1000,2400]"),
    "vowel": ("Vowel", "Class", "[400,750]"),
    "credit": ("credit_data", "Status", "[1000,3500]"),
    "churn": ("mlc_churn", "churn", "[1000,3900]"),
    "spam": ("spam", "type", "[1000,3600]"),
    "hpc": ("hpc_data", "class", "[1000,3400]"),
}


def read_experiment(name: str) -> str:
    """Return the text of a built-in experiment."""
    return (ROOT / "src" / "torchace" / "lab" / "experiments" / f"{name}.toml").read_text("utf-8")


def write_experiment(name: str, text: str) -> str:
    """Write an experiment file beside the run directories."""
    file = ROOT / "runs" / f"{name}.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
    return str(file)


def make_table2(arm: str, seed: int, diversities: str) -> str:
    """Return Table 2 with one of its arms and one seed; K=1 and K=10 are separate run groups."""
    other = {"smoc": "single", "single": "smoc"}[arm]
    blocks = read_experiment("table2").split("\n\n")
    kept = [b for b in blocks if f'name = "{other}"' not in b and f'arms = ["{other}"]' not in b]
    text = re.sub(r"^seeds = .*", f"seeds = [{seed}]", "\n\n".join(kept), flags=re.MULTILINE)
    return re.sub(r"^diversities = .*", f"diversities = {diversities}", text, count=1, flags=re.MULTILINE)


def make_jobs(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands by name."""
    tables = Path(os.environ.get("TORCHACE_DATA", ".")) / "tables"
    changes: dict[str, list[str]] = {
        "table1": ["table1"],
        "table1_wide": ["table1", "model.hidden=[128]", "train.epochs=10"],
        "small_members": ["small_members"],
        "branched": ["branched"],
        "underfitting_cifar10": ["underfitting", "data.name=cifar10", "grid.data.limit=[1000,3000,10000,30000,50000]"],
    }
    for name, (file, target, limits) in TABLES.items():
        source = f'file = "{tables / file}.csv"\ntarget = "{target}"'
        text = read_experiment("underfitting").replace('name = "mnist"', source)
        grid = [f"grid.data.limit={limits}", "grid.model.hidden=[[8],[32]]", "sweep.seeds=[0,1,2,3,4,5]"]
        changes[f"underfitting_{name}"] = [write_experiment(f"underfitting_{name}", text), *grid]
    for arm, diversities in (("smoc", options.columns), ("single", "[0.0]")):
        text = make_table2(arm, options.seed, diversities)
        changes[f"table2_{arm}"] = [write_experiment(f"table2_{arm}_s{options.seed}", text)]
    commands = {}
    for name, (experiment, *settings) in changes.items():
        directory = f"runs/{name}_s{options.seed}" if name.startswith("table2") else f"runs/{name}"
        given = [word for setting in settings + options.set for word in ("--set", setting)]
        commands[name] = [*RUN, experiment, *given, "--device", options.device, "--out", directory]
    quick = ["--quick"] if options.quick else []
    for name, more in {
        "heads": ["--epochs", str(options.epochs or 15)],
        "equal_budgets_4": ["--epochs", str(options.epochs or 30), "--widths", "4"],
        "equal_budgets_8": ["--epochs", str(options.epochs or 30), "--widths", "8"],
    }.items():
        script = str(Path(__file__).with_name(f"{name.rstrip('_48')}.py"))
        place = ["--runs", f"runs/{name}", "--out", f"runs/{name}/{name}.json", "--device", options.device]
        commands[name] = [sys.executable, script, *place, *more, *quick]
    return commands


def run_until(command: list[str], end: float) -> bool:
    """Run a command; send SIGTERM at `end`. Return whether it finished."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(max(1.0, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def pack(out: Path) -> None:
    """Pack all result files."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for file in sorted((ROOT / "runs").rglob("*")):
            if file.suffix in (".json", ".done", ".toml") and "report" not in file.parts:
                archive.add(file, file.relative_to(ROOT))
    print(f"{out / 'results.tar.gz'}: {(out / 'results.tar.gz').stat().st_size:,} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all jobs; checkpoints come on top")
    parser.add_argument("--seed", type=int, default=2, help="of Table 2")
    parser.add_argument("--columns", default="[0.0,0.001,0.01,0.05,0.1,0.3,0.5]", help="λ of Table 2 with K=10")
    parser.add_argument("--epochs", type=int, help="of heads and equal budgets; 15 and 30 by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a rehearsal of heads and equal budgets")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the sweeps")
    options = parser.parse_args()
    start, commands = time.monotonic(), make_jobs(options)
    if unknown := set(options.jobs) - set(commands):
        parser.error(f"expected jobs among {', '.join(commands)}, but got {', '.join(sorted(unknown))}")
    for name in options.jobs:
        done = ROOT / "runs" / f"{name}.done"
        if done.exists():
            continue
        if time.monotonic() - start > options.seconds - 10:
            print(f"{name}: not started", flush=True)
            continue
        before = time.monotonic()
        finished = run_until(commands[name], start + options.seconds)
        if finished:
            done.touch()
        text = "finished" if finished else "not finished"
        print(f"{name}: {text} after {time.monotonic() - before:.0f} s", flush=True)
    pack(options.out)


if __name__ == "__main__":
    main()
