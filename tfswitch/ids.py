"""Makes ids of strings, separates ids of features, and counts collisions.

Tables use only 64-bit integers. `hash_strings` makes such ids from strings,
`pack` adds the number of a feature, and `HashCollisions` counts how often two
inputs got the same id.

For a NumPy array the result is a NumPy array. Ragged and sparse tensors keep
their structure. For anything else the result is a dense tensor.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch._settings._ranges import (
    NON_NEGATIVE_INT64,
    POSITIVE_INT,
    bad_argument,
    integers,
)
from tfswitch._types import IdsLike, TensorLike
from tfswitch.ops import string_ops
from tfswitch.ops.id_tensors import (
    map_values,
    to_id_array,
    to_id_tensor,
    to_string_tensor,
    values_of,
)

__all__ = ["HashCollisions", "hash_strings", "pack", "unpack"]

_SLOT_BITS = integers(1, 32)

# Salt of the fingerprint that distinguishes inputs with the same id: the first
# 64 bits of the fraction of pi, a number that no user chooses by accident.
_FINGERPRINT_SALT = 0x243F6A8885A308D3


def hash_strings(strings: IdsLike, salt: int = 0) -> Any:
    """Hashes each string to an int64 id.

    The hash is Fingerprint64 of FarmHash. It never changes: it is the same on
    every machine, in every version of TensorFlow and tfswitch, and in other
    programs (`FARM_FINGERPRINT` of BigQuery, `farmhash` packages). The 64 bits
    are read as a signed number. With a salt, the salt's 8 bytes, the lowest
    first, are hashed in front of the string. With another salt, other strings
    collide. The hash gives no protection against people who choose strings that
    collide.

    Works in eager mode, in `tf.function` and in `tf.data` maps.

    Example:

    >>> tsw.ids.hash_strings(["apple", "pear"]).numpy()
    array([ 6447335267136888601, -3559946605451344698])

    Args:
        strings: Strings of any shape: a dense, ragged or sparse tensor, a NumPy
            array, a list, a `str` or `bytes`. Their bytes are hashed, those of
            a `str` in UTF-8, without normalisation of case or Unicode form.
        salt: 0 (none) to 2**63 - 1.

    Returns:
        int64 of the shape and kind of `strings`. Any int64 may occur.

    Raises:
        ValueError: If `strings` are not strings, or `salt` is out of range.

    Source: Geoff Pike, FarmHash, https://github.com/google/farmhash; in the
    version of `tf.fingerprint`.
    """
    salt = NON_NEGATIVE_INT64.check("salt", salt)

    def hash_array(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind not in "OSUT":
            _refuse_strings(array.dtype)
        # The result is a NumPy array, even while a graph is being made.
        with tf.init_scope():
            tensor = to_string_tensor(array, "hash_strings")
            return string_ops.hash_strings(tensor, salt=salt).numpy()

    def hash_tensor(tensor: Any) -> tf.Tensor:
        if not tf.is_tensor(tensor):
            kind = np.asarray(tensor).dtype
            array = np.asarray(tensor, dtype=object)
            if array.size and kind.kind not in "OSUT":
                _refuse_strings(kind)
            tensor = to_string_tensor(array, "hash_strings")
        if tensor.dtype != tf.string:
            _refuse_strings(tensor.dtype.name)
        return string_ops.hash_strings(tensor, salt=salt)

    return _map_values(strings, hash_tensor, hash_array)


def pack(slot: TensorLike, ids: IdsLike, slot_bits: int = 12) -> Any:
    """Puts the number of a feature into the high bits of its ids.

        | slot: slot_bits | id: 64 - slot_bits |

    With such ids, features can share one table: the same number in two features
    gives two ids. An id keeps its low 64 - slot_bits bits: with 12 bits for the
    slot, `unpack` returns a number below 2**52 unchanged. A string keeps the
    low bits of its hash, so within a slot strings collide as with a shorter
    hash: see `HashCollisions`.

    Works in eager mode, in `tf.function` and in `tf.data` maps; NumPy gives the
    same numbers. In slots from 1 on no id packs to 0, so a 0 that pads short
    lists becomes another number. Pad after packing.

    Example:

    >>> tsw.ids.pack(3, np.array([7, 8]))
    array([13510798882111495, 13510798882111496])
    >>> tsw.ids.unpack(13510798882111495)
    (3, 7)

    Args:
        slot: Number of the feature, 0 to 2**slot_bits - 1; or integers that
            broadcast with dense `ids`, such as one per column.
        ids: Integers or strings of any shape: a dense, ragged or sparse tensor,
            a NumPy array, a list or scalar.
        slot_bits: Bits for the slot, 1 to 32. A change of `slot_bits` changes
            all ids.

    Returns:
        int64 of the shape and kind of `ids`. Ids in slots from
        2**(slot_bits - 1) on are negative.

    Raises:
        ValueError: If `slot` or `slot_bits` is out of range, or `ids` are
            neither integers nor strings.
        tf.errors.InvalidArgumentError: If a `slot` that is only known when the
            graph runs is out of range.
    """
    slot_bits = _SLOT_BITS.check("slot_bits", slot_bits)
    shift = 64 - slot_bits
    mask = 2**shift - 1
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)) and np.ndim(slot):
        raise ValueError(
            "`slot` must be a single number for ragged and sparse ids. "
            f"Received: slot of shape {np.shape(slot)}"
        )
    slot = _to_slot(slot, slot_bits)
    if tf.is_tensor(slot) and isinstance(ids, (np.ndarray, np.generic)):
        ids = to_id_tensor(ids, "pack")

    def pack_array(array: np.ndarray) -> np.ndarray:
        keys = to_id_array(array, "pack").astype(np.int64)
        return np.bitwise_or(np.left_shift(slot, shift), keys & mask)

    def pack_tensor(tensor: Any) -> tf.Tensor:
        keys = to_id_tensor(tensor, "pack")
        high = tf.bitwise.left_shift(
            tf.convert_to_tensor(slot), tf.constant(shift, tf.int64)
        )
        low = tf.bitwise.bitwise_and(keys, tf.constant(mask, tf.int64))
        return tf.bitwise.bitwise_or(high, low)

    return _map_values(ids, pack_tensor, pack_array)


def unpack(packed: IdsLike, slot_bits: int = 12) -> tuple[Any, Any]:
    """Separates ids of `pack` into slots and ids.

    Args:
        packed: int64 of any shape, as `pack` takes ids.
        slot_bits: The `slot_bits` that `pack` got.

    Returns:
        The slots, and the low bits of the ids, from 0 to
        2**(64 - slot_bits) - 1. The low bits are the original id if that id was
        in this range. Both are int64 of the shape and kind of `packed`, or
        Python integers for a Python integer.

    Raises:
        ValueError: If `slot_bits` is out of range, or `packed` is not int64.
    """
    slot_bits = _SLOT_BITS.check("slot_bits", slot_bits)
    shift = 64 - slot_bits
    id_mask, slot_mask = 2**shift - 1, 2**slot_bits - 1
    if isinstance(packed, int) and not isinstance(packed, bool):
        if not -(2**63) <= packed < 2**63:
            raise bad_argument("packed", packed, "int64")
        return (packed >> shift) & slot_mask, packed & id_mask
    dtype = (
        packed.dtype if hasattr(packed, "dtype") else np.asarray(packed).dtype
    )
    if tf.as_dtype(dtype) != tf.int64:
        raise ValueError(
            f"`packed` must be int64. Received: dtype={tf.as_dtype(dtype).name}"
        )

    def slots_of(tensor: Any) -> tf.Tensor:
        high = tf.bitwise.right_shift(
            tf.convert_to_tensor(tensor), tf.constant(shift, tf.int64)
        )
        return tf.bitwise.bitwise_and(high, tf.constant(slot_mask, tf.int64))

    def ids_of(tensor: Any) -> tf.Tensor:
        return tf.bitwise.bitwise_and(
            tf.convert_to_tensor(tensor), tf.constant(id_mask, tf.int64)
        )

    return (
        _map_values(packed, slots_of, lambda x: (x >> shift) & slot_mask),
        _map_values(packed, ids_of, lambda x: x & id_mask),
    )


class HashCollisions:
    """Counts inputs that got the id of another input.

    The method `count` gets inputs and their ids, in Python or in a `tf.data`
    pipeline. The object keeps 16 bytes for each distinct input: the id, and a
    second fingerprint of 64 bits that does not depend on the id. Two inputs
    count as the same input only if both numbers are equal. An integer's second
    fingerprint is the number itself, so the count is exact for integers.
    Thread-safe.

    Example:

    >>> collisions = tsw.ids.HashCollisions(slot_bits=12)
    >>> names = np.array(["apple", "pear", "apple"])
    >>> ids = collisions.count(names, tsw.ids.pack(3, names))
    >>> collisions.stats()["inputs"], collisions.stats()["collisions"]
    (2, 0)

    and in a pipeline:

    ```python
    dataset = dataset.map(
        lambda names: collisions.count(names, tsw.ids.hash_strings(names))
    )
    ```

    Args:
        slot_bits: As for `pack`, if `pack` made the ids: inputs of different
            slots cannot collide. 0 means that ids are hashes of 64 bits.
        max_inputs: Largest number of distinct inputs. Above this number, new
            inputs are not counted. 2**24 inputs take 256 MiB, and up to three
            times as much while they are sorted.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, *, slot_bits: int = 0, max_inputs: int = 2**24) -> None:
        if slot_bits != 0:
            _SLOT_BITS.check("slot_bits", slot_bits)
        self._max_inputs = POSITIVE_INT.check("max_inputs", max_inputs)
        self._slot_bits = int(slot_bits)
        self._lock = threading.Lock()
        # Distinct pairs of id and fingerprint, sorted in this order.
        self._ids = np.zeros(0, np.int64)
        self._fingerprints = np.zeros(0, np.int64)
        # Pairs that are not in the sorted arrays yet.
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_pending = 0
        self._is_full = False

    def count(self, inputs: IdsLike, ids: IdsLike) -> Any:
        """Counts inputs and returns their ids unchanged.

        In a graph, inputs are counted each time the graph runs and the result
        is used. The count is kept in the process that called this method.

        Args:
            inputs: Strings or integers of any shape and kind, as `pack` takes
                them.
            ids: int64 of the same shape and kind.

        Raises:
            ValueError: If `ids` are not int64 or of another shape than
                `inputs`.
        """
        fingerprints = _fingerprints_of(values_of(inputs))
        values = values_of(ids)
        if not tf.is_tensor(values):
            values = np.asarray(values)
        if tf.as_dtype(values.dtype) != tf.int64:
            raise ValueError(
                "`ids` must be int64, as hash_strings and pack make them. "
                f"Received: dtype={tf.as_dtype(values.dtype).name}"
            )
        if not tf.TensorShape(values.shape).is_compatible_with(
            fingerprints.shape
        ):
            raise ValueError(
                "`ids` must have the shape of `inputs`. Received: ids of shape "
                f"{values.shape} and inputs of shape {fingerprints.shape}"
            )
        if not tf.is_tensor(values) and not tf.is_tensor(fingerprints):
            self._add(fingerprints, values)
            return ids
        values = tf.convert_to_tensor(values)
        fingerprints = tf.convert_to_tensor(fingerprints)
        if hasattr(values, "numpy") and hasattr(fingerprints, "numpy"):
            self._add(fingerprints.numpy(), values.numpy())
            return ids
        counted = tf.numpy_function(self._add, [fingerprints, values], tf.int64)
        with tf.control_dependencies([counted]):
            return _map_values(ids, tf.identity, tf.identity)

    def stats(self) -> dict[str, Any]:
        """Returns the counts.

        Returns:
            A dict:

            *   inputs: Distinct inputs.
            *   ids: Distinct ids.
            *   collisions: inputs - ids, how many inputs have no id of their
                own.
            *   expected_collisions: The expected collisions of a random
                function, as a float. With n inputs and m possible ids this is
                n - m (1 - (1 - 1/m)^n), or about n^2 / 2m. m is 2**64 without
                slots; with slots it is 2**(64 - slot_bits), and the numbers of
                all slots are summed. Integers that `pack` keeps unchanged do
                not collide, so count integers with another object.
            *   is_full: Whether `max_inputs` has been reached.
        """
        with self._lock:
            self._sort_in()
            num_inputs = len(self._ids)
            num_ids = int(np.sum(_starts_of_runs(self._ids)))
            if self._slot_bits:
                slots = self._ids >> (64 - self._slot_bits)  # Sorted, too.
                starts = np.flatnonzero(_starts_of_runs(slots))
                sizes = np.diff(np.append(starts, num_inputs))
            else:
                sizes = np.array([num_inputs])
            return {
                "inputs": num_inputs,
                "ids": num_ids,
                "collisions": num_inputs - num_ids,
                "expected_collisions": sum(
                    _expected_collisions(int(n), 2 ** (64 - self._slot_bits))
                    for n in sizes
                ),
                "is_full": self._is_full,
            }

    def _add(self, fingerprints: np.ndarray, ids: np.ndarray) -> np.int64:
        if fingerprints.shape != ids.shape:
            raise ValueError(
                f"{ids.shape} ids of {fingerprints.shape} inputs: the shapes "
                "must be the same"
            )
        with self._lock:
            if not self._is_full and ids.size:
                # Copies the arrays, because TensorFlow reuses their memory.
                self._pending.append(
                    (ids.flatten(), fingerprints.astype(np.int64).flatten())
                )
                self._num_pending += ids.size
                # The limit is a share of the known ids, so that n inputs are
                # sorted log n times and not n times.
                if self._num_pending >= max(2**16, len(self._ids) // 4):
                    self._sort_in()
        return np.int64(ids.size)

    def _sort_in(self) -> None:
        if not self._pending:
            return
        known = len(self._ids)
        ids = np.concatenate([self._ids, *(pair[0] for pair in self._pending)])
        fingerprints = np.concatenate(
            [self._fingerprints, *(pair[1] for pair in self._pending)]
        )
        self._pending, self._num_pending = [], 0
        # This sort is stable: a known pair comes before an equal new pair.
        order = np.lexsort((fingerprints, ids))
        ids, fingerprints = ids[order], fingerprints[order]
        distinct = _starts_of_runs(ids) | _starts_of_runs(fingerprints)
        excess = int(np.sum(distinct)) - self._max_inputs
        if excess >= 0:
            self._is_full = True
        if excess > 0:
            new = np.flatnonzero(distinct & (order >= known))
            # Drops the inputs that came last.
            latest = new[np.argsort(order[new])[len(new) - excess :]]
            distinct[latest] = False
        self._ids, self._fingerprints = ids[distinct], fingerprints[distinct]


def _map_values(
    value: Any,
    of_tensor: Callable[[Any], tf.Tensor],
    of_array: Callable[[np.ndarray], np.ndarray],
) -> Any:
    """Applies one function to tensors of any kind, another one to arrays."""
    if isinstance(value, (np.ndarray, np.generic)):
        return of_array(np.asarray(value))
    return map_values(of_tensor, value)


def _fingerprints_of(inputs: Any) -> Any:
    """Returns 64 bits for each input, which do not depend on its id."""
    if not tf.is_tensor(inputs):
        array = np.asarray(inputs)
        if array.dtype.kind not in "OSUT":
            return to_id_array(inputs, "HashCollisions").astype(np.int64)
        return hash_strings(inputs, salt=_FINGERPRINT_SALT)
    if inputs.dtype == tf.string:
        return hash_strings(inputs, salt=_FINGERPRINT_SALT)
    return to_id_tensor(inputs, "HashCollisions")


def _starts_of_runs(values: np.ndarray) -> np.ndarray:
    """Marks the first value, and each value that differs from the last."""
    starts = np.ones(len(values), bool)
    starts[1:] = values[1:] != values[:-1]
    return starts


def _expected_collisions(n: int, m: int) -> float:
    """Returns n minus the expected count of distinct values in n draws."""
    if n < 2:
        return 0.0
    if n < m * 1e-4:
        # The first two terms of the binomial series. The exact formula
        # subtracts two nearly equal numbers, which would leave no correct
        # digits.
        pairs = n * (n - 1) / (2 * m)
        return pairs * (1 - (n - 2) / (3 * m))
    return n + m * math.expm1(n * math.log1p(-1 / m))


def _refuse_strings(dtype: Any) -> None:
    raise ValueError(
        f"hash_strings: expected strings, got {dtype}. Integers are ids as "
        "they are; tfswitch.ids.pack takes both."
    )


def _to_slot(slot: Any, slot_bits: int) -> Any:
    """Returns int64 slots: an array or, for a symbolic tensor, a tensor."""
    dtype = tf.as_dtype(
        slot.dtype if tf.is_tensor(slot) else np.asarray(slot).dtype
    )
    if not dtype.is_integer:
        raise ValueError(
            f"`slot` must be an integer. Received: slot={slot!r} (of type "
            f"{dtype.name})"
        )
    max_slot = 2**slot_bits - 1
    message = f"`slot` must be from 0 to {max_slot}, with {slot_bits} bits"
    if tf.is_tensor(slot) and not hasattr(slot, "numpy"):
        slot = tf.cast(slot, tf.int64)
        with tf.control_dependencies(
            [
                tf.debugging.assert_non_negative(slot, message),
                tf.debugging.assert_less_equal(
                    slot, tf.constant(max_slot, tf.int64), message
                ),
            ]
        ):
            return tf.identity(slot)
    slots = np.asarray(slot)
    wrong = slots[(slots < 0) | (slots > max_slot)]
    if wrong.size:
        raise ValueError(f"{message}. Received: slot={wrong.flat[0]}")
    return slots.astype(np.int64)
