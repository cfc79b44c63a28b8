"""The encoded pictures of templates, most recently used ones first to stay. Knows names and bytes."""

from collections import OrderedDict

Name = tuple[str, str]  # tenant, id of the template


class Uploads:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.kept: OrderedDict[Name, bytes] = OrderedDict()

    def keep(self, name: Name, image: bytes) -> list[Name]:
        """The names that had to go for it."""
        self.drop(name)
        self.kept[name] = image
        self.num_bytes += len(image)
        dropped = []
        while self.num_bytes > self.max_bytes and len(self.kept) > 1:
            oldest = next(iter(self.kept))
            self.drop(oldest)
            dropped.append(oldest)
        return dropped

    def find(self, name: Name) -> bytes | None:
        if name in self.kept:
            self.kept.move_to_end(name)
        return self.kept.get(name)

    def drop(self, name: Name) -> None:
        self.num_bytes -= len(self.kept.pop(name, b""))
