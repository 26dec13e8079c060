"""How a table learns: one optimizer step per id and push, where the row lives.

Optimizers that Keras has take the names, arguments and defaults of
`keras.optimizers`, and its arithmetic on the rows that a push touches. Other
rows stay as they are: momentum does not move them, as it does in Keras's dense
updates.

In the formulas `w` is an embedding, `g` the sum of the id's gradients in the
push, `lr` the learning rate of the push, and `D` the dimension.

`learning_rate` is a number, a Keras `LearningRateSchedule` (or any function of
the step), a variable, or a function without arguments; see
`tfswitch.EmbeddingTable.learning_rate`. A Keras optimizer in place of one of
these shares its rate: setting the Keras optimizer's rate sets the table's.

All optimizers but `Segments` take these options by keyword. They are applied in
this order around the rule's own step:

    l2           g = g + l2 w. Only rows of the push: L2 is lazy.
    cowclip      `CowClip`: g = g min(1, T / |g|), T from |w| and the id's count
    clipvalue    each coordinate of g into [-clipvalue, clipvalue]
    clipnorm     g = g min(1, clipnorm / |g|), with the norm of the row
    weight_decay w = w - w weight_decay lr. Only rows of the push.
    (the rule)
    min_weight   each coordinate of w to at least that
    max_weight   each coordinate of w to at most that
    min_norm     the norm of the row w to at least that
    max_norm     the norm of the row w to at most that
"""

from tfswitch.optimizers import _rules
from tfswitch.optimizers._base import Optimizer, check_learning_rate
from tfswitch.optimizers._conversion import (
    KerasRate,
    from_keras,
    from_table_config,
    get,
    have_equal_state,
)
from tfswitch.optimizers._cowclip import BatchScaling, CowClip, scale_for_batch
from tfswitch.optimizers._rules import *  # noqa: F403
from tfswitch.optimizers._segments import Segments

__all__ = [
    "BatchScaling",
    "CowClip",
    "KerasRate",
    "Optimizer",
    "Segments",
    "check_learning_rate",
    "from_keras",
    "from_table_config",
    "get",
    "have_equal_state",
    "scale_for_batch",
]
__all__ += _rules.__all__
