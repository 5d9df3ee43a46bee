"""Lets `import torchvision` work with a CPU build of torch, for which no matching torchvision is published.

The published torchvision carries compiled operators for another build of torch; they do not load, and its import then
fails on operators that were never declared. Declaring their schemas first is enough to import it, for timm's networks
and for torchmetrics, which imports whatever torchvision it finds. The Makefile installs this file into `.venv`, where a
`.pth` line loads it at start: it only waits for torchvision to be imported. Nothing of it reaches a user.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            try:
                library.define(schema)
            except RuntimeError:  # declared already
                continue
        try:
            self.loader.exec_module(module)
        finally:
            library._destroy()  # the declarations were needed for the import alone


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "torchvision" or "torchvision" in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
