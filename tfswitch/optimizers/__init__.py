"""Optimizers of tables: one step per id and push, where the row is kept.

An optimizer that is also in Keras has the name, arguments and defaults of
`keras.optimizers`, and computes the same step for the rows of a push. Other
rows stay as they are, while momentum in Keras's dense updates moves these rows,
too.

In the formulas `w` is an embedding, `g` the sum of the id's gradients in the
push, `lr` the learning rate of the push, and `D` the dimension.

`learning_rate` is a number, a Keras `LearningRateSchedule` (or any function of
the step), a variable, or a function without arguments; see
`tfswitch.EmbeddingTable.learning_rate`. If a table is made with a Keras
optimizer, both share the learning rate: setting the Keras optimizer's rate sets
the table's rate.

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
from tfswitch.optimizers._base import Optimizer
from tfswitch.optimizers._conversion import OptimizerLike, from_keras, get
from tfswitch.optimizers._cowclip import BatchScaling, CowClip, scale_for_batch
from tfswitch.optimizers._rules import *  # noqa: F403
from tfswitch.optimizers._segments import Segments

__all__ = [
    "BatchScaling",
    "CowClip",
    "Optimizer",
    "OptimizerLike",
    "Segments",
    "from_keras",
    "get",
    "scale_for_batch",
]
__all__ += _rules.__all__
