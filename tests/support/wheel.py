"""The package as users install it: a wheel, in an environment with only the declared packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def build(folder: Path, **environment: str) -> Path:
    """Build the source archive and, from it, the wheel, whose path is returned."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *extras: str) -> Path:
    """Create an environment with the wheel and return its Python.

    Nothing is downloaded: packages that the wheel requires, and that these require, are linked from this environment.
    """
    venv.create(folder)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own,) = metadata.distributions(name="torchace", path=[str(there)])
    packages: dict[str, metadata.Distribution] = {}
    for requirement in own.requires or ():
        for extra in ("", *extras):
            _collect(Requirement(requirement), extra, packages)
    for package in packages.values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__", "bin"}:
            if not (there / top).exists():
                (there / top).symlink_to(Path(str(package.locate_file(top))))
    if "timm" in extras:  # as the Makefile does: torchvision beside a CPU build of torch
        shutil.copy(Path(__file__).with_name("torchvision_shim.py"), there)
        (there / "torchvision_shim.pth").write_text("import torchvision_shim\n")
    return python


def _collect(requirement: Requirement, extra: str, packages: dict[str, metadata.Distribution]) -> None:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return
    package = _distribution(requirement.name)
    wanted = ("", *requirement.extras)
    if package is None or packages.setdefault(f"{requirement.name}{wanted}", package) is not package:
        return
    for further in package.requires or ():
        for name in wanted:
            key = f"{Requirement(further).name}{('', *Requirement(further).extras)}"
            if key not in packages:
                _collect(Requirement(further), name, packages)


@functools.cache
def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:  # of another system
        return None
