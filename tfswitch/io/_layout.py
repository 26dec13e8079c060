"""Names the parts of a table in a file, and checks files that are read."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from tfswitch._connection._rows import Rows, assign_rows, find_not_finite
from tfswitch._settings._ranges import bad_argument
from tfswitch.optimizers._conversion import have_equal_state
from tfswitch.table import EmbeddingTable

SLOTS = "slots"

_VERSION = 1


class Layout:
    """The names in a file of the ids, values and slots of a table.

    Attributes:
        kind: The kind of names in the file's format: "array", "column" or
            "feature".
        table: The table.
        slots: Whether slots are wanted.
        names: The name in the file of each field of `Rows`. The field of slots
            is left out if slots are not wanted, or the table has none.
        widths: How many floats a row has in each field of floats.
    """

    def __init__(
        self,
        kind: str,
        table: EmbeddingTable,
        *,
        slots: bool,
        ids: str = "ids",
        values: str = "values",
    ) -> None:
        if not isinstance(table, EmbeddingTable):
            raise ValueError(
                "`table` must be a tfswitch.EmbeddingTable; of a layer that is "
                f"`layer.table`. Received: table={table!r}"
            )
        arguments = {f"id_{kind}": ids, f"embedding_{kind}": values}
        for argument, name in arguments.items():
            if not isinstance(name, str) or not name:
                raise bad_argument(argument, name, "a name")
        self.kind = kind
        self.table = table
        self.slots = slots
        self.names = {"ids": ids, "values": values}
        self.widths = {"values": table.dim}
        if slots and table._slot_floats:
            self.names[SLOTS] = SLOTS
            self.widths[SLOTS] = table._slot_floats
        if len(set(self.names.values())) < len(self.names):
            raise ValueError(
                f"the names of {kind}s must differ. Received: "
                f"{list(self.names.values())}"
            )

    def metadata(self) -> str:
        """Returns JSON that describes the table of the rows."""
        return json.dumps(
            {
                "version": _VERSION,
                "table": self.table.name,
                "dim": self.table.dim,
                "optimizer": self.table.optimizer.to_table_config(),
                "statistics": _statistics_of(self.table),
            },
            sort_keys=True,
        )

    def visit(self, write: Callable[[dict[str, np.ndarray]], None]) -> int:
        """Calls `write` with batches of the table's rows; returns their number.

        The rows come in the order in which servers send them. A batch is a dict
        from the fields of `Rows` to arrays.
        """
        num_rows = 0

        def visit(
            ids: np.ndarray, values: np.ndarray, slots: np.ndarray | None
        ) -> None:
            nonlocal num_rows
            num_rows += len(ids)
            rows = {"ids": ids, "values": values}
            write(rows if slots is None else {**rows, SLOTS: slots})

        self.table._native.visit_rows(SLOTS in self.widths, visit)
        return num_rows

    def assign(self, batches: Iterable[Rows]) -> int:
        """Sets rows batch by batch; returns the number of rows."""
        num_rows = 0
        iterator = iter(batches)
        while True:
            try:
                rows = next(iterator, None)
            except (ValueError, OSError) as error:
                if num_rows == 0:
                    raise
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(
                    f"{error}. {num_rows} rows before it have been set"
                ) from error
            if rows is None:
                return num_rows
            assign_rows(self.table, rows)
            num_rows += len(rows.ids)


class Source:
    """Checks the batches of a file that is being read.

    Args:
        layout: The layout that the file should have.
        file: The name of the file.
    """

    def __init__(self, layout: Layout, file: str) -> None:
        self._layout = layout
        self._kind = layout.kind
        self._file = file
        # The number of rows before the present batch.
        self._num_rows = 0

    def check_names(self, present: Iterable[str]) -> None:
        """Raises ValueError unless the file has each name once."""
        present = list(present)
        for name in self._layout.names.values():
            if present.count(name) > 1:
                raise ValueError(
                    f"'{self._file}': there are {present.count(name)} "
                    f"{self._kind}s '{name}'; rename all but one"
                )
            if name not in present:
                self.refuse_missing(name, f", only {sorted(present)}")

    def refuse_missing(self, name: str, instead: str = "") -> NoReturn:
        if name == self._layout.names.get(SLOTS):
            remedy = "Write it with slots=True, or read it with slots=False"
        elif self._kind == "array":
            remedy = "Pass what np.load reads to table.assign"
        else:
            remedy = (
                f"Pass its name as `id_{self._kind}` or "
                f"`embedding_{self._kind}`"
            )
        raise ValueError(
            f"'{self._file}': there is no {self._kind} '{name}'{instead}. "
            f"{remedy}"
        )

    def refuse_ids(self, dtype: str) -> NoReturn:
        raise ValueError(
            f"{self._of('ids')} must hold integers, got {dtype}. Cast numbers "
            "to int64; hash strings with tfswitch.ids.hash_strings"
        )

    def refuse_floats(self, what: str, dtype: str) -> NoReturn:
        raise ValueError(
            f"{self._of(what)} must hold floats, {self._layout.widths[what]} "
            f"for each id, got {dtype}"
        )

    def check_floats(self, what: str, dtype: np.dtype) -> None:
        """Raises ValueError unless the dtype is numeric."""
        if dtype.kind not in "fiu":
            self.refuse_floats(what, str(dtype))

    def refuse_null(
        self, what: str, row: int, ids: np.ndarray | None = None
    ) -> NoReturn:
        raise ValueError(
            f"{self._of(what)} has null {self._at(row, ids)}. Leave the row "
            "out, or set the value"
        )

    def check_width(self, what: str, width: int, where: str = "") -> None:
        """Raises ValueError unless a row of the table has `width` floats."""
        expected = 1 if what == "ids" else self._layout.widths[what]
        if width != expected:
            of_table = (
                ""
                if what == "ids"
                else f" as the rows of table '{self._layout.table.name}'"
            )
            raise ValueError(
                f"{self._of(what)} must have {expected} values a row"
                f"{of_table}, got {width}{where}"
            )

    def check_lengths(
        self, what: str, lengths: np.ndarray, ids: np.ndarray | None = None
    ) -> None:
        """Raises ValueError unless each row of the batch has its length."""
        expected = 1 if what == "ids" else self._layout.widths[what]
        wrong = np.flatnonzero(lengths != expected)
        if wrong.size:
            row = int(wrong[0])
            self.check_width(what, int(lengths[row]), " " + self._at(row, ids))

    def check_state(self, metadata: str | bytes | None) -> None:
        """Raises ValueError if another optimizer wrote the slots of the file.

        Args:
            metadata: The text of `Layout.metadata`, or None if another program
                wrote the file.
        """
        if metadata is None or not self._layout.slots:
            return
        table = self._layout.table
        try:
            saved = json.loads(metadata)
            if saved["version"] != _VERSION:
                raise ValueError(f"they are of version {saved['version']!r}")
            optimizer, statistics = saved["optimizer"], saved["statistics"]
            fits = have_equal_state(
                optimizer, table.optimizer.to_table_config()
            )
            fits = fits and _kind_of(statistics) == _kind_of(
                _statistics_of(table)
            )
        except (
            AttributeError,
            KeyError,
            RecursionError,  # Lists that are nested too deeply.
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"'{self._file}': its metadata do not tell of which optimizer "
                f"its slots are ({error!r}); read it with slots=False"
            ) from error
        if not fits:
            raise ValueError(
                f"'{self._file}': its slots are of the optimizer {optimizer} "
                f"with statistics {statistics}, and table '{table.name}' has "
                f"{table.optimizer.to_table_config()} with "
                f"{_statistics_of(table)}. Read it with slots=False, or make "
                "the table with the same ones"
            )

    def to_ids(self, ids: np.ndarray) -> np.ndarray:
        """Returns ids as int64."""
        if ids.dtype.kind not in "iu":
            self.refuse_ids(str(ids.dtype))
        return np.ascontiguousarray(ids).astype(np.int64, copy=False)

    def to_rows(
        self, ids: np.ndarray, floats: Mapping[str, np.ndarray]
    ) -> Rows:
        """Makes rows of a batch.

        Args:
            ids: The ids that `to_ids` returned.
            floats: For each field of `Rows` with floats an array
                `[len(ids), width]` of any dtype.

        Raises:
            ValueError: If a value is no float, or not finite as float32.
        """
        rows = Rows(
            ids,
            **{
                what: self._to_float32(what, ids, values)
                for what, values in floats.items()
            },
        )
        self._num_rows += len(ids)
        return rows

    def where(self, row: int) -> str:
        """Returns where in the file a row of the batch is, for messages."""
        return f"in row {self._num_rows + row}"

    def _to_float32(
        self, what: str, ids: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        self.check_floats(what, values.dtype)
        # A value that overflows becomes Inf, which the check below finds.
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, np.float32)
        found = find_not_finite(rows)
        if found is not None:
            row, place = found
            raise ValueError(
                f"{self._of(what)} has {values[row, place]} "
                f"{self._at(row, ids)} at place {place}, and rows are finite "
                "float32. Leave the row out, or set the value"
            )
        return rows

    def _of(self, what: str) -> str:
        return f"'{self._file}': {self._kind} '{self._layout.names[what]}'"

    def _at(self, row: int, ids: np.ndarray | None) -> str:
        of_id = "" if ids is None else f" (id {ids[row]})"
        return self.where(row) + of_id


def _statistics_of(table: EmbeddingTable) -> dict[str, Any] | None:
    statistics = table.statistics
    return None if statistics is None else statistics.to_table_config()


def _kind_of(statistics: Mapping[str, Any] | None) -> Any:
    return None if statistics is None else statistics["kind"]
