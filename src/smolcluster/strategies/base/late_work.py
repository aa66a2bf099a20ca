"""The error buffer of a worker whose round was too late: its distance from the anchor, until a later round counts it.

    late     buffer <- anchor - weights, as it was contributed       the worker continues from the anchor of the others
    next     contribution <- anchor - weights + buffer               before it is encoded
    commit   buffer <- 0                                             a round that does not count leaves it

With every codec. The error of a lossy one is then in its error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor


class LateWork:
    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # by the place of the parameter
        # Of the rounds in it whose samples are leased, until a contribution has them.
        self.samples, self.weight, self._loss = 0, 0.0, 0.0
        self.rounds = 0.0  # their number
        self._sent_rounds = 0.0  # the same, of the contribution in flight
        self._sent: set[int] = set()  # places whose part is in the contribution in flight

    def add_to(self, place: int, distance: Tensor) -> Tensor:
        """Return this parameter's contribution: the distance plus the buffer."""
        if place not in self.tensors:
            return distance
        self._sent.add(place)
        return distance.add_(self.tensors[place].to(distance.device, distance.dtype))

    def put(
        self, contributed: Mapping[int, Tensor], *, samples: int, weight: float, loss: float, rounds: float = 1.0
    ) -> None:
        """Keep a contribution that came too late. It includes the buffer, if that was sent."""
        for place, tensor in contributed.items():
            waiting = None if place in self._sent else self.tensors.get(place)
            self.tensors[place] = tensor.clone() if waiting is None else waiting + tensor
            self._sent.discard(place)
        self.rounds, self._sent_rounds = self.rounds + rounds + self._sent_rounds, 0.0
        self.samples, self.weight, self._loss = self.samples + samples, self.weight + weight, self._loss + loss * weight

    @property
    def loss(self) -> float:
        return self._loss / (self.weight or 1.0)

    def counted(self) -> None:
        """Note that the buffer is part of a contribution."""
        self._sent_rounds, self.rounds = self.rounds, 0.0
        self.unleased()

    def unleased(self) -> None:
        """Forget the samples: they are in no lease of this worker."""
        self.samples, self.weight, self._loss = 0, 0.0, 0.0

    def committed(self, places: Iterable[int]) -> None:
        """Drop the part of the buffer that was in the contribution to a committed round."""
        for place in self._sent.intersection(places):
            self._sent_rounds = 0.0
            del self.tensors[place]
            self._sent.discard(place)

    def not_committed(self) -> None:
        """Note that the contributions in flight do not count."""
        self._sent.clear()
        self.rounds, self._sent_rounds = self.rounds + self._sent_rounds, 0.0

    def clear(self) -> None:
        self.tensors.clear()
        self._sent.clear()
        self.counted()
        self._sent_rounds = 0.0

    def state(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {names[place]: tensor for place, tensor in self.tensors.items()}

    def load(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self.clear()
        self.tensors = {names.index(name): tensor.clone() for name, tensor in tensors.items()}
