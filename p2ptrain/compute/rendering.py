"""Chat templates, rendered in a process of their own, which has limits.

A template comes with a model. So it may run for ever or fill the memory, also while it is parsed or inside one
operation of Python, where a thread cannot be interrupted. One process renders all conversations of this one, for
training and for serving, so that a text never depends on the way. It starts with the first conversation, and again
after a limit was reached. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Any, cast

from p2ptrain.core.errors import ConfigError, UserError

Chat = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""The messages of a conversation, and what else the template finds."""
LIMIT_S, LIMIT_BYTES = 2.0, 1 << 30
"""Processor time of one conversation, and address space of the process. transformers takes 0.15 GB of it."""
_S_PER_BYTE = 2e-7  # more time for long conversations
_MOST_ANSWER_BYTES = 64 << 20
_OUT_OF_MEMORY = 3  # exit code
_REMEDY = "correct the model's chat_template.jinja, or use another model"
_COMMAND = (sys.executable, "-P", "-c", "from p2ptrain.compute.rendering import serve; serve()")


class TemplateProcess:
    """Renders for all threads, one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._stop)

    def render(self, template: str, chats: Sequence[Chat], whose: str, date: str = "") -> list[str]:
        """The texts of conversations. ``whose``: the name of the template's model, for messages. ``date``: that the
        template prints, as ``2026-11-28``; empty: today's, in UTC. Raises ``ConfigError``: the template reached a
        limit, or ended its process; ``UserError``: the template fails for a conversation."""
        with self._lock:
            process = self._started()
            request = json.dumps([template, chats, date]).encode()
            try:
                cast("IO[bytes]", process.stdin).write(request + b"\n")
                cast("IO[bytes]", process.stdin).flush()
                line = cast("IO[bytes]", process.stdout).readline(_MOST_ANSWER_BYTES)
            except OSError:
                line = b""
            except BaseException:
                self._stop()  # else the next request would get this one's answer
                raise
            if not line.endswith(b"\n"):
                raise ConfigError(f"the chat template of {whose} {self._why_ended()}", remedy=_REMEDY)
        texts, problem = json.loads(line)
        if problem:
            has_system = any(message.get("role") == "system" for messages, _ in chats for message in messages)
            remedy = "some templates accept no system text: leave out --system" if has_system else _REMEDY
            raise UserError(f"the chat template of {whose} fails for this chat: {problem}", remedy=remedy)
        return [str(text) for text in texts]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            places = os.pathsep.join(place for place in sys.path if place)
            environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl+C is for this process
            )
        return self._process

    def _why_ended(self) -> str:
        code = self._stop()
        if code == -getattr(signal, "SIGPROF", 0):
            return f"takes more than {LIMIT_S:.0f} s of processor time"
        if code == _OUT_OF_MEMORY:
            return f"takes more than {LIMIT_BYTES >> 30} GiB of memory"
        return f"writes too much, or ended its process (code {code})"

    def _stop(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what it did not read
                cast("IO[bytes]", pipe).close()
        try:
            return process.wait(0.5)  # it ends with its input
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


TEMPLATES = TemplateProcess()


def serve() -> None:
    """Answer requests until the input ends."""
    from transformers.utils import chat_template_utils

    library: Any = chat_template_utils
    compiled, now = library._compile_jinja_template, datetime.now(UTC)

    def dated(text: str) -> Any:
        template = compiled(text)
        template.globals["strftime_now"] = lambda form: now.strftime(form)  # the library's prints the machine's time
        return template

    library._compile_jinja_template = dated
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for line in requests:
        texts = list[str]()
        try:
            template, chats, date = json.loads(line)
            now = datetime.fromisoformat(date) if date else datetime.now(UTC)
            for messages, settings in chats:
                _limit_time(LIMIT_S + _S_PER_BYTE * len(line))
                if not messages:
                    raise ValueError("the conversation is empty")
                plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
                texts += library.render_jinja_template(conversations=[plain], chat_template=template, **settings)[0]
            answers.write(json.dumps([texts, ""]).encode() + b"\n")
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # noqa: BLE001 - whatever the template does
            problem = (str(error).strip() or type(error).__name__)[:300]
            answers.write(json.dumps([[], problem]).encode() + b"\n")
        answers.flush()
        _limit_time(0)


def _limit_time(processor_s: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, processor_s)  # the signal ends the process, in whatever it is
