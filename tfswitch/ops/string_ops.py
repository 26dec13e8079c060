"""The op on strings as a Python function."""

import tensorflow as tf

from tfswitch import _loader

_library = _loader.load_ops()


def hash_strings(strings: tf.Tensor, *, salt: int = 0) -> tf.Tensor:
    """Hashes strings to 64 bits; see `tfswitch.ids.hash_strings`.

    Args:
        strings: string tensor of any shape.
        salt: From -2**63 to 2**63 - 1; 0 means no salt.

    Returns:
        int64 of the shape of `strings`.
    """
    return _library.tfswitch_hash_strings(strings=strings, salt=salt)


tf.no_gradient("Tfswitch>HashStrings")
