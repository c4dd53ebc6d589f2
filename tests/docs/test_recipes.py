"""The recipes: each file is a configuration that loads, has a row of the page, and fits the machine of its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from recipes import FOLDER, HEADER, PAGE, RECIPES, Recipe
from zeromesh.apps.cli.main import app
from zeromesh.apps.train.train_settings import TrainSettings

PLANNED = [recipe for recipe in RECIPES if recipe.measured is None]


def test_each_file_has_a_recipe_and_each_recipe_a_row_of_the_page() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(recipe.name for recipe in RECIPES)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    assert [re.match(r"\| \[([\w-]+)\]", row)[1] for row in rows] == [recipe.name for recipe in RECIPES]
    for row, recipe in zip(rows, RECIPES, strict=True):
        assert row.count("|") == HEADER[0].count("|")
        assert ("measured" in row, "planned" in row) == (recipe.measured is not None, recipe.measured is None)


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_a_recipe_loads_and_its_command_parses(recipe: Recipe) -> None:
    settings = TrainSettings.load(recipe.path)
    assert settings.run is not None
    assert settings.run.ranks in (1, 2, 8, 16)
    sizes = settings.resolve_mesh(settings.run.ranks)
    assert settings.train_batch_size % sizes["data"] == 0
    commands = typer.main.get_command(app).commands
    commands["train"].make_context("train", [str(recipe.path), "--set", "run.steps=1"])


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.measured], ids=lambda recipe: recipe.name)
def test_measured_figures_are_on_the_page_that_is_named(recipe: Recipe) -> None:
    page, figures = recipe.measured
    _layout, seconds, tokens, *_ = figures.split(" | ")
    text = (PAGE.parent / page).read_text()
    assert seconds in text
    settings = TrainSettings.load(recipe.path)
    length = settings.model.sequence_length if settings.model else settings.huggingface.sequence_length
    assert settings.train_batch_size * length / float(seconds) == pytest.approx(
        float(tokens.replace(",", "")), rel=0.01
    )


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", PLANNED, ids=[recipe.name for recipe in PLANNED])
def test_the_layout_of_a_recipe_fits_its_machine(recipe: Recipe) -> None:
    answer = recipe.plan()
    assert answer["fits"], answer["lacks"]
    assert not answer["tight"]
    assert answer["seconds"] > 0
    assert Path(PAGE).read_text().count(answer["layout"]) >= 1
