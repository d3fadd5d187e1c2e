"""The frozen command line: commands, flags, defaults and required arguments. A change here is a change for users.

After an intended change, write the file again:  python tests/cli/test_surface.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from halfbyte.cli.main import make_app

SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> Iterator[str]:
    """One line a command and one an argument, in the order of the help."""
    app = make_app()
    for name in sorted(name for name in app if not name.startswith("-")):
        yield name
        for argument in app[name].assemble_argument_collection():
            names = " ".join(argument.names) if any(n.startswith("-") for n in argument.names) else argument.name
            default = "required" if argument.required else f"default {argument.field_info.default!r}"
            yield f"  {names}  ({default})  {argument.parameter.help}"


def test_commands_and_flags_are_those_on_record() -> None:
    assert "\n".join(surface()) + "\n" == SURFACE.read_text(encoding="utf-8")


def test_every_command_and_flag_is_explained() -> None:
    app = make_app()
    for name in (name for name in app if not name.startswith("-")):
        assert app[name].help, name
        for argument in app[name].assemble_argument_collection():
            assert argument.parameter.help, (name, argument.name)


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
