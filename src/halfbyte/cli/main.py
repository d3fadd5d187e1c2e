"""The program ``halfbyte``: dispatch, exit codes, and messages instead of tracebacks for user errors.

Exit codes: 0 done; 1 a bug (with a traceback); 2 a user error or a wrong command line; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from halfbyte import __version__
from halfbyte.cli import threads
from halfbyte.cli.bench import make_bench
from halfbyte.cli.diagnose import diagnose
from halfbyte.cli.doctor import doctor
from halfbyte.cli.generate import generate
from halfbyte.cli.plan import plan
from halfbyte.cli.quantize import quantize
from halfbyte.cli.refit import make_refit
from halfbyte.cli.report import report
from halfbyte.cli.serve import serve
from halfbyte.cli.study import make_study
from halfbyte.cli.train import train
from halfbyte.cli.trial import make_trial
from halfbyte.cli.workers import workers
from halfbyte.errors import UserError

__all__ = ["main", "make_app"]


def make_app() -> App:
    """The commands and their flags."""
    app = App(
        name="halfbyte",
        help="Reinforcement learning of language models with 4-bit (FP4) rollouts.",
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for command in (train, generate, quantize, serve, plan, report, diagnose, doctor, workers):
        app.command(command)
    app.command(make_bench())
    app.command(make_refit())
    app.command(make_study())
    app.command(make_trial())
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv`` by default) and return its exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        threads.apply()
        code = make_app()(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except UserError as error:
        place = getattr(error, "__notes__", None)
        if os.environ.get("LOCAL_RANK", "0") != "0" and not place:
            return 2  # the ranks of torchrun all have this error, and one of them says it
        return _fail("\n  noticed by: ".join([str(error), *(place or [])]))
    except OSError as error:  # a full disk, no permission, a folder that is a file: the machine's state, not our bug
        if isinstance(error, BrokenPipeError):
            # The reader has left (`halfbyte doctor | head`); nothing may be written to that pipe again, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return _fail(f"{error.strerror or error}" + (f"\n  where: {error.filename}" if error.filename else ""))
    except CycloptsError as error:
        return _fail(f"{error}\n  fix: see halfbyte --help")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
