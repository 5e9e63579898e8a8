"""Reads the pickles by which trainers describe tensors, as plain values. It runs nothing.

It is no unpickler: it imports no module, and calls nothing that a pickle names. A name in a pickle is looked up in the
caller's table. A pickled call becomes what the function in this table makes of the arguments, which are checked there.
Everything else is refused at its opcode, before any value is built from it.

It knows the opcodes that `pickle` writes in protocols 4 and 5 for these shapes, and no other: no GLOBAL, INST, OBJ,
NEWOBJ_EX, EXT, persistent id, set, float, buffer or 8-byte length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_PICKLE_BYTES = 4 << 20
"""The longest pickle. It describes tensors, with about 300 bytes for each, and contains none of their bytes."""
MAX_OPCODES = 1_000_000
"""Opcodes of all pickles of one call. Each takes some microseconds. A tensor needs about 45, for each rank."""
MAX_STACK = 8192
"""Values on the stack. `pickle` appends a list 1000 items at a time, and a dict 1000 pairs."""
MAX_MARKS = 32
"""Open marks. The described shapes are less than 10 deep."""
MAX_TEXT_BYTES = 2048
"""The longest text. Names of tensors and modules are shorter."""
MAX_BYTES = 1 << 20
"""The longest bytes: handles, and the pickle of one tensor in a LocalSerializedTensor."""
MAX_INT_BYTES = 9
"""The longest integer: 64 bits and a sign."""
PROTOCOLS = (4, 5)

_U2, _U4, _I4, _U8 = (struct.Struct(form) for form in ("<H", "<I", "<i", "<Q"))


class UnreadablePickle(ValueError):
    """The pickle has something that this reader does not take. The message says what."""


class ForbiddenPickle(UnreadablePickle):
    """A refusal with a fix of its own."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A global name of a pickle that the table has."""

    module: str
    name: str
    call: Callable[[tuple[Any, ...]], Any] | None = None
    """Makes the value of a call. Gets the arguments of the pickled call as plain values, and raises UnreadablePickle if
    they are wrong. None: it can't be called."""
    fields: tuple[str, ...] | None = None
    """The attributes of its instances, all of which an instance must have. None: it has no instances."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """An instance of a class of the table: its attributes, as plain values."""

    of: Name
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Budget:
    """The opcodes that the pickles of one call may still have."""

    opcodes: int = field(default_factory=lambda: MAX_OPCODES)


class Key:
    """A value of the table that a dict may have as a key. It is hashed and compared by its identity."""

    __slots__ = ()


Names = Mapping[tuple[str, str], Any]
"""(module, name) → what the name stands for: a Name, or a value of the caller's."""

Forbidden = Mapping[tuple[str, str], ForbiddenPickle]
"""Names that are refused with a fix of their own."""


def read_pickle(data: memoryview | bytes, names: Names, forbidden: Forbidden, budget: Budget) -> Any:
    """Reads one pickle, and returns None, bools, ints, texts, bytes, tuples, lists, dicts with texts or Keys as keys,
    records, and what the table's functions have made.

    The values may share parts, and a list may contain itself. So a caller must never walk them without a bound.

    Raises:
        UnreadablePickle: the pickle has anything else, is not whole, or is beyond a bound.
    """
    return _Reader(memoryview(data), names, forbidden).read(budget)


class _Reader:
    """The state of one read: the bytes, the stack and the memo."""

    def __init__(self, data: memoryview, names: Names, forbidden: Forbidden) -> None:
        self._data = data
        self._at = 0
        self._names = names
        self._forbidden = forbidden
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """The height of the stack at each open mark."""
        self._memo: list[Any] = []

    def read(self, budget: Budget) -> Any:
        if self._data.nbytes > MAX_PICKLE_BYTES:
            raise UnreadablePickle(f"a pickle of {self._data.nbytes} bytes; at most {MAX_PICKLE_BYTES} are read")
        if self._data.nbytes < 2 or self._data[0] != 0x80 or self._data[1] not in PROTOCOLS:
            raise UnreadablePickle("no pickle of the protocol 4 or 5")
        self._at = 2
        while budget.opcodes > 0:
            budget.opcodes -= 1
            code = self._take(1)[0]
            if code == _STOP:
                return self._end()
            step = _STEPS.get(code)
            if step is None:
                raise UnreadablePickle(f"the pickle opcode {_shown(code)} at byte {self._at - 1}")
            step(self)
            if len(self._stack) > MAX_STACK:
                raise UnreadablePickle(f"a pickle with more than {MAX_STACK} values on its stack")
        raise UnreadablePickle(f"more than {MAX_OPCODES} opcodes in the pickles of one call")

    def _end(self) -> Any:
        if self._at != self._data.nbytes:
            raise UnreadablePickle(f"{self._data.nbytes - self._at} bytes after the end of the pickle")
        if len(self._stack) != 1 or self._marks:
            raise UnreadablePickle(f"a pickle that ends with {len(self._stack)} values")
        return self._stack[0]

    # ---- bytes, stack ----

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > self._data.nbytes:
            raise UnreadablePickle("a pickle that ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self._take(form.size))[0]
        return value

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise UnreadablePickle("a pickle that takes a value from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise UnreadablePickle("a pickle that needs a value on an empty stack")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise UnreadablePickle("a pickle that closes a mark it has not set")
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    # ---- opcodes ----

    def frame(self) -> None:
        if self._number(_U8) > self._data.nbytes - self._at:
            raise UnreadablePickle("a pickle whose frame ends after the pickle")

    def mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise UnreadablePickle(f"a pickle with more than {MAX_MARKS} open marks")
        self._marks.append(len(self._stack))

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def long1(self) -> None:
        count = self._take(1)[0]
        if count > MAX_INT_BYTES:
            raise UnreadablePickle(f"an integer of {count} bytes")
        self.push(int.from_bytes(self._take(count), "little", signed=True))

    def text(self, count: int) -> None:
        if count > MAX_TEXT_BYTES:
            raise UnreadablePickle(f"a text of {count} bytes; at most {MAX_TEXT_BYTES} are read")
        try:
            self.push(str(self._take(count), "utf-8"))
        except UnicodeDecodeError:
            raise UnreadablePickle("a text that is not UTF-8") from None

    def raw(self, count: int) -> None:
        if count > MAX_BYTES:
            raise UnreadablePickle(f"{count} bytes in one piece; at most {MAX_BYTES} are read")
        self.push(bytes(self._take(count)))

    def memoize(self) -> None:
        self._memo.append(self._top())  # the budget bounds its length

    def get(self, number: int) -> None:
        if number >= len(self._memo):
            raise UnreadablePickle(
                f"a pickle that asks for value {number} of its memo, which has {len(self._memo)}"
            )
        self.push(self._memo[number])

    def tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def tuple_since_mark(self) -> None:
        self.push(tuple(self._since_mark()))

    def append(self) -> None:
        self._extend([self._pop()])

    def appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not list:
            raise UnreadablePickle(f"a pickle that appends to {kind_of(into)}")
        into.extend(items)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not dict:
            raise UnreadablePickle(f"a pickle that sets items of {kind_of(into)}")
        if len(items) % 2:
            raise UnreadablePickle("a pickle that sets a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not isinstance(key, Key):  # hashing any other value may take long
                raise UnreadablePickle(f"a dict with {kind_of(key)} as a key")
            into[key] = value

    def named(self) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise UnreadablePickle("a name that is not two texts")
        if (refusal := self._forbidden.get((module, name))) is not None:
            raise ForbiddenPickle(str(refusal), refusal.fix)
        found = self._names.get((module, name))
        if found is None:
            raise UnreadablePickle(f"the name {module[:100]!r} {name[:100]!r}, which is not part of a tensor")
        self.push(found)

    def reduce(self) -> None:
        arguments, callee = self._pop(), self._pop()
        if type(callee) is not Name or callee.call is None or type(arguments) is not tuple:
            raise UnreadablePickle(f"a call of {callee if type(callee) is Name else kind_of(callee)}")
        self.push(callee.call(arguments))

    def new(self) -> None:
        arguments, of = self._pop(), self._pop()
        if type(of) is not Name or of.fields is None or type(arguments) is not tuple or arguments:
            raise UnreadablePickle(f"an instance of {of if type(of) is Name else kind_of(of)}")
        self.push(Record(of))

    def build(self) -> None:
        state, record = self._pop(), self._top()
        if type(record) is not Record or type(state) is not dict:
            raise UnreadablePickle(f"a state for {kind_of(record)}")
        if record.fields or state.keys() != set(record.of.fields or ()):
            raise UnreadablePickle(f"a {record.of} with other attributes than its own")
        record.fields = dict(state)


def kind_of(value: Any) -> str:
    """The kind of a value in words. It shows nothing of the value, which may be endless."""
    if type(value) is Record or type(value) is Name:
        return f"{value.of if type(value) is Record else value}"
    return f"a {type(value).__name__}"


def _shown(code: int) -> str:
    return f"{chr(code)!r}" if 0x20 < code < 0x7F else f"0x{code:02x}"


_STOP = ord(".")

_STEPS: Mapping[int, Callable[[_Reader], None]] = {
    0x95: _Reader.frame,
    ord("("): _Reader.mark,
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("K"): lambda reader: reader.push(reader._take(1)[0]),
    ord("M"): lambda reader: reader.push(reader._number(_U2)),
    ord("J"): lambda reader: reader.push(reader._number(_I4)),
    0x8A: _Reader.long1,
    0x8C: lambda reader: reader.text(reader._take(1)[0]),
    ord("X"): lambda reader: reader.text(reader._number(_U4)),
    ord("C"): lambda reader: reader.raw(reader._take(1)[0]),
    ord("B"): lambda reader: reader.raw(reader._number(_U4)),
    0x94: _Reader.memoize,
    ord("h"): lambda reader: reader.get(reader._take(1)[0]),
    ord("j"): lambda reader: reader.get(reader._number(_U4)),
    ord(")"): lambda reader: reader.push(()),
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
    ord("t"): _Reader.tuple_since_mark,
    ord("]"): lambda reader: reader.push([]),
    ord("a"): _Reader.append,
    ord("e"): _Reader.appends,
    ord("}"): lambda reader: reader.push({}),
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    0x93: _Reader.named,
    ord("R"): _Reader.reduce,
    0x81: _Reader.new,
    ord("b"): _Reader.build,
}
"""Each opcode that is read, and what it does."""
