"""`torchace run --ray` whose workers wait during training, so that a test can stop or kill them.

With `python -m tests.support.paused_ray FILE run ... --ray ...` run groups wait until FILE exists or the sweep stops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_paused_sender(must_wait: Callable[[str], bool]) -> type:
    """A `Sender` whose run groups wait after a checkpoint while they must; `must_wait` gets the group's name."""
    from torchace.lab.sweeps.ray import Sender

    # Defined in here, a class travels by value: workers need not find the tests.
    class Held(Sender):
        def send(self, event: str, group: Any, content: Any = None) -> None:
            super().send(event, group, content)
            while event == "checkpoint" and must_wait(group.id):
                super().send("on_group_step", group, (1, 60, [0.0, 0.0]))
                threading.Event().wait(0.02)  # a busy worker would keep others from their work

    return Held


def main() -> None:
    from torchace.lab.cli import app as cli
    from torchace.lab.sweeps import ray as on_ray

    go = Path(sys.argv.pop(1))
    on_ray.Sender = make_paused_sender(lambda group: group.startswith("calm") and not go.exists())  # type: ignore[misc]
    cli.main()


if __name__ == "__main__":
    main()
