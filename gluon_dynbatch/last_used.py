"""What is remembered across flushes: tables of the last used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

__all__ = ["LastUsed"]


class LastUsed:
    """A table that forgets what was not used for longest; `lock` is for who reads and puts in one go."""

    def __init__(self, most: int):
        self.most, self.lock = most, threading.RLock()
        self.changes = 0                        # how often something was put, or all was forgotten
        self._entries: OrderedDict[Any, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, default: Any = None) -> Any:
        return self._entries.get(key, default)

    def put(self, key: Any, entry: Any) -> None:
        """Let an entry be there, as the last used one."""
        with self.lock:
            self.changes += 1
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self.most:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self.lock:
            self.changes += 1
            self._entries.clear()
