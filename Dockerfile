# syntax=docker/dockerfile:1
#
# smolcluster in a container: small, not root, without compilers or pip.
#
#   docker build -t smolcluster:cpu .
#   docker build -t smolcluster:cuda --build-arg VARIANT=cuda .
#   docker run --rm -v "$PWD/data:/data" --user "$(id -u):$(id -g)" smolcluster:cpu train gpt --workers 2
#
# Without a compiler training.compile does not work in it.

ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/smolcluster

# torch first: it is most of the image and changes rarely. PyPI's for Linux on x86_64 has CUDA in it, gigabytes of that;
# PyTorch's own index has one without.
ARG VARIANT=cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml ./
# hadolint ignore=DL3013 # as pyproject.toml says
RUN torch="$(sed -n 's/^ *"\(torch[^"]*\)",$/\1/p' pyproject.toml)"; \
    case "$VARIANT" in \
        cpu) pip --python /opt/smolcluster/bin/python install --index-url "$CPU_INDEX" "$torch" ;; \
        cuda) pip --python /opt/smolcluster/bin/python install "$torch" ;; \
        *) echo "VARIANT is cpu or cuda, not '$VARIANT'" >&2; exit 2 ;; \
    esac

# Extras of smolcluster, with commas between; `cluster` is what a token needs.
ARG EXTRAS=cluster
COPY README.md LICENSE ./
COPY configs configs
COPY logging logging
COPY src src
# hadolint ignore=DL3013 # as pyproject.toml says
RUN pip --python /opt/smolcluster/bin/python install ".[$EXTRAS]"; \
    rm -rf /opt/smolcluster/lib/python3*/site-packages/torch/include; \
    find /opt/smolcluster -name '*.a' -delete

FROM ${PYTHON}
RUN python -m pip uninstall --yes pip \
    && groupadd --gid 10001 smolcluster \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin smolcluster \
    && install --directory --owner 10001 --group 10001 /data
COPY --from=build /opt/smolcluster /opt/smolcluster
ENV PATH=/opt/smolcluster/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SMOLCLUSTER_CACHE=/data/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["smolcluster"]
CMD ["--help"]
