"""How a stacked network is computed, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchace.nn.stacking.compute import Decision
from torchace.nn.stacking.follow import Node

HEADER = Node("layer", "function", "computed")


class Explanation:
    """Which call of a member's forward is computed how: a sequence of (layer, function, how), printed as a table.

    `how` is `"batched"` (for all members at once), `"once"` (the same for all members), `"vmap"` or `"loop"` (member by
    member). Where the whole network runs under `vmap`, `reason` says why and there are no rows.
    """

    def __init__(self, decision: Decision) -> None:
        self.nodes, self.followed, self.reason = decision.nodes, decision.followed, decision.reason

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def counts(self) -> dict[str, int]:
        """The number of calls computed in each way."""
        return dict(Counter(node.how for node in self.nodes))

    def __repr__(self) -> str:
        if not self.followed:
            return f"The whole network runs under vmap: {self.reason}."
        rows = [HEADER, *self.nodes]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join("  ".join(part.ljust(w) for part, w in zip(row, widths, strict=True)).rstrip() for row in rows)
