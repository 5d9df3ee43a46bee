"""What a diagnosis is: findings in words, the numbers behind them, and their figures."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchace.diagnosis.measures import Measures

SEVERITIES = ("warning", "note", "ok")
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What: `"collapse"`, `"chance"`, `"collusion"`, ...
        severity: `"warning"`: it is there, beyond what the luck of these samples explains. `"note"`: worth knowing, or
            too few samples to tell. `"ok"`: it is not there.
        sentence: What was seen.
        advice: What follows, empty where nothing does.
        numbers: The numbers in the sentence, with the ends of their intervals.
    """

    name: str
    severity: str
    sentence: str
    advice: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the most severe first; `str()` of it is for people.

    Attributes:
        findings: Everything that was looked for, found or not.
        numbers: All that was measured, as JSON can hold it.
        measures: The same, sample by sample.
        train: Those of the training data, if given.
        class_names: A name for each class.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, Any]
    measures: Measures = field(repr=False)
    train: Measures | None = field(repr=False, default=None)
    class_names: tuple[str, ...] = field(repr=False, default=())

    def __getitem__(self, name: str) -> Finding:
        """The finding of a name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        known = ", ".join(finding.name for finding in self.findings)
        raise KeyError(f"Expected the name of a finding, but got {name!r}. There are {known}.")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are warnings."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def __str__(self) -> str:
        n = self.numbers
        lines = [
            f"{n['num_members']} members on {n['samples']:,} samples of {n['num_classes']} classes: accuracy "
            f"{n['accuracy']:.4f}, cross entropy {n['cross_entropy']:.4f}; one member on average "
            f"{n['member_accuracy_mean']:.4f} and {n['member_cross_entropy_mean']:.4f}.",
            "",
        ]
        for finding in self.findings:
            head = f"{finding.severity:8} {finding.name}: "
            lines += textwrap.wrap(head + finding.sentence, WIDTH, subsequent_indent=" " * 9, break_long_words=False)
            if finding.advice:
                lines += textwrap.wrap(
                    f"→ {finding.advice}",
                    WIDTH,
                    initial_indent=" " * 9,
                    subsequent_indent=" " * 11,
                    break_long_words=False,
                )
        return "\n".join(lines)

    def as_json(self) -> str:
        """Findings and numbers as JSON."""
        content = {"findings": [asdict(finding) for finding in self.findings], "numbers": self.numbers}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def figures(self, dark: bool = False) -> dict[str, bytes]:
        """The figures as PNG files, by name; they need matplotlib.

        Args:
            dark: For a dark page.
        """
        from torchace.diagnosis.figures import drawn

        return drawn(self, dark=dark)

    def save(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes `diagnosis.txt`, `diagnosis.json` and the figures into a directory.

        Returns:
            The files.
        """
        folder = Path(directory)
        files: dict[str, bytes] = {"diagnosis.txt": f"{self}\n".encode(), "diagnosis.json": self.as_json().encode()}
        files |= {f"{name}.png": png for name, png in self.figures().items()}
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return [folder / name for name in files]
