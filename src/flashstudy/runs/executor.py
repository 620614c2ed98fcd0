"""papermill's command line, started without a grammar that nobody here asks for.

jsonschema imports rfc3987_syntax, which builds a Lark grammar at import (2 of papermill's 4 seconds), to check that
texts marked as "iri" are well formed. No schema of a notebook marks one, and jsonschema does without the module.
"""

import sys


def skip_iri_grammar() -> None:
    """Keep jsonschema from importing rfc3987_syntax; to be called before nbformat is imported."""
    sys.modules.setdefault("rfc3987_syntax", None)


def main() -> None:
    """Run papermill with the command line's arguments."""
    skip_iri_grammar()
    from papermill.__main__ import papermill

    papermill()


if __name__ == "__main__":
    main()
