"""Writes tables to files of NumPy, Parquet and TFRecord, and reads them.

`write_projector` writes some rows and their labels for TensorBoard.

The files are for other programs: to look at rows, to search for neighbours, to
start from rows that were trained elsewhere. To continue a training use
`Cluster.save`: servers write and read checkpoints in parallel.

Writers write rows, in the order in which servers send them, to a temporary file
beside `path`, and rename this file when it is complete. So no program sees an
incomplete file, and an error leaves no file behind. Tables may be larger than
the memory. Readers set the rows of the ids in a file (`EmbeddingTable.assign`);
other rows stay. If an id occurs several times, its last row is used. Writers
and readers work with tables in this process and on servers.
"""

from tfswitch.io._numpy import read_numpy, write_numpy
from tfswitch.io._parquet import read_parquet, write_parquet
from tfswitch.io._projector import write_projector
from tfswitch.io._tfrecord import read_tfrecord, write_tfrecord

__all__ = [
    "read_numpy",
    "read_parquet",
    "read_tfrecord",
    "write_numpy",
    "write_parquet",
    "write_projector",
    "write_tfrecord",
]
