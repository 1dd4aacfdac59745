"""
What runs inside the sandboxes of a code test. Standard library only: its text is given to `python -c` there.

Tests that call functions run in two processes. The *candidate* holds the program of the model and answers calls. The
*judge* holds the tests, sees the candidate's functions as stand-ins, and compares plain values. So the program has
neither the tests nor the expected answers in its process, and nothing that it patches is used to judge it.
"""

import ast
import builtins
import json
import os
import sys
import types


MOST_ITEMS = 1_000_000  # of an iterator that a function returns

# What sites that ask for a function import for its author.
USUAL_IMPORTS = """\
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys, typing
"""


def encode(value):
    """A value as JSON can hold it. Raises `TypeError` for what is no plain value."""
    if value is None or value is True or value is False or isinstance(value, str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    if hasattr(value, "__next__") or type(value).__name__ in ("dict_keys", "dict_values", "dict_items", "deque"):
        items = []
        for item in value:
            items.append(encode(item))
            if len(items) > MOST_ITEMS:
                raise TypeError(f"an iterator gave more than {MOST_ITEMS} items")
        return items
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed over to the tests")


def decode(data):
    """The inverse of `encode`. Raises `ValueError` for what `encode` cannot have written."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not an encoded value")
    ((kind, content),) = data.items()
    if kind == "int" and isinstance(content, str):
        return int(content, 16)
    if kind == "float" and isinstance(content, str):
        return float.fromhex(content)
    if kind == "bytes" and isinstance(content, str):
        return bytes.fromhex(content)
    if not isinstance(content, list):
        raise ValueError("not an encoded value")
    try:
        if kind == "complex":
            return complex(*(float.fromhex(part) for part in content))
        if kind == "dict":
            return {decode(key): decode(item) for key, item in content}
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content)
        if kind == "range":
            return range(*content)
    except TypeError as error:
        raise ValueError("not an encoded value") from error
    raise ValueError(f"not an encoded value: {kind!r}")


def find_function(namespace, name):
    """The function `name` of a program, or the method of its class `Solution`."""
    if name in namespace:
        return namespace[name]
    solution = namespace.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"name '{name}' is not defined")


def run_candidate(usual_imports=False):
    """Run the program on file descriptor 3, then answer the calls that come on standard input."""
    with os.fdopen(3, "rb") as file:
        source = file.read()
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)

    def reply(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def failure(error):
        return {"raised": type(error).__name__, "text": str(error)[:1000]}

    module = sys.modules["program"] = types.ModuleType("program")
    namespace = module.__dict__
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which the module site would bring
    if usual_imports:
        exec(USUAL_IMPORTS, namespace)
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except BaseException as error:
        reply(failure(error))
        return
    reply({"names": [name for name, value in namespace.items() if callable(value) and not name.startswith("__")]})
    for line in requests:
        name, arguments, options = json.loads(line)
        try:
            function = find_function(namespace, name)
            result = {"value": encode(function(*decode(arguments), **decode(options)))}
        except BaseException as error:
            result = failure(error)
        reply(result)


def run_judge():
    """Run the tests on file descriptor 3 against a candidate: calls go to standard output, answers come from input."""
    with os.fdopen(3, "rb") as file:
        tests = json.loads(file.read())
    answers, calls = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)

    def receive():
        line = answers.readline()
        if not line.endswith("\n"):
            raise AssertionError("the program ended")
        answer = json.loads(line)
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), Exception)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is AssertionError:
                kind = Exception
            try:
                raised = kind(str(answer["text"]))
            except TypeError:
                raised = Exception(str(answer["text"]))
            raise raised
        return answer

    def stand_in(name):
        def call(*arguments, **options):
            calls.write(json.dumps([name, encode(arguments), encode(options)]) + "\n")
            calls.flush()
            return decode(receive()["value"])

        call.__name__ = name
        return call

    try:
        names = receive()["names"]
        code = tests["setup"] + "\n" + tests["code"]
        used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        entry_point = tests["entry_point"]
        namespace = {"__name__": "tests", "__builtins__": builtins}
        for name in {*(str(name) for name in names), *([entry_point] if entry_point else [])}:
            if (name in used and not hasattr(builtins, name)) or name == entry_point:
                namespace[name] = stand_in(name)
        if entry_point:
            namespace["candidate"] = namespace[entry_point]
        exec(compile(code, "tests.py", "exec"), namespace)
        check = namespace.get("check")
        if entry_point and callable(check):
            check(stand_in(entry_point))
    except BaseException as error:
        message = f"{type(error).__name__}: {str(error)[:1000]}"
        verdict = {"passed": False, "message": message}
    else:
        verdict = {"passed": True, "message": ""}
    os.write(2, b"\n" + json.dumps(verdict).encode() + b"\n")
    os._exit(0)
