"""The result of a diagnosis."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._files import write_atomic

if TYPE_CHECKING:
    from torchace.diagnosis.measures import Measures

SEVERITIES = ("warning", "note", "ok")
LINE_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One check of an ensemble and its outcome.

    Attributes:
        name: Name of the check, such as `"collapse"`.
        severity: `"warning"`: a problem beyond sampling noise; `"note"`: minor, or too few samples; `"ok"`.
        sentence: The result, headline first.
        advice: Recommended action, or empty.
        numbers: The numbers behind the sentence, with their 99 % intervals.
    """

    name: str
    severity: str
    sentence: str
    advice: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """All findings, the most severe first; `print` it for the full text.

    Attributes:
        findings: One finding for each check.
        numbers: Scores of the ensemble and its members, as JSON types.
        measures: Scores of each sample.
        train: Measures on the training data, if given.
        class_names: A name for each class, if given.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, Any]
    measures: Measures
    train: Measures | None = None
    class_names: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Finding:
        """Return the finding with this name."""
        found = {finding.name: finding for finding in self.findings}
        if name not in found:
            raise KeyError(f"Expected the name of a finding, but got {name!r}. There are {', '.join(found)}.")
        return found[name]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are warnings."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def __repr__(self) -> str:
        n = self.numbers
        names = ", ".join(finding.name for finding in self.warnings) or "none"
        return (
            f"Diagnosis({n['num_members']} members, {n['samples']} samples, accuracy {n['accuracy']:.4f}, "
            f"warnings: {names})"
        )

    def __str__(self) -> str:
        n = self.numbers
        members = f"{n['num_members']} member{'s' * (n['num_members'] > 1)}"
        lines = [
            f"{members} on {n['samples']:,} samples of {n['num_classes']} classes: accuracy "
            f"{n['accuracy']:.4f}, cross entropy {n['cross_entropy']:.4f}; one member on average "
            f"{n['member_accuracy_mean']:.4f} and {n['member_cross_entropy_mean']:.4f}.",
            "",
        ]
        wrap = partial(textwrap.wrap, width=LINE_WIDTH, break_long_words=False)
        for finding in self.findings:
            sentence = finding.sentence.replace(" %", "\u00a0%")  # no line break
            lines += wrap(f"{finding.severity:8} {finding.name}: {sentence}", subsequent_indent=" " * 9)
            lines += wrap(
                f"→ {finding.advice}" if finding.advice else "", initial_indent=" " * 9, subsequent_indent=" " * 11
            )
        return "\n".join(lines).replace("\u00a0", " ")

    def to_dict(self) -> dict[str, Any]:
        """Return findings and numbers as a dictionary of JSON types."""
        return {"findings": [asdict(finding) for finding in self.findings], "numbers": self.numbers}

    def to_json(self) -> str:
        """Return findings and numbers as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def figures(self, dark: bool = False) -> dict[str, bytes]:
        """Return the figures as PNG files by name, in light or dark colors; needs matplotlib."""
        from torchace.diagnosis.figures import render_figures

        return render_figures(self, dark=dark)

    def save(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write `diagnosis.txt`, `diagnosis.json` and the figures into a directory and return the paths."""
        folder = Path(directory)
        files = {"diagnosis.txt": f"{self}\n".encode(), "diagnosis.json": self.to_json().encode()}
        files |= {f"{name}.png": png for name, png in self.figures().items()}
        for name, data in files.items():
            write_atomic(folder / name, data)
        return [folder / name for name in files]
