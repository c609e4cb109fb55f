"""A line that a person types, where no Ctrl+C is missed."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading

_AGAIN_S = 0.05  # far below what a person would call late


def typed_line(prompt: str) -> str:
    """As ``input``, with the keys for editing and the history where this Python has them.

    Python's wait for a line on top of GNU readline looks at signals only when one interrupts it: a Ctrl+C between its
    writing of the prompt and its wait stays unheard until the next key. So each is followed by a signal to which
    nothing is bound, until the wait has ended.

    Raises:
        EOFError, UnicodeDecodeError, KeyboardInterrupt: as ``input``.
    """
    with contextlib.suppress(ImportError):  # Windows, or an interpreter that was built without it
        import readline  # noqa: F401 - input() uses it from now on
    if not hasattr(signal, "SIGURG") or threading.current_thread() is not threading.main_thread():
        return input(prompt)
    ended = threading.Event()
    heard, hears = socket.socketpair()
    hears.setblocking(False)
    bound = signal.signal(signal.SIGURG, lambda *_: None)
    before = signal.set_wakeup_fd(hears.fileno(), warn_on_full_buffer=False)
    try:
        threading.Thread(target=_wake, args=(heard, ended), name="ctrl-c", daemon=True).start()
        return input(prompt)
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGURG, bound)
        hears.close()


def _wake(heard: socket.socket, ended: threading.Event) -> None:
    """Interrupt the main thread's wait after each SIGINT whose number came by ``heard``, until it has ``ended``."""
    waiting = threading.main_thread().ident
    assert waiting is not None
    with heard:
        while number := heard.recv(1):
            while number[0] == signal.SIGINT and not ended.wait(_AGAIN_S):
                signal.pthread_kill(waiting, signal.SIGURG)
