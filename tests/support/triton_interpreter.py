"""Patch for Triton's interpreter with NumPy 2.4: its loop bounds are arrays of one number, which int() rejects."""

import builtins
from typing import Any

from triton.runtime import interpreter


class _Integers(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)


class _Int(metaclass=_Integers):
    def __new__(cls, value: Any) -> Any:
        return builtins.int(value.item() if hasattr(value, "item") else value)


interpreter.int = _Int
