"""Where the editable checkout lies: data and notebooks are read from there, so the package runs from nowhere else."""

from pathlib import Path


class NotACheckoutError(RuntimeError):
    """The package was imported from outside its repository."""


def root() -> Path:
    """The repository's root. Raises NotACheckoutError where the package was installed without its repository."""
    return _root_above(Path(__file__))


def data_dir() -> Path:
    """The folder of the sourced tables (`data/README.md` describes each)."""
    return root() / "data"


def notebooks_dir() -> Path:
    """The folder of the notebooks."""
    return root() / "notebooks"


def _root_above(module: Path) -> Path:
    parents = module.resolve().parents
    candidate = parents[3] if len(parents) > 3 else parents[-1]  # root/src/flashstudy/facts/checkout.py
    if not ((candidate / "pyproject.toml").is_file() and (candidate / "data" / "claims.csv").is_file()):
        raise NotACheckoutError(
            "flashstudy runs from its repository only: clone it, then `make lab` or `pip install -e .` inside it"
        )
    return candidate
