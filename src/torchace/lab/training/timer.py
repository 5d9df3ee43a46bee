"""When a training is to stop, to save its state and to tell somebody how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable

TELL_EVERY = 0.1  # seconds


class Clock:
    """What is due at a step; asked before every step.

    Attributes:
        stop: Whether to save and stop before this step.
        save: Whether to save the state after it.
        tell: Whether to tell about progress after it.
    """

    def __init__(self, told_to_stop: Callable[[], bool], save_every: float | None) -> None:
        self._told_to_stop, self._save_every = told_to_stop, save_every
        self._saved, self._told = time.monotonic(), 0.0
        self.stop = self.save = self.tell = False

    def ask(self) -> None:
        """Looks at the clock and at what the process was told."""
        now = time.monotonic()
        self.stop = self._told_to_stop()
        self.save = self._save_every is not None and now - self._saved >= self._save_every
        self.tell = now - self._told >= TELL_EVERY

    def saved(self) -> None:
        """The state is saved now."""
        self._saved = time.monotonic()

    def told(self) -> None:
        """Somebody was told now."""
        self._told = time.monotonic()
