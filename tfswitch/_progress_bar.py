"""Shows the progress of a save or a restore on a terminal."""

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Iterator

from tfswitch._connection._control_calls import Caller, call, integers

_INTERVAL_SECS = 0.2


@contextlib.contextmanager
def progress_bar(
    caller: Caller, task: str, progress: bool | None
) -> Iterator[str]:
    """Shows a bar on stderr while the body of the `with` runs.

    Args:
        caller: As for `call`.
        task: The title, such as "saving to 'ckpt'".
        progress: Whether to show a bar. None means yes if stderr is a terminal.

    Yields:
        The `progress_id` for the call; empty without a bar.
    """
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if not progress:
        yield ""
        return
    # Imports the modules of the bar here: they are slow to import, and most
    # processes save nothing.
    from rich import console, markup
    from rich import progress as rich_progress

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.fields[rows]}"),
        rich_progress.TimeElapsedColumn(),
        console=console.Console(stderr=True),
    )
    shown = bar.add_task(markup.escape(task), total=None, rows="")
    progress_id = f"{time.time_ns() // 10**6:012x}{secrets.token_hex(4)}"
    ended = threading.Event()

    def update() -> None:
        while not ended.wait(_INTERVAL_SECS):
            try:
                report = call(caller, "GetProgress", id=progress_id)
            except Exception:  # The call itself raises such an error.
                return
            done, total = integers(report, ("num_rows", "total_rows")).values()
            if total > 0:
                # The total does not count rows that were added later.
                done = min(done, total)
                rows = f"{done:,} of {total:,} rows"
                bar.update(shown, completed=done, total=total, rows=rows)

    thread = threading.Thread(target=update, daemon=True)
    with bar:
        thread.start()
        try:
            yield progress_id
        finally:
            # Does not wait for the end of the thread, because the thread itself
            # may be waiting for a server.
            ended.set()
        total = bar.tasks[0].total or 1
        bar.update(shown, completed=total, total=total)
