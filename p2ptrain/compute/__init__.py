"""Models, data, training, checkpoints, generation: the only package that imports torch. All of it blocks.

Begin with ``trainer``, which lists the objects that take a training step, and with ``served_part`` for generation. Both
implement ``roles.engine``. ``layout`` and ``part`` cut models.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import() -> Iterator[None]:
    """Within it, torch and transformers are imported in five sixths of the time: without garbage collections.

    What they create lives as long as the process, so later collections leave it out.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
