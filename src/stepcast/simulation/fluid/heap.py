"""Heaps over flat tables. Indexing only: it runs compiled over arrays and in Python over lists."""

from typing import Any

import numpy as np

NEVER = np.inf


def push(keys: Any, items: Any, size: int, key: float, item: int) -> None:
    """Add to a heap of *size*; of equal keys the lower item comes first."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if keys[up] < key or (keys[up] == key and items[up] <= item):
            break
        keys[at] = keys[up]
        items[at] = items[up]
        at = up
    keys[at] = key
    items[at] = item


def drop(keys: Any, items: Any, size: int) -> None:
    """Take the first out of a heap of *size*."""
    last = size - 1
    key, item = keys[last], items[last]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item <= items[child]):
            break
        keys[at] = keys[child]
        items[at] = items[child]
        at = child
    keys[at] = key
    items[at] = item


def advance_link(scratch: Any, size: int, link: int, key: float) -> int:
    """*link* into the heap of links, or forward in it to a lower *key*; how many are in it now."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    at = place[link]
    if at < 0:
        at = size
        size += 1
    keys[link] = key
    while at > 0:
        up = (at - 1) >> 1
        other = heap[up]
        if keys[other] < key or (keys[other] == key and other <= link):
            break
        heap[at] = other
        place[other] = at
        at = up
    heap[at] = link
    place[link] = at
    return size


def drop_link(scratch: Any, size: int) -> int:
    """Take the first out of the heap of links; how many are left."""
    heap, place, keys = scratch.heap, scratch.heap_place, scratch.key
    place[heap[0]] = -1
    keys[heap[0]] = NEVER
    size -= 1
    link = heap[size]
    key = keys[link]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = heap[child]
        if child + 1 < size:
            right = heap[child + 1]
            if keys[right] < keys[other] or (keys[right] == keys[other] and right < other):
                child += 1
                other = right
        if key < keys[other] or (key == keys[other] and link <= other):
            break
        heap[at] = other
        place[other] = at
        at = child
    if size > 0:
        heap[at] = link
        place[link] = at
    return size
