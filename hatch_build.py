"""Build hook: the README that PyPI shows, and the project's addresses.

PyPI knows no relative links. `TORCHACE_REPOSITORY` is the address of the repository, `https://github.com/owner/name` or
alike; the release workflow sets it. Without it, links stay relative and the package has no address but the paper's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "TORCHACE_REPOSITORY"
PAPER = "https://arxiv.org/abs/2007.08140"


class ReadmeHook(MetadataHookInterface):
    """Fill in `readme` and `urls` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of the package."""
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["urls"] = {"Paper": PAPER}
        if repository:
            tree = f"{repository}/blob/v{metadata['version']}"
            text = absolute_links(text, tree)
            metadata["urls"] |= {
                "Repository": repository,
                "Documentation": f"{tree}/docs/start.md",
                "Changelog": f"{tree}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, tree: str) -> str:
    """Make links to files absolute, and pictures point to the files themselves."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)([^)]+)", rf"\g<1>{tree.replace('/blob/', '/raw/')}/\g<2>", text)
    return re.sub(r"(?<!\!)(\[[^\]]*\]\()(?!\w+:|#)([^)]+)", rf"\g<1>{tree}/\g<2>", text)
