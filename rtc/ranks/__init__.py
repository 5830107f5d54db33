"""A model on several ranks: they agree before their first collective, and none hangs on a dead one.

``Ranks`` is what one compiled model has to do with the other ranks: nothing until a graph of its
contains collectives. All talk goes over the process group's key-value store, never through a
collective, which could hang; each wait is bounded; a steady call touches no store.
"""

from rtc.ranks.model import Ranks
from rtc.ranks.store import exchange
from rtc.ranks.watchdog import Watchdog

__all__ = ["Ranks", "Watchdog", "exchange"]
