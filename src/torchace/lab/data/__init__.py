"""Image sets, tables and their encoding, splits, batches on the device, random draws."""

from torchace.lab.data.batches import Batches, CropFlip, chunks
from torchace.lab.data.datasets import NAMES, Dataset, cache_dir, load
from torchace.lab.data.encoding import CategoryColumn, Encoding, NumberColumn, learn_encoding
from torchace.lab.data.errors import DataError
from torchace.lab.data.inference import infer_columns, infer_schema
from torchace.lab.data.rng import hashed_key, permutation
from torchace.lab.data.splits import Split, SplitIndices, stratified_split, train_val_test_split
from torchace.lab.data.table_schema import Column, Schema, Target
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
    "NumberColumn",
    "Schema",
    "Split",
    "SplitIndices",
    "Target",
    "cache_dir",
    "chunks",
    "hashed_key",
    "infer_columns",
    "infer_schema",
    "iterate_table",
    "learn_encoding",
    "load",
    "permutation",
    "read_table",
    "stratified_split",
    "train_val_test_split",
]
