"""Jobs on Ray whose workers wait in the middle: what a test wants to stop or kill cannot be done before.

`python -m tests.support.held_ray FILE run ... --ray ...` is `torchace run ... --ray ...` whose lasting jobs wait until
there is such a file, or until the sweep is told to stop.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FREE = 12  # steps that a worker makes before it may have to wait


def held_sweep(must_wait: Callable[[str, int], bool]) -> type:
    """A `Sweep` whose jobs wait while they must.

    Args:
        must_wait: Of a job's name and its attempt, asked again and again by the worker.
    """
    from torchace.lab.sweeps.sweep import Sweep

    # Defined in here, a class travels by value: workers need not find the tests.
    class Held(Sweep):
        def _do(self, store: Any, job: Any, arm: Any, data: Any, callback: Any, stop: Any) -> float:
            import ray

            made = -1  # steps of this attempt

            def waiting() -> bool:
                nonlocal made
                made += 1
                told = (made, arm.train.steps, [0.0] * len(job.runs))  # perhaps the first that the driver hears of it
                while made >= FREE and not callback.stopping and must_wait(job.id, callback.attempt):
                    callback.stopping = ray.get(callback.mailbox.tell.remote(job.id, callback.attempt, told))
                    threading.Event().wait(0.02)  # a busy worker would keep others from their work
                return stop()  # type: ignore[no-any-return]

            return super()._do(store, job, arm, data, callback, waiting)

    return Held


def main() -> None:
    from torchace.lab.cli import app as cli
    from torchace.lab.sweeps import ray as on_ray

    go = Path(sys.argv.pop(1))
    on_ray.Sweep = held_sweep(lambda job, attempt: job.startswith("calm") and not go.exists())  # type: ignore[misc]
    cli.main()


if __name__ == "__main__":
    main()
