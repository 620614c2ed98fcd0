"""Every figure of the notebooks: pure functions of a tidy frame and an axes that return the axes.

`set_style` once in a notebook, `axes` for the panels, then one function a figure.
"""

from flashstudy.share.kernel_figures import bandwidth, compression, fragmentation
from flashstudy.share.quality_figures import pruned_quality, quality, sqnr, sqnr_by_depth
from flashstudy.share.ratio_figures import crossover, ratios
from flashstudy.share.roofline_figures import parts, roofline
from flashstudy.share.start_figures import start_memory, start_time
from flashstudy.share.style import axes, set_style

__all__ = [
    "axes", "bandwidth", "compression", "crossover", "fragmentation", "parts", "pruned_quality", "quality", "ratios",
    "roofline", "set_style", "sqnr", "sqnr_by_depth", "start_memory", "start_time",
]  # fmt: skip
