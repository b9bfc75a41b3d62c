# syntax=docker/dockerfile:1
# specserve on one machine; for clusters, see deploy/Dockerfile. From the top of the repository:
#   docker build -t specserve .                                                     CPU
#   docker build -t specserve:cuda --build-arg TORCH_INDEX=URL-OF-THE-CUDA-WHEELS . CUDA
#   docker run --rm -p 8000:8000 --shm-size 2g specserve                            the demo pair
#   docker run --rm -p 8000:8000 --shm-size 2g --gpus all -v models:/models specserve:cuda \
#     serve --host 0.0.0.0 --target /models/target --draft /models/draft
# The first stage installs. The second runs, without pip's cache and the sources.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS install
# Index of torch's wheels, from which the version pinned in constraints.txt is taken. Empty: torch comes
# from the package index.
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH
WORKDIR /source
# Dependencies are large and change seldom, so they get a layer of their own. The package without its
# code is enough to name them.
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
# /ready says whether requests are accepted. The start period is long because loading a large model takes
# minutes. The image has no curl, so Python sends the request.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["specserve"]
# The loopback of a container is its own, so the server listens on all interfaces. Require API keys
# (http.api_keys_file) where others can reach it.
CMD ["serve", "--host", "0.0.0.0"]
