"""Settings that all tests share."""

import importlib.util
import os
import signal

import torch
from hypothesis import HealthCheck, settings

# Read once, when Triton is first imported, by whichever test comes first: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from tests.support import triton_interpreter  # noqa: F401

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

# Tensors of a few elements: a second thread has nothing to do but to be waited for.
torch.set_num_threads(1)

# Derandomized: the same examples in every run, so that a failure in CI is the failure on a desk.
settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
