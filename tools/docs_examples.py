"""Lets mkdocstrings show the section `Example:` of our docstrings as code: it knows `Examples:` alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ShowExamples(Extension):
    """Renames the section while the API pages are made."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:$", r"\1Examples:", obj.docstring.value)
