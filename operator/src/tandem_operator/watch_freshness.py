"""Whether the watch still delivers: a change that a list has shown must come by the watch too, and soon.

Knows: resource versions by UID. Does not know: kopf, HTTP.

A dead watch is silent, and so is a quiet cluster. What tells them apart is an object of which a list shows a
version that the watch has not delivered: it may be on its way, but not for long. What the next list of the
same model does not show any more is owed no longer, since a watch that broke and came back never tells of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .objects import KINDS, uid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from .objects import Kind, Obj

    Key = tuple[str, str]  # namespace and name of a model

MUTE_S = 60.0


class WatchFreshness:
    """Of the kinds that are watched. `clock` is monotonic, in seconds."""

    def __init__(self, watched: Container[Kind], clock: Callable[[], float]) -> None:
        self._watched, self._clock = watched, clock
        self._delivered: dict[str, str] = {}  # UID -> the version delivered last
        self._owed: dict[Key, dict[str, float]] = {}  # UID -> since when a list shows another one

    def delivered(self, key: Key, uid: str, version: str, *, gone: bool) -> None:
        """Whatever version comes, the stream moves: an older one than listed is followed by the newer."""
        self._owed.get(key, {}).pop(uid, None)
        if gone:
            self._delivered.pop(uid, None)
        else:
            self._delivered[uid] = version

    def listed(self, key: Key, found: Iterable[Obj]) -> None:
        """All that a pass over the model has read; nothing, if the model is gone."""
        before = self._owed.pop(key, {})
        owed = {
            uid: before.get(uid, self._clock())
            for one in found
            if KINDS[one["kind"]] in self._watched
            and self._delivered.get(uid := uid_of(one)) != one["metadata"]["resourceVersion"]
        }
        if owed:
            self._owed[key] = owed

    def overdue(self, older_s: float) -> list[Key]:
        """Models of which something has been owed that long: worth reading again."""
        now = self._clock()
        return [key for key, owed in self._owed.items() if owed and now - min(owed.values()) >= older_s]

    @property
    def mute_s(self) -> float:
        """How long the watch has owed a version; 0 if it owes none."""
        times = [since for owed in self._owed.values() for since in owed.values()]
        return self._clock() - min(times) if times else 0.0
