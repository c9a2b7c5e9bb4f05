# The project with all that it trains with; `make quickstart` is what a container does by itself.
#
#     docker build -t auditable-dp .                                  # CPU
#     docker build -t auditable-dp-cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .   # driver 580 or newer
#     docker run --shm-size 2g -v "$PWD/runs:/project/runs" auditable-dp
#     enroot import -o auditable-dp.sqsh dockerd://auditable-dp-cuda    # for Enroot and Pyxis:
#     srun --container-image=auditable-dp.sqsh --container-mounts=/shared --container-workdir=/project \
#         python launch_scripts/train.py ARGUMENTS                    # --run_dir on /shared; Apptainer: launch_scripts/cluster/
#
# torch 2.13 comes for CUDA 13.0 with cuDNN and NCCL of its own. Training compiles no op of DeepSpeed; one that you add needs the
# toolkit of that version, so the base is a `devel` image. On a machine without a GPU add `-e DS_ACCELERATOR=cpu` to `docker run`, or
# `--build-arg PIP_EXTRA_INDEX_URL=...`, an index of CPU builds of torch, which are gigabytes smaller.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# What a bare machine needs for the two commands, and for starting ranks on other hosts. Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git iproute2 make openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 trainer && mkdir /project && chown trainer /project
USER 1000
WORKDIR /project

# The packages are a layer of their own: other sources leave it as it is.
ARG PIP_EXTRA_INDEX_URL=""
COPY --chown=trainer Makefile requirements.txt pyproject.toml ./
RUN make venv

COPY --chown=trainer . .
RUN mkdir -p runs
ENV PATH=/project/.venv/bin:$PATH PYTHONUNBUFFERED=1
CMD ["make", "quickstart"]
