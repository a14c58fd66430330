"""Least cuts of small networks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

INFINITE = float("inf")
TINY = 1e-9


class Network:
    """A directed network with capacities; node 0 is the source, node 1 the sink."""

    def __init__(self, nodes: int) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.room: list[float] = []

    def link(self, tail: int, head: int, capacity: float) -> None:
        for a, b, room in ((tail, head, capacity), (head, tail, 0.0)):
            self.arcs[a].append(len(self.head))
            self.head.append(b)
            self.room.append(room)

    def sink_side(self) -> list[bool]:
        """Saturates the network, and says for each node whether a least cut leaves it with the sink; as few nodes as possible.

        Complexity: O(nodes * arcs^2); the networks here have a few nodes.

        Source: Edmonds, Karp 1972, Theoretical Improvements in Algorithmic Efficiency for Network Flow Problems, doi:10.1145/321694.321699.
        """
        while (path := self._shortest_path()) is not None:
            amount = min(self.room[arc] for arc in path)
            for arc in path:
                self.room[arc] -= amount
                self.room[arc ^ 1] += amount
        return self._reaches_sink()

    def _shortest_path(self) -> Sequence[int] | None:
        came: list[int] = [-1] * len(self.arcs)
        queue = deque([0])
        while queue and came[1] < 0:
            node = queue.popleft()
            for arc in self.arcs[node]:
                target = self.head[arc]
                if target and came[target] < 0 and self.room[arc] > TINY:
                    came[target] = arc
                    queue.append(target)
        if came[1] < 0:
            return None
        path, node = [], 1
        while node:
            path.append(came[node])
            node = self.head[came[node] ^ 1]
        return path

    def _reaches_sink(self) -> list[bool]:
        reaches = [False] * len(self.arcs)
        reaches[1] = True
        stack = [1]
        while stack:
            for arc in self.arcs[stack.pop()]:
                tail = self.head[arc]
                if not reaches[tail] and self.room[arc ^ 1] > TINY:
                    reaches[tail] = True
                    stack.append(tail)
        return reaches
