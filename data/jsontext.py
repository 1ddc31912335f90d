"""JSON that somebody else wrote -> values. Whatever is wrong with it is one line that says where."""

import json
import re
from typing import Any

from conf.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str, where: str) -> Any:
    """The value of `text`. Raises UserError, starting with `where`: not JSON, or a text with half a character."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise UserError(f"{where}: not usable JSON (a number with too many digits)") from error
    except RecursionError as error:
        raise UserError(f"{where}: not valid JSON (nested too deep)") from error
    if "\\u" in text:
        _refuse_surrogates(value, where)
    return value


def _refuse_surrogates(value: Any, where: str) -> None:
    """An emoji cut in two (\\ud83d without its other half) is no character: no tokenizer takes it."""
    found = SURROGATE.search(json.dumps(value, ensure_ascii=False))
    if found:
        raise UserError(
            f"{where}: \\u{ord(found[0]):04x} is half of a character that was cut in two; take it out of the text"
        )
