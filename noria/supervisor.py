"""Runs a few child processes as one: starts them in order, restarts those that die, stops them in the opposite order.

Knows argument lists, exit codes and time; not what the children do.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from noria.child import Child, ChildSpec, read_lines

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""A child that ends with this code says that starting it again would not help."""
EXIT_KILLED = 130

FIRST_DELAY = 0.5  # seconds before the first restart; doubled at each further one
LONGEST_DELAY = 10.0
HEALTHY_AFTER = 30.0  # a child that lived this long starts again from the first delay
TICK = 0.1
IMPATIENT_TICK = 0.01  # while a child holds back those after it


@dataclass
class _Post:
    """A child's place: filled while `child` runs, else waiting for `start_at` on the monotonic clock."""

    spec: ChildSpec
    delay: float  # before its next restart
    child: Child | None = None
    start_at: float = 0.0
    started_at: float = 0.0
    was_ready: bool = False


class Supervisor:
    """`run()` blocks until a signal or a final failure, and leaves no process behind.

    `say` gets one line per event; `on_tick` is called every 0.1 s or sooner while the children run, `on_stop` once when
    they are about to be stopped. `hangup_reloads`: SIGHUP goes to the children that reload, and ends nothing.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        say: Callable[[str], None],
        on_tick: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        first_delay: float = FIRST_DELAY,
        hangup_reloads: bool = False,
    ) -> None:
        self._hangup_reloads = hangup_reloads
        self._first_delay = first_delay
        self._posts = [_Post(spec, first_delay, was_ready=spec.ready is None) for spec in specs]
        self._say = say
        self._on_tick = on_tick or (lambda: None)
        self._on_stop = on_stop or (lambda: None)
        self._selector = selectors.DefaultSelector()
        self._signals = 0

    def run(self) -> int:
        """Exit code: 0 after SIGINT, SIGTERM or a SIGHUP that ends; a child's own code when that is final; 130 when
        told twice."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in caught}
        try:
            code = self._watch()
            return code if self._stop_all() else EXIT_KILLED
        finally:
            for post in reversed(self._posts):
                self._bury(post)
            self._selector.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not self._hangup_reloads:
            self._signals += 1
            return
        for post in self._posts:
            if post.child is not None and post.spec.reloads:
                post.child.ask_to_reload()

    def _watch(self) -> int:
        while not self._signals:
            tick = TICK
            for post in self._posts:
                code = self._attend(post)
                if code is not None:
                    return code
                if not post.was_ready:
                    tick = IMPATIENT_TICK
                    break  # those after it wait
            self._on_tick()
            read_lines(self._selector, tick)
        return 0

    def _attend(self, post: _Post) -> int | None:
        """Look after one child for one tick; an exit code means that everything must end."""
        if post.child is None:
            return self._start(post) if time.monotonic() >= post.start_at else None
        code = post.child.poll()
        if code is not None:
            self._bury(post)
            return self._ended(post, code)
        if not post.was_ready and post.spec.ready is not None:
            post.was_ready = post.spec.ready()
        return None

    def _start(self, post: _Post) -> int | None:
        try:
            post.child = Child(post.spec, self._selector)
        except OSError as error:
            self._say(f"{post.spec.name} cannot be started: {error}")
            return EXIT_FAILED
        post.started_at = time.monotonic()
        return None

    def _ended(self, post: _Post, code: int) -> int | None:
        """Decide what follows a child's end: the exit code for all, or None and a restart."""
        if code == EXIT_CONFIGURATION:
            return code  # its own line has said why
        ended = f"{post.spec.name} ended ({_describe(code)})"
        if not post.was_ready:
            words = post.spec.last_words() if post.spec.last_words else ""
            self._say(f"{ended} before it was ready{': ' if words else ''}{words}")
            return EXIT_FAILED
        now = time.monotonic()
        if now - post.started_at >= HEALTHY_AFTER:
            post.delay = self._first_delay
        self._say(f"{ended}; starting it again in {post.delay:g} s")
        post.start_at = now + post.delay
        post.delay = min(2 * post.delay, LONGEST_DELAY)
        return None

    def _stop_all(self) -> bool:
        """Last started, first stopped, each with its own time to finish. False if a further signal cut that short."""
        told = self._signals
        self._on_stop()
        for post in reversed(self._posts):
            if post.child is None:
                continue
            post.child.ask_to_stop()
            give_up = time.monotonic() + post.spec.stop_seconds
            while post.child.poll() is None:
                if self._signals > told:
                    return False
                if time.monotonic() > give_up:
                    self._say(f"{post.spec.name} did not end within {post.spec.stop_seconds:g} s: killed")
                    break
                read_lines(self._selector, TICK / 2)
            self._bury(post)
        return True

    def _bury(self, post: _Post) -> None:
        if post.child is not None:
            post.child.bury()
            post.child = None


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
