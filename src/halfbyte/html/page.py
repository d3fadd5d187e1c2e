"""A page: a template rendered with every value escaped, the common style in it, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from halfbyte import __version__
from halfbyte.errors import DataError
from halfbyte.files import write_text
from halfbyte.html.text import visible

__all__ = ["render", "write"]

_STYLE = Path(__file__).with_name("style.css.j2")


def render(template: Path, **values: object) -> str:
    """The page of a template file, which sees ``values``, ``version`` and ``style``, and the filter ``visible``.

    Values are escaped unless they are ``Markup``; a name the template lacks a value for is an error.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    style = Markup(environment.from_string(_STYLE.read_text(encoding="utf-8")).render())
    page = environment.from_string(template.read_text(encoding="utf-8"))
    return page.render(version=__version__, style=style, **values)


def write(path: Path, text: str) -> None:
    """Write a page: temporary name, fsync, rename.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(
            f"the report cannot be written: {error.strerror}", where=str(path), fix="name another file with --out"
        ) from error
