from dataclasses import fields

from zeromesh.apps.plan.choose.parallel_layout import PLANNED, ParallelLayout
from zeromesh.base.axes import AXES, data_size, shard_size
from zeromesh.config.feature_sections import MeshSizes


def test_the_configuration_has_a_size_for_each_axis() -> None:
    assert [*MeshSizes.model_fields] == [*AXES]


def test_the_planner_has_a_size_for_each_axis_that_it_plans() -> None:
    assert {*PLANNED} <= {field.name for field in fields(ParallelLayout)}


def test_sizes_of_the_batch_and_of_shard_groups_are_products() -> None:
    sizes = dict(zip(AXES, (2, 3, 5, 7, 11, 13), strict=True))
    assert data_size(sizes) == 2 * 3
    assert shard_size(sizes) == 3 * 7
