"""`torchace run --ray` whose workers wait in the middle of their work, so that a test can stop or kill them there.

With `python -m tests.support.paused_ray FILE run ... --ray ...` run groups wait until FILE exists or the sweep stops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

FREE = 12  # steps that a worker makes before it may have to wait


def held_link(must_wait: Callable[[str, int], bool]) -> type:
    """A `DriverLink` whose run groups wait while they must.

    Args:
        must_wait: Called again and again by the worker with the group's name and its attempt.
    """
    from torchace.lab.sweeps.ray_cluster import DriverLink

    # Defined in here, a class travels by value: workers need not find the tests.
    class Held(DriverLink):
        steps = -1  # of this attempt

        def stop(self) -> bool:
            import ray

            self.steps += 1
            progress = (self.steps, 60, [0.0, 0.0])  # perhaps the first that the driver receives
            while self.steps >= FREE and not self.stopping and must_wait(self.group, self.attempt):
                self.stopping = ray.get(self.mailbox.put_progress.remote(self.group, self.attempt, progress))
                threading.Event().wait(0.02)  # a busy worker would keep others from their work
            return super().stop()

    return Held


def main() -> None:
    from torchace.lab.cli import app as cli
    from torchace.lab.sweeps import ray as on_ray

    go = Path(sys.argv.pop(1))
    on_ray.DriverLink = held_link(lambda job, attempt: job.startswith("calm") and not go.exists())  # type: ignore[misc]
    cli.main()


if __name__ == "__main__":
    main()
