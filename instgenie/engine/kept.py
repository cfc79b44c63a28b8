"""Activations in the memory of one worker: the longest unused make room for new ones, those in use stay. Knows sizes
and names; where else activations may come from is not its matter."""

from collections import Counter, OrderedDict

from instgenie.activations import Activations
from instgenie.errors import OutOfMemoryError


class Kept:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[str, Activations] = OrderedDict()  # the longest unused first
        self._pins: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return sum(activations.num_bytes for activations in self._kept.values())

    def __contains__(self, template: str) -> bool:
        return template in self._kept

    def pin(self, template: str) -> Activations:
        """Until it is unpinned as often, it stays."""
        self._pins[template] += 1
        self._kept.move_to_end(template)
        return self._kept[template]

    def unpin(self, template: str) -> None:
        assert self._pins[template] > 0, template
        self._pins[template] -= 1

    def make_room(self, template: str, num_bytes: int) -> list[str]:
        """The templates that went; raises, and none goes, if those in use leave too little room."""
        free, going = self.max_bytes - self.num_bytes, []
        for other in self._kept:
            if free < num_bytes and not self._pins[other]:
                free += self._kept[other].num_bytes
                going.append(other)
        if free < num_bytes:
            raise OutOfMemoryError(
                f"the activations of template {template} need {num_bytes:,} bytes: {free:,} of {self.max_bytes:,} "
                "are not in use"
            )
        for other in going:
            del self._kept[other]
        return going

    def keep(self, template: str, activations: Activations) -> list[str]:
        """The templates that went to make room for it."""
        going = [] if template in self._kept else self.make_room(template, activations.num_bytes)
        self._kept[template] = activations
        return going

    def drop(self, template: str) -> None:
        """Jobs that use it hold on to it by themselves."""
        self._kept.pop(template, None)
