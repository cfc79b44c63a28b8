"""Which pictures come back. A picture that is edited once is not registered unasked: its edit reads what its own dense
steps leave behind, and a template would only fill the tiers."""

import time
from collections import OrderedDict, deque

MAX_PICTURES = 10_000  # that are remembered; the one edited least recently is forgotten first


class Popularity:
    def __init__(self, num_requests: int, seconds: float) -> None:
        self.num_requests, self.seconds = num_requests, seconds
        self._seen: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()  # by template: time, request

    def note(self, template: str, request: str, now: float | None = None) -> bool:
        """Note a request that edited a picture. Return whether enough requests did within the window. The pictures that
        one request asks for count once."""
        now = time.monotonic() if now is None else now
        seen = self._seen.setdefault(template, deque(maxlen=self.num_requests))
        self._seen.move_to_end(template)
        if not request or all(request != other for _, other in seen):
            seen.append((now, request))
        if len(self._seen) > MAX_PICTURES:
            self._seen.popitem(last=False)
        return len(seen) == self.num_requests and now - seen[0][0] <= self.seconds
