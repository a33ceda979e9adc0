# docker build -t hf-posenc .
# docker build -t hf-posenc --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# docker run --rm -v "$PWD:/work" hf-posenc compare --tasks causal
FROM python:3.11-slim

# The wheels of torch: for the CPU, or for a version of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
# What is installed with it, from pyproject.toml.
ARG EXTRAS=train

COPY . /src
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH_VERSION" \
    && grep -v '^torch==' /src/constraints.txt >/tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[$EXTRAS]" \
    && rm -r /src /tmp/constraints.txt

WORKDIR /work
ENTRYPOINT ["hf-posenc"]
CMD ["--help"]
