"""What a YAML scalar means in the field it lands in.

YAML cannot know that `revision: 1.10` is text and `learning_rate: 1e-4` a number; the field does. The reader hands
unquoted scalars over as `Plain`, and the types below read them. Python values pass through the same checks, so a
config built in code is held to the same rules. Every reader raises `ValueError` with a sentence for the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})
NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})

_INT = re.compile(r"[-+]?(0|[1-9]\d*(_\d+)*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9]\d*(_\d+)*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"[-+]?0\d+")


class Plain(str):
    """A scalar written without quotes."""


def show(value: object) -> str:
    """The value as the user would write it, short enough for one line of an error."""
    if isinstance(value, Plain):
        text = str(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif value is None:
        text = "null"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number_problem(value: object, wanted: str) -> ValueError:
    if isinstance(value, Plain):
        if _NOT_FINITE.fullmatch(value):
            return ValueError(f"needs {wanted}, and {value} is not finite")
        if _LEADING_ZERO.fullmatch(value) or ":" in value:
            return ValueError(f"needs {wanted}, and {value} could be read in several ways; write the plain number")
        return ValueError(f"needs {wanted}, not {value}")
    if isinstance(value, str):
        return ValueError(f"needs {wanted}, and {show(value)} is text; write it without quotes")
    return ValueError(f"needs {wanted}, not {show(value)}")


def read_float(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, Plain) and _FLOAT.fullmatch(value):
        number = float(value.replace("_", ""))
    else:
        raise _number_problem(value, "a number")
    if not math.isfinite(number):
        raise ValueError(f"needs a number, and {value} is not finite")
    return number


def read_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Plain) and _INT.fullmatch(value):
        return int(value.replace("_", ""))
    try:
        number = read_float(value)
    except ValueError:
        raise _number_problem(value, "a whole number") from None
    if not number.is_integer():
        raise ValueError(f"needs a whole number, not {show(value)}")
    return int(number)


def read_number(value: object) -> int | float:
    """A whole number stays one: `save_steps: 1` is a count, `0.5` a share."""
    number = read_float(value)
    return int(number) if number.is_integer() else number


def read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Plain) and (word := value.lower()) in TRUE_WORDS | FALSE_WORDS:
        return word in TRUE_WORDS
    if isinstance(value, str) and not isinstance(value, Plain):
        raise ValueError(f"needs true or false, and {show(value)} is text; write it without quotes")
    raise ValueError(f"needs true or false, not {show(value)}")


def read_text(value: object) -> str:
    if isinstance(value, Plain):
        if value.lower() in ("true", "false"):
            raise ValueError(f'needs text, and {value} is a YAML boolean; quote it: "{value}"')
        if value == "None":
            raise ValueError('needs text, and None is no YAML null; write null or leave it empty, or quote it: "None"')
        return str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        raise ValueError(f'needs text, and {show(value)} is a list; quote it: "{show(value)}"')
    raise ValueError(f"needs text, not {show(value)}")


def read_word(value: object) -> object:
    """For a `Literal`: the text itself; which words are allowed is the type's business."""
    return str(value) if isinstance(value, str) else value


def read_free(value: object) -> Any:
    """A value of a free-form mapping, by the rules of YAML 1.2's core schema."""
    if isinstance(value, dict):
        return {str(key): read_free(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [read_free(item) for item in value]
    if not isinstance(value, Plain):
        return value
    if value in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return value.lower() == "true"
    if re.fullmatch(r"[-+]?\d+", value):
        return int(value)
    if _NOT_FINITE.fullmatch(value) and "." in value:
        raise ValueError(f"{value} is not finite")
    if _FLOAT.fullmatch(value):
        return float(value.replace("_", ""))
    return str(value)


def read_mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"needs a mapping (`key: value` lines), not {show(value)}")
    free: dict[str, Any] = read_free(value)
    return free


def read_text_or_list(value: object) -> str | list[str]:
    return [read_text(item) for item in value] if isinstance(value, (list, tuple)) else read_text(value)


def read_text_list(value: object) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"needs a list: write `- {show(value)}` on the next line, or [{show(value)}]")
    return [read_text(item) for item in value]


def bool_or(*words: str) -> Callable[[object], bool | str]:
    """A reader for options that are a switch with further settings, such as `bf16: true | false | auto`."""

    def read(value: object) -> bool | str:
        if isinstance(value, str) and value in words:
            return str(value)
        try:
            return read_bool(value)
        except ValueError:
            raise ValueError(f"needs true, false, {', '.join(words)}, not {show(value)}") from None

    return read


Int = Annotated[int, BeforeValidator(read_int)]
Float = Annotated[float, BeforeValidator(read_float)]
Number = Annotated[int | float, BeforeValidator(read_number)]
Bool = Annotated[bool, BeforeValidator(read_bool)]
Text = Annotated[str, BeforeValidator(read_text)]
Free = Annotated[dict[str, Any], BeforeValidator(read_mapping)]
TextOrList = Annotated[str | list[str], BeforeValidator(read_text_or_list)]
TextList = Annotated[list[str], BeforeValidator(read_text_list)]
AsWord = BeforeValidator(read_word)
