"""Weighted fair shares of the time of steps, per tenant.

Each tenant has an account of the seconds that steps spent on its jobs, divided by its weight. A tenant whose account is
ahead of the least served one that has work is over its share, and goes behind those that are not. A tenant that used
less than its share keeps that as credit, up to a limit, so that one who sends an edit now and then is served at once
beside one who sends without pause. A new tenant has less of it, since it has not waited for the others.
"""

from collections.abc import Iterable, Mapping

CREDIT = 10.0  # seconds that a tenant may lag behind; a longer absence earns nothing
WELCOME = 3.0  # seconds that a new tenant lags behind, who has not waited for any of them
QUANTUM = 1.0  # seconds by which an account is ahead before its tenant is over its share
FAR = 2.0  # seconds by which an account is so far ahead that its tenant all but makes way for others
BRIEFLY = 1.25  # how many times as long a step may take with the jobs of such a tenant in it


class Shares:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self._used: dict[str, float] = {}  # weighted seconds, of tenants that have work or lag less than the limit
        self._least = 0.0  # of the tenants that have work
        self._active: frozenset[str] = frozenset()  # tenants that have work

    def charge(self, tenants: Iterable[str], seconds: float) -> None:
        """Divide the seconds of a step among the tenants of its jobs, which are named once per job."""
        named = list(tenants)
        for tenant in named:
            used = self._used.get(tenant, self._least)
            self._used[tenant] = used + seconds / len(named) / self.weights.get(tenant, 1.0)

    def meet(self, tenants: Iterable[str]) -> None:
        """Note who has work now."""
        active = frozenset(tenants)
        if not active:
            return
        self._active = active
        floor = max(self._used.values(), default=0.0) - CREDIT
        self._used = {tenant: used for tenant, used in self._used.items() if tenant in active or used > floor}
        for tenant in active:
            self._used[tenant] = max(self._used.get(tenant, floor + CREDIT - WELCOME), floor)
        self._least = min(self._used[tenant] for tenant in active)

    def is_over(self, tenant: str) -> bool:
        """True if others that have work were served less than this tenant."""
        return self._lead(tenant) > QUANTUM

    def _lead(self, tenant: str) -> float:
        return self._used.get(tenant, self._least) - self._least

    def stretch(self, tenant: str, others: Iterable[str]) -> float:
        """How many times as long as for the jobs of `others` alone a step may take with those of a tenant that is over
        its share: so long that the others still have their shares of it, or hardly longer if it is far ahead."""
        if self._lead(tenant) > FAR:
            return BRIEFLY
        every, theirs = (sum(self.weights.get(one, 1.0) for one in names) for names in (self._active, set(others)))
        return max(every / theirs, BRIEFLY)
