"""The command line: `specmla demo`, `generate`, `info` and `bench`.

An error that the library raises on purpose, or a missing file, is one line on stderr and exit
code 2.
"""

from __future__ import annotations

import sys

from specmla.errors import SpecMLAError

_MISSING = "specmla: the command line needs the extra 'demo': pip install 'specmla[demo]'"


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
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=words or ["--help"], prog_name="specmla", standalone_mode=False)
    except SystemExit as stop:  # the benchmark's own parser has reported already
        return stop.code if isinstance(stop.code, int) else 2
    except typer.TyperException as error:
        print(f"specmla: {_one_line(error.format_message())}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("specmla: interrupted", file=sys.stderr)
        return 130
    except (SpecMLAError, OSError) as error:
        print(f"specmla: {_one_line(str(error))}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
