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
# The first stage installs. The second runs, without pip's cache and the sources.
ARG BASE=python:3.11-slim

FROM ${BASE} AS install
# cpu is torch from an index of its own, which uv knows, unless TORCH_INDEX names a copy; cuda is torch as
# the package index has it, with CUDA's libraries. Nothing is installed whose hash is not in locks/; of
# torch's builds for CPUs uv wants to know the local version, too.
ARG TORCH=cpu
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/specserve && python -m venv /opt/tools
ENV PATH=/opt/specserve/bin:$PATH
WORKDIR /source
# Dependencies are large and change seldom, so they get a layer of their own.
COPY locks locks
RUN /opt/tools/bin/pip install --require-hashes --only-binary :all: -r locks/tools.txt
RUN if [ "$TORCH" = cpu ] && [ -z "$TORCH_INDEX" ]; then index="--torch-backend cpu"; \
       else index="${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}"; fi \
    && sed -i 's/^torch==[0-9.]*/&+cpu/' locks/torch-cpu.txt \
    && /opt/tools/bin/uv pip install --python /opt/specserve/bin/python --no-cache $index \
       --require-hashes --only-binary :all: -r locks/runtime.txt -r "locks/torch-$TORCH.txt"
COPY pyproject.toml README.md LICENSE ./
COPY specserve specserve
# Built by the setuptools of the lock.
RUN pip install --no-deps --no-build-isolation . && pip check && python -c 'import specserve.cluster.app'

FROM ${BASE}
LABEL org.opencontainers.image.title="specserve" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 10001 specserve
COPY --from=install /opt/specserve /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH \
    HF_HOME=/home/specserve/models \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
USER specserve
WORKDIR /home/specserve
RUN mkdir models
VOLUME /home/specserve/models
EXPOSE 8000
STOPSIGNAL SIGINT
# /ready says whether requests are accepted. The start period is long because loading a large model takes
# minutes. The image has no curl, so Python sends the request.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["specserve"]
# The loopback of a container is its own, so the server listens on all interfaces. Require API keys
# (http.api_keys_file) where others can reach it.
CMD ["serve", "--host", "0.0.0.0"]
