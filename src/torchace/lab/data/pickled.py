"""Reading the dictionary in a CIFAR-10 Python batch without unpickling it.

A pickle is a program. This reads the handful of instructions that the official files consist of and builds
dictionaries, lists, tuples, bytes and numbers from them; a call becomes a record that says what was to be called.
Nothing is imported and nothing is called, and any other instruction is refused.
"""

from __future__ import annotations

import pickletools
import struct
from dataclasses import dataclass
from typing import Any

_NAMES = {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}
_PLAIN = {"BININT", "BININT1", "BININT2"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True)
class Name:
    """Something the file refers to by name."""

    text: str


@dataclass
class Call:
    """A call the file asks for, not made: what, with what, and the state the result was to be given."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickled(data: bytes, *, max_instructions: int) -> Any:
    """The object in a pickle of protocol 2, calls as `Call`, Python 2's strings as bytes.

    Raises:
        ValueError: The bytes are no pickle, or hold an instruction that the official files do not.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for number, (code, argument, _) in enumerate(pickletools.genops(data)):
            if number >= max_instructions:
                raise ValueError(f"more than {max_instructions} instructions")
            if code.name == "STOP":
                if len(stack) != 1:
                    raise ValueError("it ends in the middle of something")
                return stack[0]
            _execute(code.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("its instructions do not fit together") from None
    except (struct.error, EOFError, OverflowError) as error:
        raise ValueError(str(error)) from None
    raise ValueError("it has no end")


def _execute(code: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if code in _PLAIN:
        stack.append(argument)
    elif code in _CONSTANTS:
        stack.append(_CONSTANTS[code])
    elif code in ("SHORT_BINSTRING", "BINSTRING"):
        stack.append(argument.encode("latin-1"))  # pickletools shows bytes as text
    elif code in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif code in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif code == "MARK":
        stack.append(_MARK)
    elif code == "EMPTY_DICT":
        stack.append({})
    elif code == "EMPTY_LIST":
        stack.append([])
    elif code in _TUPLES:
        size = _TUPLES[code]
        items = [stack.pop() for _ in range(size)][::-1]
        stack.append(tuple(items))
    elif code == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif code in ("APPEND", "APPENDS"):
        items = [stack.pop()] if code == "APPEND" else _since_mark(stack)
        _top(stack, list).extend(items)
    elif code in ("SETITEM", "SETITEMS"):
        items = [stack.pop(), stack.pop()][::-1] if code == "SETITEM" else _since_mark(stack)
        if not all(isinstance(key, bytes) for key in items[::2]):  # a deeply nested tuple cannot even be hashed
            raise ValueError("its instructions do not fit together")
        _top(stack, dict).update(zip(items[::2], items[1::2], strict=True))
    elif code == "GLOBAL":
        if argument not in _NAMES:
            raise ValueError(f"it asks for {argument.replace(' ', '.')!r}, which no official file does")
        stack.append(Name(argument))
    elif code == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is no name")
        stack.append(Call(function.text, arguments))
    elif code == "BUILD":
        state = stack.pop()
        _top(stack, Call).state = state
    elif code != "PROTO" or argument != 2:
        raise ValueError(f"it holds the instruction {code}, which no official file does")


def _since_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _top(stack: list[Any], kind: type) -> Any:
    if not isinstance(stack[-1], kind):
        raise ValueError("its instructions do not fit together")
    return stack[-1]
