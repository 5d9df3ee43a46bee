"""When a training is to stop, to save its state and to tell somebody how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_EVERY = 0.1  # seconds


class Timer:
    """What is due at a step; asked before every step.

    Attributes:
        stop: Whether to save and stop before this step.
        save: Whether to save the state after it.
        tell: Whether to tell about progress after it.
    """

    def __init__(self, stop: Callable[[], bool], save_every: float | None) -> None:
        self._stop, self._save_every = stop, save_every
        self._saved, self._reported = time.monotonic(), 0.0
        self.should_stop = self.should_save = self.should_report = False

    def update(self) -> None:
        """Looks at the clock and at what the process was told."""
        now = time.monotonic()
        self.should_stop = self._stop()
        self.should_save = self._save_every is not None and now - self._saved >= self._save_every
        self.should_report = now - self._reported >= REPORT_EVERY

    def mark_saved(self) -> None:
        """The state is saved now."""
        self._saved = time.monotonic()

    def mark_reported(self) -> None:
        """Somebody was told now."""
        self._reported = time.monotonic()
