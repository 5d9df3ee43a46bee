"""Times at which a training stops, saves and reports."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_EVERY = 0.1  # seconds


class Timer:
    """Actions due at a step; updated before every step."""

    def __init__(self, stop: Callable[[], bool], save_every: float | None) -> None:
        self._stop, self._save_every = stop, save_every
        self._saved, self._reported = time.monotonic(), 0.0
        self.should_stop = self.should_save = self.should_report = False  # stop before, others after the step

    def update(self) -> None:
        """Read the clock and the stop signal."""
        now = time.monotonic()
        self.should_stop = self._stop()
        self.should_save = self._save_every is not None and now - self._saved >= self._save_every
        self.should_report = now - self._reported >= REPORT_EVERY

    def mark_saved(self) -> None:
        """Restart the interval of saving."""
        self._saved = time.monotonic()

    def mark_reported(self) -> None:
        """Restart the interval of reporting."""
        self._reported = time.monotonic()
