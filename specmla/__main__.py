"""The command line: `specmla demo`, `generate`, `info` and `bench`.

An error that the library raises on purpose, or a missing file, is one line on stderr and exit
code 2.
"""

from __future__ import annotations

import io
import sys

from specmla.errors import SpecMLAError

_MISSING = "specmla: the command line needs the extra 'demo': pip install 'specmla[demo]'"
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command; give the exit code."""
    try:
        import typer

        from specmla.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        print(_MISSING, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    _escape_what_is_not_encoded()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=words or ["--help"], prog_name="specmla", standalone_mode=False)
    except SystemExit as stop:  # the benchmark's own parser has reported already
        return stop.code if isinstance(stop.code, int) else 2
    except typer.TyperException as error:
        print(f"specmla: {_one_line(error.format_message())}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except (SpecMLAError, OSError) as error:
        print(f"specmla: {_one_line(str(error))}", file=sys.stderr)
        return 2
    if code == _INTERRUPTED:  # Typer has caught it
        return _interrupted()
    return code if isinstance(code, int) else 0


def _interrupted() -> int:
    print("specmla: interrupted", file=sys.stderr)
    return _INTERRUPTED


def _escape_what_is_not_encoded() -> None:
    """Write characters that the terminal's encoding lacks as escapes: a text may hold any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
