"""The interface of ``deepspeed.pipe``: a model as a list of layers, which trains whole or cut into stages."""

from zeromesh.engine.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
