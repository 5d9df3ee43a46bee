"""Data sets, splits, batches that live on the device, augmentation. Nothing here knows of members."""

from torchace.data.augment import CropFlip, random_crop, random_flip
from torchace.data.batches import Batches, chunks
from torchace.data.datasets import NAMES, Dataset, Normalization, load
from torchace.data.draws import generator, hashed_key, order, permutation
from torchace.data.errors import DataError
from torchace.data.files import cache_dir
from torchace.data.idx import read_idx
from torchace.data.splits import Split, stratified_split

__all__ = [
    "NAMES",
    "Batches",
    "CropFlip",
    "DataError",
    "Dataset",
    "Normalization",
    "Split",
    "cache_dir",
    "chunks",
    "generator",
    "hashed_key",
    "load",
    "order",
    "permutation",
    "random_crop",
    "random_flip",
    "read_idx",
    "stratified_split",
]
