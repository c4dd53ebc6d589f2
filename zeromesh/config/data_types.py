"""Section ``data_types``."""

from __future__ import annotations

from zeromesh.config.section import Dtype, Names, Section, key


class DataTypes(Section):
    """Dtypes of gradients and buffers, and what stays in fp32."""

    grad_accum_dtype: Dtype | None = key(
        None, "Dtype in which gradients are accumulated. Null: fp32 for 16-bit parameters."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype of the model's floating-point buffers, except running statistics of batch norms. Null: buffers keep "
        "their dtype.",
    )
    keep_in_fp32_modules: Names | None = key(
        None,
        "Patterns of names of parameters and buffers that have fp32 in a 16-bit run; * stands for any characters, and "
        "a pattern may match anywhere in a name. Null or auto: those that a model of transformers names itself "
        "(_keep_in_fp32_modules_strict; in fp16 also _keep_in_fp32_modules).",
    )
