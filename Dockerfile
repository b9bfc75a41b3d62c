# syntax=docker/dockerfile:1
# specserve on one machine; for clusters, deploy/Dockerfile. From the top of the repository:
#   docker build -t specserve .                                                     CPU
#   docker build -t specserve:cuda --build-arg TORCH_INDEX=URL-OF-THE-CUDA-WHEELS . CUDA
#   docker run --rm -p 8000:8000 --shm-size 2g specserve                            the demo pair
#   docker run --rm -p 8000:8000 --shm-size 2g --gpus all -v models:/models specserve:cuda serve --host 0.0.0.0 --target /models/target --draft /models/draft
# The first stage installs, the second runs, and has neither pip's cache nor the sources.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS install
# An index of torch's wheels: empty for the package index's own choice. With it, the version that constraints.txt pins is taken from there.
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH
WORKDIR /source
# Dependencies change seldom and are large, so they are a layer of their own; the package without its code is enough to name them.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir specserve && echo '__version__ = "0"' > specserve/__init__.py \
    && if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"; fi \
    && pip install -c constraints.txt . \
    && pip uninstall --yes specserve
COPY specserve specserve
RUN pip install --no-deps . && python -c 'import specserve.cluster.app'

FROM python:${PYTHON}-slim
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
# /ready says whether requests are taken; loading a large model takes minutes, hence the long start. No curl in the image: Python asks.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["specserve"]
# Inside a container the loopback is the container's own, so it listens on all interfaces: ask for keys (http.api_keys_file) where others reach it.
CMD ["serve", "--host", "0.0.0.0"]
