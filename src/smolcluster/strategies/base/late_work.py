"""The error buffer of a worker whose round was too late: how far it came, until a later round counts it.

    late     buffer <- anchor - weights, as it was contributed       the worker goes on from the anchor that the others have
    next     contribution <- anchor - weights + buffer               before it is encoded
    commit   buffer <- 0                                             a round that does not count leaves it

For every codec. What a lossy one leaves out of the contribution is then in its error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor


class LateWork:
    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # by the place of the parameter
        self.samples, self.weight, self._loss = 0, 0.0, 0.0  # of the rounds in it, until one counts them
        self._sent: set[int] = set()  # places whose part is in a contribution under way

    def add_to(self, place: int, distance: Tensor) -> Tensor:
        """Return this parameter's contribution: the distance and what waits here."""
        if place not in self.tensors:
            return distance
        self._sent.add(place)
        return distance.add_(self.tensors[place].to(distance.device, distance.dtype))

    def put(self, contributed: Mapping[int, Tensor], *, samples: int, weight: float, loss: float) -> None:
        """Keep a contribution that came too late. What waited here is in it, where it was sent."""
        for place, tensor in contributed.items():
            waiting = None if place in self._sent else self.tensors.get(place)
            self.tensors[place] = tensor.clone() if waiting is None else waiting + tensor
            self._sent.discard(place)
        self.samples, self.weight, self._loss = self.samples + samples, self.weight + weight, self._loss + loss * weight

    @property
    def loss(self) -> float:
        return self._loss / (self.weight or 1.0)

    def counted(self) -> None:
        """Its samples are part of a contribution."""
        self.samples, self.weight, self._loss = 0, 0.0, 0.0

    def committed(self, places: Iterable[int]) -> None:
        """Drop what was in a contribution to a round that is over."""
        for place in self._sent.intersection(places):
            del self.tensors[place]
            self._sent.discard(place)

    def not_committed(self) -> None:
        """Contributions under way do not count."""
        self._sent.clear()

    def clear(self) -> None:
        self.tensors.clear()
        self._sent.clear()
        self.counted()

    def state(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {names[place]: tensor for place, tensor in self.tensors.items()}

    def load(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self.clear()
        self.tensors = {names.index(name): tensor.clone() for name, tensor in tensors.items()}
