"""The former name of `tfswitch.io`."""

import warnings

from tfswitch.io import *  # noqa: F403

warnings.warn(
    "`tfswitch.interchange` is called `tfswitch.io` now",
    DeprecationWarning,
    stacklevel=2,
)
