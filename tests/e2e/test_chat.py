"""``p2ptrain chat`` at a real terminal."""

from __future__ import annotations

from tests.e2e.terminal import Terminal

# The signal comes when the prompt is written and nobody waits yet. The C function itself is bound: Python's own kill
# would raise at once, in the hook, where readline drops it.
MISSED = """
import ctypes, functools, os, readline, signal
from p2ptrain.cli.chat import typed_line
kill = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)
for turn in range(3):
    readline.set_pre_input_hook(kill)
    try:
        typed_line("> ")
    except KeyboardInterrupt:
        print("heard", turn)
readline.set_pre_input_hook()
print(typed_line("? "), "was typed")
"""


def test_ctrl_c_between_the_prompt_and_the_wait_is_heard() -> None:
    terminal = Terminal(program=("-c", MISSED))
    try:
        terminal.until("heard 0.*heard 1.*heard 2.*[?] ")
        terminal.type("a line\n")
        terminal.until("a line was typed")
        assert terminal.left()[0] == 0
    finally:
        terminal.end()
