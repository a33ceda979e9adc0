# docker build -t hf-posenc .
# docker run --rm -v "$PWD:/work" hf-posenc compare --tasks causal
#
# The default has the torch of PyPI, which runs on CPUs and on NVIDIA GPUs. For a smaller image for CPUs, or another version
# of CUDA, give the index of these wheels that https://pytorch.org/get-started names:
#
# docker build -t hf-posenc --build-arg PIP_EXTRA_INDEX_URL=INDEX --build-arg TORCH="torch==2.13.0+cpu" .
FROM python:3.11-slim

# pip reads it from the environment of the build.
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
# What is installed with it, from pyproject.toml.
ARG EXTRAS=train

COPY . /src
RUN pip install --no-cache-dir "$TORCH" \
    && grep -v '^torch==' /src/constraints.txt >/tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[$EXTRAS]" \
    && rm -r /src /tmp/constraints.txt

WORKDIR /work
ENTRYPOINT ["hf-posenc"]
CMD ["--help"]
