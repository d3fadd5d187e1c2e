"""The frozen command line: commands, flags, defaults and required arguments. A change here is a change for users.

After an intended change, write the file again:  python tests/cli/test_surface.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cyclopts import App, ArgumentCollection

from halfbyte.cli.main import make_app

SURFACE = Path(__file__).with_name("surface.txt")


def commands(app: App, prefix: str = "") -> Iterator[tuple[str, App]]:
    """(name with its parents, command) of every command, groups before their members."""
    for name in sorted(name for name in app if not name.startswith("-")):
        yield prefix + name, app[name]
        yield from commands(app[name], f"{prefix}{name} ")


def arguments(command: App) -> ArgumentCollection:
    """The arguments of a command; a group of commands has none."""
    return command.assemble_argument_collection() if command.default_command else ArgumentCollection()


def surface() -> Iterator[str]:
    """One line a command and one an argument, in the order of the help."""
    for name, command in commands(make_app()):
        yield name
        for argument in arguments(command):
            names = " ".join(argument.names) if any(n.startswith("-") for n in argument.names) else argument.name
            default = "required" if argument.required else f"default {argument.field_info.default!r}"
            yield f"  {names}  ({default})  {argument.parameter.help}"


def test_commands_and_flags_are_those_on_record() -> None:
    assert "\n".join(surface()) + "\n" == SURFACE.read_text(encoding="utf-8")


def test_every_command_and_flag_is_explained() -> None:
    for name, command in commands(make_app()):
        assert command.help, name
        for argument in arguments(command):
            assert argument.parameter.help, (name, argument.name)


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
