"""Former names of arguments, which still work."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed_arguments(
    **names: str,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function take keyword arguments by their former names, too.

    Args:
        names: The present name of each former one.

    Example:

    >>> @renamed_arguments(tell="log_fn")
    ... def run(log_fn): ...
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for former in names.keys() & kwargs.keys():
                present = names[former]
                if present in kwargs:
                    raise TypeError(
                        f"`{former}` is the former name of `{present}`. Give "
                        "one of them"
                    )
                warnings.warn(
                    f"`{former}` is called `{present}` now",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[present] = kwargs.pop(former)
            return function(*args, **kwargs)

        # Keras reads the arguments of a layer without following `__wrapped__`.
        call.__signature__ = inspect.signature(function)  # type: ignore
        return call

    return decorate
