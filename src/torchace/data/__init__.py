"""Data sets, tables, splits, batches that live on the device, augmentation. Nothing here knows of members."""

from torchace.data.augment import CropFlip, random_crop, random_flip
from torchace.data.batches import Batches, chunks
from torchace.data.datasets import NAMES, Dataset, Normalization, load
from torchace.data.draws import generator, hashed_key, order, permutation
from torchace.data.encoding import CategoryColumn, Encoding, NumberColumn, learn_encoding
from torchace.data.errors import DataError
from torchace.data.files import cache_dir
from torchace.data.idx import read_idx
from torchace.data.partition import Partition, partition
from torchace.data.schema import Column, Schema, Target, infer_schema
from torchace.data.splits import Split, stratified_split
from torchace.data.tables import iterate_table, read_table

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
