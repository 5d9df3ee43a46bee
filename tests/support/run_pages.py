"""Run the code blocks and commands of Markdown pages: reads lines of JSON, `[page, folder]`, and answers with errors.

A program of its own, so that it can run in an environment without the tests' packages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands that install, need a cluster or another machine, or are run elsewhere in the tests for minutes.
SKIPPED = re.compile(r"^(pip |make |torchrun |ray |sbatch |kubectl |torchace run (?!my\.toml))|--ray|postgresql|cuda")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Languages and texts of a page's blocks."""
    return BLOCK.findall(page.read_text("utf-8"))


def run_page(page: Path) -> None:
    """Run a page from top to bottom in the current directory."""
    import torch

    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "docs"}
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, page.name, "exec"), names)
        elif language == "console":
            for line in code.splitlines():
                if line.startswith("$ "):
                    run_command(line[2:].split("  #")[0].strip())
        elif language == "toml":
            Path("my.toml").write_text(code, "utf-8")  # its name on the pages
        elif language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        else:
            assert language in ("dockerfile", "yaml", "text"), f"{page.name}: blocks of {language} are not checked"


def run_command(command: str) -> None:
    """Run a `torchace` command in this process."""
    from torchace.lab.cli.app import main

    if SKIPPED.search(command):
        return
    sys.argv = shlex.split(command)
    assert sys.argv[0] == "torchace", f"{command!r} is not checked"
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{command} ended with {end.code}") from end


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what pages print goes elsewhere
    for line in sys.stdin:
        page, folder = json.loads(line)
        os.chdir(folder)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning's own
            warnings.filterwarnings("ignore", ".*does not have many workers")
            try:
                run_page(Path(page))
                error = None
            except Exception:
                error = printed.getvalue()[-2000:] + traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
