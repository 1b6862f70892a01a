"""The table of instructions is complete, and its rows are the columns of a program."""

from dataclasses import fields
from typing import get_args

import pytest

from meshwright.spec import Instruction, Opcode, instruction_name
from meshwright.spec.instructions import INSTRUCTIONS, STREAM_NAMES, CostKind, instruction_of, instruction_row


def test_each_opcode_and_each_class_has_a_row():
    assert set(INSTRUCTIONS) == set(Opcode)
    assert {row.view for row in INSTRUCTIONS.values()} == set(get_args(Instruction))
    assert {row.kind for row in INSTRUCTIONS.values()} == set(get_args(CostKind))
    assert {row.stream for row in INSTRUCTIONS.values()} == set(STREAM_NAMES)


@pytest.mark.parametrize("opcode", list(Opcode), ids=lambda opcode: opcode.name.lower())
def test_an_instruction_is_read_back_from_its_columns(opcode):
    row = INSTRUCTIONS[opcode]
    given = {item.name: 10 + place for place, item in enumerate(fields(row.view)) if item.name != "payload"}
    instruction = row.view(**given, **({"payload": row.payload} if row.payload else {}))
    columns = instruction_row(instruction)
    assert columns[0] == opcode
    assert set(given.values()) <= set(columns[1:])
    assert instruction_of(columns) == instruction


def test_names_tell_instructions_apart():
    names = [instruction_name(opcode, 3, 4, 5) for opcode in Opcode]
    assert len(set(names)) == len(names)


def test_what_pictures_show_differs_by_its_letter():
    letters = [row.name[0].upper() for row in INSTRUCTIONS.values() if row.colour[1]]
    assert len(set(letters)) == len(letters)
    assert all(row.stream == "compute" for row in INSTRUCTIONS.values() if any(row.colour))
