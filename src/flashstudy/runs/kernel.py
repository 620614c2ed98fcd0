"""The kernel of a batch run: ipykernel without the garbage collections that imports and the exit would cost.

torch, transformers and pandas together are 850,000 objects that stay until the end. Looking through them again and
again costs two seconds of ten while they are imported, and two more when the process ends; so collections are rarer,
and none is made at the exit. Timed code collects nothing anyway (`measure.process`).
"""

import atexit
import gc

YOUNG, OLDER, OLDEST = 50_000, 20, 100  # objects, and rounds of the younger generation, between two collections


def main() -> None:
    """Start the kernel with the command line's arguments."""
    gc.set_threshold(YOUNG, OLDER, OLDEST)
    atexit.register(gc.freeze)
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
