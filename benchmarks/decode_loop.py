"""One decode step of the default model in the measuring loop: over its kernels, through the library, by llama.cpp.

    python benchmarks/decode_loop.py --context 256
    pip install -c constraints.txt -e .[llama]     # first, for the row of llama.cpp on the same file

To reach: the loop takes at most 1.4 times its kernels' time in fp32, bf16 and INT8, 1.7 times in INT4; the fastest
4-bit variant at most 1.4 times llama.cpp's time a token. All rows of one run are interleaved.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator

from flashstudy.compress import checkpoints, rewrite, variants
from flashstudy.facts.recipes import Recipe, standard
from flashstudy.measure import choices, steps, timing

INT8 = Recipe("int8", "int8", kernel_path="unknown")
INT4 = Recipe("int4", "int4", granularity="group", group_size=64, kernel_path="unknown", head_format="int8")


def main() -> None:
    """A line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--budget-s", type=float, default=4.0)
    parser.add_argument("--compiled", action="store_true", help="elementwise operations through torch.compile")
    options = parser.parse_args()
    loaded = checkpoints.load_model()
    shapes = [tuple(matrix.weight.shape) for matrix in rewrite.matrices(loaded.model)]
    calls, pairs = {}, {}
    for recipe in (standard("fp32"), standard("bf16"), INT8, INT4):
        chosen = choices.best_kernels(recipe, shapes=shapes, n_threads=1)
        variant = variants.build(loaded, chosen)
        name = f"{chosen.weight_format} {chosen.kernel or 'dense'}"
        pairs[name] = pair = (
            steps.loop(variant, context=options.context, compiled=options.compiled),
            steps.kernels(variant, context=options.context),
        )
        calls |= {f"{name}, loop": pair[0], f"{name}, library": steps.decode(variant, context=options.context)}
        found = timing.compare(pair[1], pair[0], budget_s=options.budget_s, n_threads=1)
        print(f"{name:<28} loop / kernels {describe(found)}  loop {found.flash_s * 1e3:.2f} ms", flush=True)
    with llama_step(options.context) as llama:
        calls |= llama
        reference = next(iter(llama), f"{next(iter(pairs))}, loop")
        for name, found in timing.compare_many(calls, reference, budget_s=options.budget_s, n_threads=1).items():
            print(f"{name:<36} {found.flash_s * 1e3:8.2f} ms  / {reference} {describe(found)}", flush=True)


def describe(found: timing.Comparison) -> str:
    """Ratio, interval and whether the machine was busy."""
    busy = f" CONTENDED ({found.reason})" if found.contended else ""
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]{busy}"


@contextlib.contextmanager
def llama_step(context: int) -> Iterator[dict[str, Callable]]:
    """One step of llama.cpp on the GGUF file, behind `context` tokens; nothing where it is not installed."""
    try:
        import llama_cpp
    except ImportError as error:
        print(f"llama.cpp is left out: {error}")
        yield {}
        return
    path = checkpoints.locate(checkpoints.DEFAULT_MODEL).path
    model = llama_cpp.Llama(str(path), n_ctx=context + 8, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval(list(range(10, 10 + context)))

    def step() -> None:
        model.n_tokens = context  # eval drops what the cache holds beyond
        model.eval([100])

    yield {"llama.cpp Q4_1": step}
    model.close()


if __name__ == "__main__":
    main()
