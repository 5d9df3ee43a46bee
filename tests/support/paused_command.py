"""`torchace run` that waits for a signal during training, so that a test can stop or kill it.

`python -m tests.support.paused_command run ...` waits once it has saved a checkpoint.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import Any

CHECKPOINT = "torchace.lab.training.checkpoint:Checkpoints.save"


def hold(after: str = CHECKPOINT, calls: int = 1) -> None:
    """Make this process wait after a call until a signal arrives, then continue.

    Args:
        after: A function or method, `module:name`.
        calls: After which call of it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # not `signal.pause`: a signal that comes before the waiting counts too
    signal.signal(signal.SIGUSR1, lambda *_: None)  # ends the waiting and nothing else
    module, _, path = after.partition(":")
    *outer, name = path.split(".")
    place: Any = import_module(module)
    for part in outer:
        place = getattr(place, part)
    real, left = getattr(place, name), calls

    def waiting(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        answer = real(*arguments, **options)
        left -= 1
        if left == 0:
            os.read(reader, 1)
        return answer

    setattr(place, name, waiting)


if __name__ == "__main__":
    from torchace.lab.cli.app import main

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # started again by torchrun, it goes through
        hold()
    main()
