"""Waits use the steady clock, which nobody can set."""

import re

from tests.support import PACKAGE

# Where the time of day is wanted, how often, and what for.
CALENDAR = {
    "cc/access/token_list.cc": 1,  # When tokens expire.
    "cc/base/log_writer.cc": 1,  # The lines of a server.
    "cc/client/checkpoints.cc": 1,  # Ids that sort.
    "cc/client/trace_log.cc": 1,  # When spans of traces begin.
    "cc/predictor/include/tfswitch/predictor.h": 1,  # When a model was made.
    "cc/predictor/rows_api.cc": 1,  # When a model was made.
    "cc/recovery/repair.cc": 1,  # The name of a folder.
    "cc/rpc/server/server_times.h": 1,  # When the work on a call began.
    "cc/serving/export_folder.cc": 1,  # When an export was made.
    "cc/serving/remote_model.cc": 1,  # Since when a model is served.
    "cc/serving/served_rows.cc": 1,  # The same.
    "cc/shard/own_state.cc": 1,  # When a state was saved.
    "cc/shard/saves.cc": 1,  # When a save was written.
    "cc/shard/shard.cc": 1,  # When rows were exported.
    "cc/shard/table_catalogue.h": 1,  # In an error: since when it runs.
    "cc/sync/coordinator.cc": 1,  # Numbers that grow over restarts.
    "cc/sync/replica_coordinator.cc": 1,  # The same.
    "cc/table/row_statistics.cc": 1,  # The day of a push.
    "tfswitch/_progress_bar.py": 1,  # Ids that sort.
    "tfswitch/_connection/_token_file.py": 1,  # When tokens expire.
    "tfswitch/export.py": 1,  # The age of a base that may be of another day.
    "tfswitch/keras/_saved_rows.py": 1,  # The day of rows.
}

_WALL_CLOCK = re.compile(
    r"absl::Now\(\)|GetCurrentTimeNanos|system_clock|high_resolution_clock|"
    # Abseil's locks wait until a time of day.
    r"AwaitWithTimeout|WaitWithTimeout|WaitForNotificationWithTimeout|"
    r"gettimeofday|CLOCK_REALTIME|\btime\.time(?:_ns)?\b|datetime\.now\b|"
    r"from time import .*\btime\b"
)


def test_the_time_of_day_is_read_only_where_it_is_wanted():
    root = PACKAGE.parent
    files = [
        file
        for folder, kinds in (("cc", ("cc", "h", "inc")), ("tfswitch", ("py",)))
        for kind in kinds
        for file in (root / folder).rglob(f"*.{kind}")
    ]
    assert len(files) > 300

    found = {
        file.relative_to(root).as_posix(): len(
            _WALL_CLOCK.findall(file.read_text(encoding="utf-8"))
        )
        for file in files
    }

    assert {file: n for file, n in found.items() if n} == CALENDAR, (
        "durations go by SteadyNow() (cc/base/steady_clock.h), ToDeadline() "
        "(cc/rpc/deadlines.h) and time.monotonic()"
    )
