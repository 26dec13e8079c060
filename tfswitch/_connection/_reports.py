"""Dicts that tables and clusters return, and that print as a sentence."""

from collections.abc import Mapping
from typing import Any

from tfswitch._connection._control_calls import integers

_MEMORY = (
    "row_bytes",
    "index_bytes",
    "reserved_bytes",
    "admission_bytes",
    "change_bytes",
    "cold_memory_bytes",
)
_RULES = ("ttl", "show_click_score", "l2_norm", "max_rows")
_PREFETCH = (
    "hits",
    "late",
    "misses",
    "unused",
    "own_pushes",
    "other_pushes",
)
_COUNTS = (
    *_MEMORY,
    "slot_floats",
    "num_rows",
    "row_stride_bytes",
    "inserted_rows",
    "erased_rows",
    "num_candidates",
    "num_steps",
    "num_pulls",
    "pulled_keys",
    "missing_keys",
    "refused_keys",
    "num_pushes",
    "pushed_keys",
    "promoted_rows",
    "demoted_rows",
    "cold_rows",
    "cold_file_bytes",
    "cold_written_bytes",
    "cold_block_reads",
    *(f"evicted_by_{rule}" for rule in (*_RULES, "max_memory")),
)


def format_bytes(num_bytes: int) -> str:
    """Returns a size as text, such as "122.1 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min((num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:,.1f} {'KMGT'[power - 1]}iB"


class TableStats(dict[str, Any]):
    """Row counts and memory; prints as "1,000,000 rows, 122.1 MiB"."""

    def __init__(
        self,
        info: Mapping[str, Any],
        exchange: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads the fields of TableInfo and PrefetchesResponse messages."""
        super().__init__(lost=info["lost"], **integers(info, _COUNTS))
        if exchange is None:
            return
        self["pushes_in_flight"] = int(exchange["pushes_in_flight"])
        tables = {table["name"]: table for table in exchange["tables"]}
        counts = tables.get(info["config"]["name"], {})
        for name in _PREFETCH:
            self[f"prefetch_{name}"] = int(counts.get(name, 0))

    @property
    def memory_bytes(self) -> int:
        """All memory of the table."""
        return sum(self[name] for name in _MEMORY)

    def __repr__(self) -> str:
        text = f"{self['num_rows']:,} rows, {format_bytes(self.memory_bytes)}"
        return f"{text}, {self['lost']}" if self["lost"] else text


class ClusterStats(dict[str, TableStats]):
    """Tables by name.

    Attributes:
        servers: For each server, in shard order, how it protects its tables;
            empty if tables are in this process.
    """

    def __init__(
        self,
        tables: Mapping[str, TableStats],
        *,
        servers: list[dict[str, bool]],
    ) -> None:
        super().__init__(tables)
        self.servers = servers

    def __repr__(self) -> str:
        text = super().__repr__()
        insecure = [
            number
            for number, server in enumerate(self.servers)
            if server["is_insecure"]
        ]
        return f"{text}, insecure servers: {insecure}" if insecure else text


class ShrinkReport(dict[str, Any]):
    """The rows that a shrink has evicted, or would evict.

    Attributes:
        dry_run: Whether nothing was evicted.
    """

    def __init__(self, response: Mapping[str, Any], *, dry_run: bool) -> None:
        """Reads the fields of a message ShrinkResponse."""
        counts = ("evicted_rows", "evicted_bytes", "evicted_candidates")
        super().__init__(
            integers(response, (*counts, "remaining_rows")),
            by={rule: int(response[f"by_{rule}"]) for rule in _RULES},
            remaining_usage={
                name: float(response[f"remaining_{name}"])
                for name in ("count", "show", "click")
            },
        )
        self.dry_run = dry_run

    def __repr__(self) -> str:
        evicted = self["evicted_rows"]
        verb = "would evict" if self.dry_run else "evicted"
        rules = [f"{n:,} by {rule}" for rule, n in self["by"].items() if n]
        return (
            f"{verb} {evicted:,} of {evicted + self['remaining_rows']:,} rows"
            f" ({format_bytes(self['evicted_bytes'])})"
            + (": " if rules else "")
            + ", ".join(rules)
        )
