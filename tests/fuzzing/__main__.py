"""Changes files of every format and reads them: `python -m tests.fuzzing [--count 120] [--seed 0]`.

Each case has at most 10 s and 2 GiB. Prints a table, and ends with 1 if a case had more, raised anything but one
sentence, or was read with changed values although it has a checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzzing.changes import KINDS_OF_FILE, mutate_bytes, mutate_json, mutate_number, nest, splice

SECONDS, BYTES = 10, 1 << 31
COLUMNS = ("cases", "refused", "read", "tracebacks", "slow", "large", "altered")


class Slow(BaseException):
    """A case took too long."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120, help="cases of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="formats")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        for name in options.only:
            print(json.dumps({name: run_mutations(name, options.count, options.seed)}), flush=True)
        return 0
    from tests.fuzzing.subjects import SUBJECTS

    names = options.only or list(SUBJECTS)
    began = time.monotonic()
    found = spread(names, options.count, options.seed, options.workers)
    print_table(found, time.monotonic() - began)
    return int(any(problems(found).values()))


def spread(names: list[str], count: int, seed: int, workers: int) -> dict[str, dict[str, Any]]:
    """Return the outcomes of each format, computed in several processes."""
    begun = []
    for worker in range(workers):
        command = [sys.executable, "-m", "tests.fuzzing", "--here", "--count", str(count), "--seed", str(seed)]
        begun.append(subprocess.Popen([*command, "--only", *names[worker::workers]], stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in begun]
    if any(process.returncode for process in begun):
        raise SystemExit("A process that read the files died.")
    found = {
        name: counts for text in outputs for line in text.splitlines() for name, counts in json.loads(line).items()
    }
    return {name: found[name] for name in names}


def problems(found: dict[str, dict[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in found.values():
        total.update({name: counts.get(name, 0) for name in COLUMNS})
    return Counter({name: total[name] for name in ("tracebacks", "slow", "large", "altered")})


def print_table(found: dict[str, dict[str, Any]], seconds: float) -> None:
    width = max(map(len, found))
    print(" " * width, *(f"{name:>10}" for name in (*COLUMNS, "peak MiB", "longest s")))
    for name, counts in found.items():
        numbers = [f"{counts.get(column, 0):>10}" for column in COLUMNS]
        print(f"{name:{width}}", *numbers, f"{counts['peak'] >> 20:>10}", f"{counts['longest']:>10.1f}")
    totals = [sum(counts.get(column, 0) for counts in found.values()) for column in COLUMNS]
    print(f"{'all':{width}}", *(f"{total:>10}" for total in totals), f"in {seconds:.0f} s")
    for name, counts in found.items():
        for note in counts["notes"]:
            print(f"{name}: {note}")


def run_mutations(name: str, count: int, seed: int) -> dict[str, Any]:
    """Change the files of one format `count` times and read them; count what happened."""
    from tests.fuzzing.subjects import SUBJECTS

    subject = SUBJECTS[name]
    counts: dict[str, Any] = Counter()
    notes, peak, longest = [], 0, 0.0
    signal.signal(signal.SIGALRM, _too_slow)
    with tempfile.TemporaryDirectory() as temporary:
        original, folder = Path(temporary, "original"), Path(temporary, "changed")
        original.mkdir()
        subject.write(original)
        files = sorted(path.relative_to(original) for path in original.glob(subject.files) if path.is_file())
        contents = {file: (original / file).read_bytes() for file in files}
        shutil.copytree(original, folder)
        expected = subject.read(folder)
        for case in range(count):
            rng = random.Random(f"{seed} {name} {case}")
            shutil.rmtree(folder)
            shutil.copytree(original, folder)
            what = _change(subject, folder, contents, case, rng)
            _forget_peak()
            start = time.monotonic()
            signal.alarm(SECONDS)
            try:
                value = subject.read(folder)
                outcome = "read"
                if subject.has_checksum and value != expected and not what.startswith("forged"):
                    outcome = "altered"
            except subject.errors as error:
                outcome = "refused" if _is_sentence(str(error)) else "tracebacks"
                detail = repr(error)
            except Slow:
                outcome = "slow"
            except Exception:
                outcome, detail = "tracebacks", traceback.format_exc()
            finally:
                signal.alarm(0)
            seconds, bytes_ = time.monotonic() - start, _peak()
            counts["cases"] += 1
            counts[outcome] += 1
            if bytes_ > BYTES:
                counts["large"] += 1
            if outcome in ("slow", "altered", "tracebacks") or bytes_ > BYTES:
                notes.append(
                    f"case {case}, {what}: {outcome}, {bytes_ >> 20} MiB, {detail if outcome == 'tracebacks' else ''}"
                )
            peak, longest = max(peak, bytes_), max(longest, seconds)
    return {**counts, "peak": peak, "longest": longest, "notes": notes[:10]}


def _change(subject: Any, folder: Path, contents: dict[Path, bytes], case: int, rng: random.Random) -> str:
    """Change one of the files; say which and how."""
    file = rng.choice(list(contents))
    data, path = contents[file], folder / file
    kinds = list(KINDS_OF_FILE)
    if case % 8 == 0:
        kind = kinds[case // 8 % len(kinds)]
        KINDS_OF_FILE[kind](path)
        return f"{file} {kind}"
    if subject.forge is not None and case % 8 in (1, 2, 3):
        subject.forge(folder, rng)
        return "forged"
    if subject.is_text and file.suffix in (".json", ".toml", ".csv"):
        if case % 8 == 4:
            path.write_bytes(nest(data, rng))
            return f"{file} nested"
        if case % 8 == 5:
            path.write_bytes(mutate_number(data, rng))
            return f"{file} with another number"
        if file.suffix == ".json" and case % 8 in (1, 2, 3):
            path.write_text(json.dumps(mutate_json(json.loads(data), rng)))
            return f"{file} with another value"
    if case % 8 == 6:
        path.write_bytes(splice(data, rng.choice(list(contents.values())), rng))
        return f"{file} spliced"
    for _ in range(rng.randint(1, 3)):
        data = mutate_bytes(data, rng)
    path.write_bytes(data)
    return f"{file} with other bytes"


def _is_sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 1500


def _too_slow(*_: object) -> None:
    raise Slow


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """The most memory that this process has had since `_forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
