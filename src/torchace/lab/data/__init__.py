"""Data sets, tables, splits, batches that live on the device, augmentation. Nothing here knows of members."""

from torchace.lab.data.augment import CropFlip, random_crop, random_flip
from torchace.lab.data.batches import Batches, chunks
from torchace.lab.data.datasets import NAMES, Dataset, Normalization, load
from torchace.lab.data.encoding import CategoryColumn, Encoding, NumberColumn, learn_encoding
from torchace.lab.data.errors import DataError
from torchace.lab.data.files import cache_dir
from torchace.lab.data.idx import read_idx
from torchace.lab.data.partition import Partition, partition
from torchace.lab.data.rng import generator, hashed_key, order, permutation
from torchace.lab.data.splits import Split, stratified_split
from torchace.lab.data.table_schema import Column, Schema, Target, infer_schema
from torchace.lab.data.tables import iterate_table, read_table

__all__ = [
    "NAMES",
    "Batches",
    "CategoryColumn",
    "Column",
    "CropFlip",
    "DataError",
    "Dataset",
    "Encoding",
    "Normalization",
    "NumberColumn",
    "Partition",
    "Schema",
    "Split",
    "Target",
    "cache_dir",
    "chunks",
    "generator",
    "hashed_key",
    "infer_schema",
    "iterate_table",
    "learn_encoding",
    "load",
    "order",
    "partition",
    "permutation",
    "random_crop",
    "random_flip",
    "read_idx",
    "read_table",
    "stratified_split",
]
