"""Image sets, tables and their encoding, splits, batches on the device, random draws."""

from torchace.lab.data.batches import Batches, CropFlip, chunks
from torchace.lab.data.datasets import Dataset, load
from torchace.lab.data.errors import DataError
from torchace.lab.data.rng import hashed_key, permutation
from torchace.lab.data.splits import Split

__all__ = ["Batches", "CropFlip", "DataError", "Dataset", "Split", "chunks", "hashed_key", "load", "permutation"]
