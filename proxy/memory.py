"""Memory for large replies. Shell.

glibc is kept from giving it back to the kernel after every one and asking for it anew: the pages of a reply of 8,192
tokens come back as 150 page faults, a fifth of all that the sidecar does for it.
"""

import ctypes
import sys
from collections.abc import Callable

room: Callable[[int], bytearray]
try:
    from proxy import walk

    room = walk.room
except ImportError:
    room = bytearray

# glibc's names and numbers (malloc.h); what is kept is given back over this many free bytes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT = 64 << 20
_GROWTH = 1 << 20
_LARGEST_ON_HEAP = 32 << 20


def keep_memory() -> None:
    """Once a process; where there is no glibc, nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_TOP_PAD, _GROWTH)
        mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
