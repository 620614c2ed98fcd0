"""The single changes that could shorten a decode step: each predicted by the cost model, ready to be applied.

A change is a recipe for the same model on the best kernel this machine has for it, or the loop that runs the model.
Predictions are times after the change over the time now, with the cost model's interval.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashstudy.compress import inspect_model
from flashstudy.compress.checkpoints import LoadedModel
from flashstudy.facts import recipes
from flashstudy.facts.recipes import Recipe
from flashstudy.measure import choices, machine
from flashstudy.measure.machine import MachineCard
from flashstudy.measure.statistics import Interval
from flashstudy.predict import roofline

FLOAT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
INT4_GROUP = 64
MOST_APPLIED = 2  # building and timing one more takes seconds, and predictions seldom separate the first two
LOOP_NAME = "a loop without the library's overhead"
EVALUATE = "evaluate it first with the notebook quantization_error"
QUALITY = {
    "fp32": "nothing is lost",
    "bf16": f"8 bits of precision: the loss is usually small, {EVALUATE}",
    # Measured by the notebook quantization_error on smollm2-135m, last 30% of the default text.
    "int8": "one scale a row cost 0.002 [-0.000, 0.004] nats a token on the default model; the notebook "
    "quantization_error tells yours",
    "int4": f"may cost much, and how much depends on the model: {EVALUATE}",
}


@dataclass(frozen=True)
class Change:
    """One change and a step's time after it over the time now: predicted, and measured where it was applied.

    recipe: None for the loop. in_loop: measured in the loop without overhead, still over the library's time now.
    skipped: why it cannot be done to this model here.
    """

    name: str
    recipe: Recipe | None = None
    predicted: Interval | None = None
    measured: Interval | None = None
    in_loop: Interval | None = None
    quality: str = ""
    skipped: str = ""

    @property
    def is_sure(self) -> bool:
        """Does it shorten the step, going by the whole interval of the measurement?"""
        return self.measured is not None and self.measured.high < 1

    @property
    def contradicted(self) -> bool:
        """Do measurement and prediction exclude each other?"""
        if self.predicted is None or self.measured is None:
            return False
        return self.measured.low > self.predicted.high or self.measured.high < self.predicted.low


def of_weights(loaded: LoadedModel, card: MachineCard, context: int) -> Iterator[Change]:
    """INT8 and INT4 weights, and the machine's fast float dtype where the model is in another one."""
    shapes, standard = _shapes(loaded), recipes.standard(FLOAT_NAMES[loaded.dtype])
    group = dict(granularity="group", group_size=INT4_GROUP)
    options = {
        "INT8 weights, one scale a row": Recipe("INT8", weight_format="int8", kernel_path="unknown"),
        f"INT4 weights, groups of {INT4_GROUP}": Recipe("INT4", weight_format="int4", kernel_path="unknown", **group),
    }
    if card.standard_dtype != loaded.dtype:
        options[f"weights in {card.standard_dtype}"] = recipes.standard(FLOAT_NAMES[card.standard_dtype])
    for name, recipe in options.items():
        quality = QUALITY[recipe.weight_format]
        if reason := _does_not_fit(recipe, shapes):
            yield Change(name, skipped=reason, quality=quality)
            continue
        try:
            chosen = choices.best_kernels(recipe, shapes=shapes)
            predicted = _ratio(loaded, card, chosen, standard, context)
        except ValueError as error:
            yield Change(name, skipped=str(error), quality=quality)
            continue
        yield Change(name, chosen, predicted, quality=quality)


def of_the_loop(loaded: LoadedModel, card: MachineCard, context: int) -> Change:
    """The measuring loop in the library's place, without a measurement yet.

    Its dispatch lies between two engines of the cost model: as many kernels as eager, far less Python for each. The
    estimate is midway between them in ln(time).
    """
    standard = recipes.standard(FLOAT_NAMES[loaded.dtype])
    compiled = _ratio(loaded, card, dataclasses.replace(standard, engine="compiled"), standard, context)
    predicted = Interval(math.sqrt(min(compiled.estimate, 1.0)), min(compiled.low, 1.0), 1.0)
    return Change(LOOP_NAME, predicted=predicted, quality="nothing is lost: the same weights")


def promising(changes: list[Change]) -> list[Change]:
    """The changes of the weights with the lowest predicted times, the lowest first, MOST_APPLIED at most."""
    able = [change for change in changes if change.recipe is not None]
    return sorted(able, key=lambda change: change.predicted.estimate)[:MOST_APPLIED]


def helpful(changes: tuple[Change, ...]) -> Change | None:
    """The measured change with the shortest step, `is_sure` or not; None where none is below the time now."""
    able = [change for change in changes if change.measured is not None and change.measured.estimate < 1]
    return min(able, key=lambda change: change.measured.estimate, default=None)


def _shapes(loaded: LoadedModel) -> list[tuple[int, int]]:
    """(out, in) of every linear layer that a recipe replaces; a head tied to the embedding stays."""
    table = loaded.model.get_input_embeddings().weight
    return [
        tuple(layer.weight.shape)
        for layer in inspect_model.layers(loaded.model)
        if hasattr(layer, "in_features") and layer.weight is not table
    ]


def _does_not_fit(recipe: Recipe, shapes: list[tuple[int, int]]) -> str:
    odd = sorted({width for _, width in shapes if recipe.group_size and width % recipe.group_size})
    return f"groups of {recipe.group_size} do not divide in_features {', '.join(map(str, odd))}" if odd else ""


def _ratio(loaded: LoadedModel, card: MachineCard, recipe: Recipe, standard: Recipe, context: int) -> Interval:
    size = dict(phase="decode", batch=1, context=context)
    hardware = machine.as_hardware(card)
    after, now = (roofline.step_time(loaded.shape, hardware, one, **size) for one in (recipe, standard))
    return Interval(*roofline.ratio(after, now))
