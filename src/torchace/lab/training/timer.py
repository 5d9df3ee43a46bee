"""When a training stops, saves its state and reports its progress."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_EVERY = 0.1  # seconds


class Timer:
    """Actions due at a step; updated before every step.

    Attributes:
        should_stop: Whether to save and stop before this step.
        should_save: Whether to save the state after it.
        should_report: Whether to report progress after it.
    """

    def __init__(self, stop: Callable[[], bool], save_every: float | None) -> None:
        self._stop, self._save_every = stop, save_every
        self._saved, self._reported = time.monotonic(), 0.0
        self.should_stop = self.should_save = self.should_report = False

    def update(self) -> None:
        """Read the clock and the stop signal."""
        now = time.monotonic()
        self.should_stop = self._stop()
        self.should_save = self._save_every is not None and now - self._saved >= self._save_every
        self.should_report = now - self._reported >= REPORT_EVERY

    def mark_saved(self) -> None:
        self._saved = time.monotonic()

    def mark_reported(self) -> None:
        self._reported = time.monotonic()
