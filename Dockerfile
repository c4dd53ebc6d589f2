# An image with ZeroMesh and its extras, for CPUs by default:
#
#     docker build -t zeromesh .
#     docker run --rm --shm-size 1g -v "$PWD/runs:/work/runs" zeromesh train examples/stdlib.json
#
# and for CUDA, whose driver the host has (with NVIDIA's container toolkit: docker run --gpus all ...):
#
#     docker build --build-arg TORCH=cu130 -t zeromesh:cuda .
#
# Tried: neither build, as there was no base image where this was written. Tried without one: its files, its wheel and
# its entry point, by tests/tools/test_dockerfile.py.
ARG PYTHON=3.12

# The compiler of the native kernels stays in this stage.
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY zeromesh zeromesh
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# The name of PyTorch's index: cpu, or a version of CUDA such as cu130.
ARG TORCH=cpu
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt torch --index-url https://download.pytorch.org/whl/${TORCH}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(ls /wheels/*.whl)[hf,datasets,plots,tensorboard]" && \
    rm -r /wheels
WORKDIR /work
COPY examples examples
ENTRYPOINT ["zeromesh"]
CMD ["--help"]
