"""A page that a script of this folder writes: made anew, or with `--check` compared with the committed one."""

import argparse
import sys
from pathlib import Path


def write_or_check(page: Path, text: str, description: str | None) -> int:
    """Write `text` to `page`; with `--check` on the command line exit code 1 if it differs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed page differs")
    if not parser.parse_args().check:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        return 0
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        sys.stderr.write(f"{page.name} is not what its source says: run `python {sys.argv[0]}`\n")
        return 1
    return 0
