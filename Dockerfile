# syntax=docker/dockerfile:1
# specserve on one machine; for clusters, see deploy/Dockerfile. From the top of the repository:
#   make image                                             for CPUs, by docker or podman
#   make image IMAGE=specserve:cuda TORCH=cuda             with CUDA's libraries, gigabytes larger
#   docker run --rm -p 8000:8000 --shm-size 2g specserve   the demo pair
#   docker run --rm -p 8000:8000 --shm-size 2g --gpus all -v models:/models specserve:cuda \
#     serve --host 0.0.0.0 --target /models/target --draft /models/draft
# A tag may name another image tomorrow. For a build that can be repeated, name the base by its digest:
#   docker buildx imagetools inspect python:3.11-slim                               prints it
#   docker build -t specserve --build-arg BASE=python@sha256:DIGEST .
# The first stages install, and compile FlashInfer's kernels for GPUs. The last runs, without pip's cache,
# the sources and nvcc.
ARG BASE=python:3.11-slim

FROM ${BASE} AS dependencies
# cpu is torch from an index of its own, which uv knows, unless TORCH_INDEX names a copy; cuda is torch as
# the package index has it, with CUDA's libraries. Nothing is installed whose hash is not in deploy/locks/; of
# torch's builds for CPUs uv wants to know the local version, too.
ARG TORCH=cpu
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/specserve && python -m venv /opt/tools
ENV PATH=/opt/specserve/bin:$PATH
WORKDIR /source
# Dependencies are large and change seldom, so they get a layer of their own.
COPY deploy/locks locks
RUN /opt/tools/bin/pip install --require-hashes --only-binary :all: -r locks/tools.txt
RUN if [ "$TORCH" = cpu ] && [ -z "$TORCH_INDEX" ]; then index="--torch-backend cpu"; \
       else index="${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}"; fi \
    && if [ "$TORCH" = cuda ]; then flashinfer="-r locks/flashinfer.txt"; fi \
    && sed -i 's/^torch==[0-9.]*/&+cpu/' locks/torch-cpu.txt \
    && /opt/tools/bin/uv pip install --python /opt/specserve/bin/python --no-cache $index \
       --require-hashes --only-binary :all: -r locks/runtime.txt -r "locks/torch-$TORCH.txt" $flashinfer

# Needs this one file of specserve, so that the kernels are compiled again only when it or a lock changes.
# ARGS='--build-arg GPU_ARCHITECTURES="9.0a"' of `make image` is Hopper alone, in a fraction of the time.
FROM dependencies AS kernels
ARG TORCH=cpu
ARG GPU_ARCHITECTURES="8.0 9.0a 10.0f 12.0f"
RUN mkdir /kernels && if [ "$TORCH" = cuda ]; then \
       apt-get update && apt-get install -y --no-install-recommends g++; fi
RUN if [ "$TORCH" = cuda ]; then /opt/tools/bin/uv pip install --python /opt/specserve/bin/python --no-cache \
       --require-hashes --only-binary :all: -r locks/nvcc.txt; fi
COPY specserve/flashinfer_kernels.py ./
RUN if [ "$TORCH" = cuda ]; then \
       python flashinfer_kernels.py --architectures "$GPU_ARCHITECTURES" --out /kernels; fi

FROM dependencies AS install
ARG TORCH=cpu
COPY --from=kernels /kernels /kernels
RUN if [ "$TORCH" = cuda ]; then \
       cp -rT /kernels "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/flashinfer/data/aot"; fi
COPY pyproject.toml README.md LICENSE ./
COPY specserve specserve
# Built by the setuptools of the lock.
RUN pip install --no-deps --no-build-isolation . && pip check && python -c 'import specserve.cluster.app' \
    && specserve doctor

FROM ${BASE}
ARG TORCH=cpu
LABEL org.opencontainers.image.title="specserve" org.opencontainers.image.licenses="Apache-2.0"
# tini is process 1: it passes signals on, and reaps what outlives its parent. Triton compiles its launchers
# at their first use.
RUN if [ "$TORCH" = cuda ]; then compiler="gcc libc6-dev"; fi; apt-get update \
    && apt-get install -y --no-install-recommends tini $compiler && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 specserve
COPY --from=install /opt/specserve /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH \
    HF_HOME=/home/specserve/models \
    FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
USER specserve
WORKDIR /home/specserve
RUN mkdir models
VOLUME /home/specserve/models
EXPOSE 8000
STOPSIGNAL SIGINT
# Asks /ready at the port of the server's own command line, with TLS if that says so. The start period is long
# because loading a large model takes minutes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-m", "specserve.cli.health_check"]
ENTRYPOINT ["tini", "--", "specserve"]
# The loopback of a container is its own, so the server listens on all interfaces. Require API keys
# (http.api_keys_file) where others can reach it.
CMD ["serve", "--host", "0.0.0.0"]
