"""The ops for synchronous steps on variables of TensorFlow, as functions.

They are for graphs of TensorFlow 1, and run on the device that is given: on a
parameter server, which must have imported tfswitch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfswitch import _loader

_library = _loader.load_ops()


class Round(NamedTuple):
    """The gradients that make a step.

    Attributes:
        number: int64 scalar.
        keys: int64, `[n, 3]`: worker, incarnation and clock of each gradient.
        weights: float64, `[n]`.
        active: int64, `[m]`: the incarnations that were there.
        next_incarnation: int64 scalar: all others below it have gone.
    """

    number: tf.Tensor
    keys: tf.Tensor
    weights: tf.Tensor
    active: tf.Tensor
    next_incarnation: tf.Tensor


def call(request: tf.Tensor, *, device: str) -> tf.Tensor:
    """Returns the JSON of a ReplicasResponse for that of a ReplicasRequest."""
    with tf.device(None), tf.device(device):
        return _library.tfswitch_replicas_call(request=request)


def end_step(
    place: tf.Tensor,
    weight: tf.Tensor,
    *,
    group: str,
    worker: int,
    timeout_s: float,
    device: str,
) -> tf.Tensor:
    """Ends a step, waits until its round has been applied, returns the place.

    Args:
        place: int64, `[3]`: incarnation, clock and round of the worker.
        weight: float64 scalar: the number of samples of the step.
        group: Name of the group.
        worker: Which worker.
        timeout_s: Longest wait.
        device: The coordinator's.

    Returns:
        int64, `[3]`: where the next step is.
    """
    with tf.device(None), tf.device(device):
        return _library.tfswitch_replicas_end_step(
            place=place,
            weight=weight,
            group=group,
            worker=worker,
            timeout_s=timeout_s,
        )


def heartbeat(
    place: tf.Tensor,
    applier: tf.Tensor,
    *,
    group: str,
    worker: int,
    device: str,
) -> tf.Operation:
    """Renews the leases of a worker and, unless it is 0, of an applier."""
    with tf.device(None), tf.device(device):
        return _library.tfswitch_replicas_heartbeat(
            place=place, applier=applier, group=group, worker=worker
        )


def next_round(
    applier: tf.Tensor, *, group: str, timeout_s: float, device: str
) -> Round:
    """Waits for the next round that is to be applied, and returns it."""
    with tf.device(None), tf.device(device):
        return Round(
            *_library.tfswitch_replicas_next_round(
                applier=applier, group=group, timeout_s=timeout_s
            )
        )


def confirm_round(
    applier: tf.Tensor, number: tf.Tensor, *, group: str, device: str
) -> tf.Operation:
    """Lets the workers of a round go on, which has been applied."""
    with tf.device(None), tf.device(device):
        return _library.tfswitch_replicas_confirm_round(
            applier=applier, number=number, group=group
        )


def stage_gradients(
    place: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    *,
    stage: str,
    worker: int,
    replaces: bool,
    device: str,
) -> tf.Operation:
    """Keeps the gradients of a step on a device until they are summed.

    Args:
        place: int64, `[3]`: incarnation, clock and round of the worker.
        gradients: For each variable a tensor of its shape or, for rows, int64
            indices `[n]` and values `[n, ...]`.
        stage: Name of the staged values.
        worker: Which worker.
        replaces: Whether earlier steps of the same incarnation count no more.
        device: Where the variables are.
    """
    with tf.device(None), tf.device(device):
        return _library.tfswitch_stage_gradients(
            key=place,
            gradients=list(gradients),
            stage=stage,
            worker=worker,
            replaces=replaces,
        )


def sum_staged_gradients(
    of_round: Round,
    types: Sequence[tf.DType],
    of_rows: Sequence[bool],
    *,
    stage: str,
    averages: bool,
    averages_by_row: bool,
    device: str,
) -> list[Any]:
    """Returns the sums of the gradients of a round, which are then forgotten.

    Args:
        of_round: Which gradients.
        types: The types of the staged tensors.
        of_rows: For each variable, whether indices and values are.
        stage: Name of the staged values.
        averages: Whether each gradient is multiplied with its share of the
            round's weights.
        averages_by_row: Whether each row is averaged over the gradients that
            have it.
        device: Where the variables are.

    Returns:
        Tensors as they were staged; the rows of all gradients one after the
        other, or with `averages_by_row` each once.
    """
    with tf.device(None), tf.device(device):
        return list(
            _library.tfswitch_sum_staged_gradients(
                keys=of_round.keys,
                weights=of_round.weights,
                active=of_round.active,
                next_incarnation=of_round.next_incarnation,
                T=list(types),
                of_rows=list(of_rows),
                stage=stage,
                averages=averages,
                averages_by_row=averages_by_row,
            )
        )


def clear_staged_gradients(*, stage: str, device: str) -> tf.Tensor:
    """Forgets staged gradients; returns of how many steps, an int64 scalar."""
    with tf.device(None), tf.device(device):
        return _library.tfswitch_clear_staged_gradients(stage=stage)
