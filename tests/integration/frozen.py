"""The fork server imports this last: the garbage collector then leaves alone what it has, 300,000 objects.

Otherwise each collection in a forked process walks them, and copies the pages that hold them.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
