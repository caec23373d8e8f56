"""Nested values with tensors, to a payload and a block and back; nothing is pickled."""

import json

import torch

from .blocks import read_block, write_block
from .descriptors import naming_the_limit
from .frames import Frame
from .records import Record

# Lists and plain scalars are themselves in JSON; everything else is a one-key object.
_TUPLE, _DICT, _TENSOR = "tuple", "dict", "tensor"


@naming_the_limit()
def pack(record: Record, value: object) -> Frame:
    """Returns a frame with the value: nested dict, list, tuple, str, int, float, bool, None and tensors.

    Raises ValueError that names the place of anything else, FleetError when this process may open no more files.
    """
    tensors: list[torch.Tensor] = []
    tree = _to_tree(value, "value", tensors)
    specs, block = write_block(tensors)
    return Frame(record, json.dumps([tree, specs]).encode(), block)


@naming_the_limit()
def unpack(frame: Frame) -> object:
    """Returns the value of a frame that `pack` made, and closes the frame's block."""
    tree, specs = json.loads(frame.payload)
    return _from_tree(tree, read_block(specs, frame.take_block()))


def _to_tree(value: object, place: str, tensors: list[torch.Tensor]) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, dict):
        pairs = [[_key(key, place), _to_tree(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()]
        return {_DICT: pairs}
    if isinstance(value, (list, tuple)):
        items = [_to_tree(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to or from a worker; "
        "send dicts, lists, tuples, strings, numbers, None and tensors."
    )


def _from_tree(tree: object, tensors: list[torch.Tensor]) -> object:
    if isinstance(tree, list):
        return [_from_tree(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _TUPLE:
        return tuple(_from_tree(item, tensors) for item in content)
    assert kind == _DICT, kind
    return {key: _from_tree(item, tensors) for key, item in content}


def _key(key: object, place: str) -> object:
    if key is None or isinstance(key, (bool, int, float, str)):
        return key
    raise ValueError(f"{place} has the key {key!r}; only strings, numbers and None can be keys of what is sent.")
