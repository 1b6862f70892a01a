"""Structs of Apache Thrift's compact protocol as plain data: what the heads of parquet files are written in.

    field   =  (difference of ids << 4 | type) [id] value         integers: base 128, lowest first, zigzag
    list    =  (length << 4 | type) [length] values               texts: length and bytes

Source: Apache Thrift, doc/specs/thrift-compact-protocol.md. Nothing is trusted: what cannot be is a ValueError, and no
value takes more memory than a small multiple of the bytes that it is read from.
"""

from __future__ import annotations

from typing import Any

# A struct by the ids of its fields; numbers, truths, bytes, lists and structs. Doubles are passed over.
Struct = dict[int, Any]

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
# Parquet's deepest value is eight levels down (file, row groups, group, columns, column, its figures, statistics).
_MAX_DEPTH = 12


def read_struct(content: bytes, place: int, depth: int = _MAX_DEPTH) -> tuple[Struct, int]:
    """The struct that starts at a place, and where it ends. Raises ValueError."""
    fields: Struct = {}
    number = 0
    while (kind := _byte(content, place)) != _STOP:
        place += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, place = _read_integer(content, place)
        if kind & 15 in (_TRUE, _FALSE):
            fields[number] = kind & 15 == _TRUE
        else:
            fields[number], place = _read_value(content, place, kind & 15, depth)
    return fields, place + 1


def _read_value(content: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _read_integer(content, place)
    if kind in (_TRUE, _FALSE, _BYTE):  # in a list, truth takes a byte
        return _byte(content, place), place + 1
    if kind == _DOUBLE:
        return None, place + 8
    if kind == _BINARY:
        length, place = _read_size(content, place)
        return content[place : place + length], place + length
    if depth == 0:
        raise ValueError("a head of too many levels")
    if kind == _STRUCT:
        return read_struct(content, place, depth - 1)
    if kind in (_LIST, _SET):
        head = _byte(content, place)
        length, place = (head >> 4, place + 1) if head >> 4 < 15 else _read_size(content, place + 1)
        values = []
        for _ in range(length):  # every value takes a byte at least, so that this ends with the content
            value, place = _read_value(content, place, head & 15, depth - 1)
            values.append(value)
        return values, place
    raise ValueError(f"a head with a field of unknown type {kind}")


def _read_integer(content: bytes, place: int) -> tuple[int, int]:
    size, place = _read_size(content, place)
    return (size >> 1) ^ -(size & 1), place


def _read_size(content: bytes, place: int) -> tuple[int, int]:
    size = 0
    for shift in range(0, 70, 7):
        byte = _byte(content, place)
        place += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, place
    raise ValueError("a head with a number of more than 64 bits")


def _byte(content: bytes, place: int) -> int:
    if place >= len(content):
        raise ValueError("a head that is cut off")
    return content[place]
