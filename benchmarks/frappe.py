"""Frappe, for benchmarks that train: 288,609 samples of 10 one-hot fields."""

import dataclasses
import pathlib
import sys

import numpy as np
from absl import flags

import tfswitch as tsw

_DATA = flags.DEFINE_string(
    "data",
    str(pathlib.Path(__file__).parents[2] / "shared" / "data"),
    "Folder with frappe_x1r/frappe_x1r.npz, or `generated`.",
)

FIELDS = 10

Split = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Data:
    """Packed ids `(samples, fields)` and labels `(samples,)`."""

    train: Split
    valid: Split
    test: Split


def read() -> Data:
    """Reads Frappe from the folder that `--data` says, or makes data up."""
    folder = _DATA.value
    if folder == "generated":
        return generate_data()
    path = pathlib.Path(folder) / "frappe_x1r" / "frappe_x1r.npz"
    if not path.is_file():
        sys.exit(f"no {path}; --data names its folder, or `generated`")
    with np.load(path) as arrays:
        offsets = arrays["offsets"][:FIELDS]
        splits = [
            (
                tsw.ids.pack(np.arange(FIELDS), arrays[f"{name}_x"] - offsets),
                arrays[f"{name}_y"].astype(np.float32),
            )
            for name in ("train", "valid", "test")
        ]
    return Data(*splits)


def generate_data() -> Data:
    """Samples of 10 fields whose labels depend on pairs of hidden vectors."""
    draw = np.random.default_rng(1)
    hidden = draw.normal(size=(FIELDS, 50, 4))

    def split(samples: int) -> Split:
        ids = np.minimum(draw.zipf(1.3, (samples, FIELDS)) - 1, 49)
        vectors = hidden[np.arange(FIELDS), ids]
        pairs = (vectors.sum(1) ** 2).sum(1) - (vectors**2).sum((1, 2))
        labels = pairs + draw.normal(size=samples) > 0.0
        return tsw.ids.pack(np.arange(FIELDS), ids), labels.astype(np.float32)

    return Data(split(7000), split(2000), split(1000))
