"""The layers of tfswitch."""

from tfswitch.keras.layers.dynamic_embedding import DynamicEmbedding
from tfswitch.keras.layers.dynamic_embeddings import DynamicEmbeddings
from tfswitch.keras.layers.sampled_loss import NCE, SampledSoftmax

__all__ = ["NCE", "DynamicEmbedding", "DynamicEmbeddings", "SampledSoftmax"]
