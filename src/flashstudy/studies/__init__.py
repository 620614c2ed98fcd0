"""One module per notebook, same name: what is measured and how it becomes rows.

A study is a frozen `Params` (its only schema) and `run(params, progress=None, evidence=None)`, which returns a tidy
frame. Studies neither print nor plot; `headline(result)` puts the answer into one computed sentence.
"""

READING_ORDER: tuple[str, ...] = (
    "slowdown_attribution",
    "quantization_error",
    "pruning_fragmentation",
    "memory_bandwidth",
    "cold_start",
    "length_crossover",
)
