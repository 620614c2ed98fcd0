import dataclasses
import json
from types import SimpleNamespace

import pytest

from flashstudy.facts.recipes import ARTICLE_FLASH, BEST_FLASH
from flashstudy.measure import choices, machine

SHAPES = [(96, 64)] * 3 + [(64, 96)]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `kernels.fill` was asked for; it answers with ARTICLE_FLASH's path and says whether it was busy."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(machine, "card", lambda: SimpleNamespace(standard_dtype="float32"))
    seen, busy = [], []
    filled = dataclasses.replace(ARTICLE_FLASH, name="filled")

    def fill(recipe, **options):
        seen.append((recipe, options))
        return filled, bool(busy and busy.pop())

    monkeypatch.setattr(choices.kernels, "fill", fill)
    return seen, busy


def test_a_choice_is_made_once_for_the_same_layers_in_any_order(asked):
    first = choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    assert choices.best_kernels(BEST_FLASH, shapes=SHAPES[::-1]) == first
    assert first.name == "filled" and len(asked[0]) == 1
    choices.best_kernels(BEST_FLASH, shapes=SHAPES, refresh=True)
    assert len(asked[0]) == 2


def test_twice_as_many_layers_of_the_same_shapes_are_the_same_choice(asked):
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES * 2)
    assert len(asked[0]) == 1


def test_another_dtype_of_the_standard_is_another_choice(asked, monkeypatch):
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    monkeypatch.setattr(machine, "card", lambda: SimpleNamespace(standard_dtype="bfloat16"))
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    assert len(asked[0]) == 2


def test_another_recipe_thread_number_or_shape_is_another_choice(asked):
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES, n_threads=1)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES[1:])
    choices.best_kernels(dataclasses.replace(BEST_FLASH, sparsity=0.25), shapes=SHAPES)
    assert len(asked[0]) == 4
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    assert len(asked[0]) == 4  # the first one is still kept


def test_a_choice_made_on_a_busy_machine_is_not_kept(asked):
    asked[1].append(True)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    assert len(asked[0]) == 2


def test_a_new_kernel_in_the_table_makes_the_choice_anew(asked, monkeypatch):
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    monkeypatch.setattr(choices, "KERNELS", choices.KERNELS[1:])
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    assert len(asked[0]) == 2


@pytest.mark.parametrize("damage", ["", "[1]", '{"half": ', '{"key": 1}', '{"key": "[]"}'])
def test_a_damaged_file_counts_as_no_choice(asked, damage):
    choices.best_kernels(BEST_FLASH, shapes=SHAPES)
    (path,) = machine.cache_folder().glob("kernels-*.json")
    assert len(json.loads(path.read_text())) == 1
    path.write_text(damage)
    assert choices.best_kernels(BEST_FLASH, shapes=SHAPES).name == "filled" and len(asked[0]) == 2
